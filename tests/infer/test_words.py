"""`generate` and `spec_generate` with strings and messages."""

import pytest

from dflash_jax import Text, begin_decoding, generate, load_drafter, load_target, spec_generate
from tests import tiny


@pytest.fixture(scope="module")
def models(pair):
    return load_target(pair / "target", dtype="float32"), load_drafter(pair / "drafter", dtype="float32")


def test_strings_and_messages(models, pair):
    target, drafter = models
    text = Text(str(pair / "target"))
    said = lambda words: [{"role": "user", "content": words}]
    ids = [text.encode_chat(said(words)) for words in ("hello", "abc")]
    expected = generate(target, ids, max_new_tokens=12)
    assert (expected.texts, expected.steps) == ((), [0, 0])
    for prompts in (["hello", "abc"], [said("hello"), said("abc")], (said("hello"), "abc")):
        done = spec_generate(target, drafter, prompts, max_new_tokens=12)
        assert done.tokens == expected.tokens
        assert done.texts == [text.answer(tokens) for tokens in expected.tokens]
        assert done.steps == [len(lengths) for lengths in done.acceptance_lengths]
        assert done.seconds > 0
    for prompt in ("hello", said("hello")):
        assert generate(target, prompt, max_new_tokens=12).tokens == expected.tokens[:1]


def test_without_a_chat_template_a_string_is_continued(tmp_path):
    tiny.write_target(tmp_path, tiny.target_config())
    tiny.write_tokenizer(tmp_path, chat=False)
    target, text = load_target(tmp_path, dtype="float32"), Text(str(tmp_path))
    done = generate(target, "hello", max_new_tokens=6)
    assert done.tokens == generate(target, [text.encode("hello")], max_new_tokens=6).tokens
    with pytest.raises(ValueError, match="was not loaded from a directory, and has no tokenizer; give token ids"):
        generate(target.replace(directory=""), "hello", max_new_tokens=6)


def test_what_cannot_be_read_is_said(models):
    target, _ = models
    for prompts in ({"role": "user", "content": "a"}, ["a", [1, 2]], [[1, 2], "a"]):
        with pytest.raises((ValueError, TypeError)):  # the latter from the check of types in tests
            generate(target, prompts, max_new_tokens=4)
    state, first = begin_decoding(target, None, ["hello"], max_length=64)
    assert first == generate(target, "hello", max_new_tokens=1).tokens[0]
    assert state.lengths.shape == (1,)
