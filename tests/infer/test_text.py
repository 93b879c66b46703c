"""Text of answers that grow."""

import json

import numpy as np
import pytest

from dflash_jax.infer.text import GrowingText, Text, cut_at_stop, settled
from tests import tiny


def test_settled():
    assert settled("abc", ["cd"]) == "ab"
    assert settled("abc", ["bcd", "cx"]) == "a"
    assert settled("abc", ["x"]) == "abc"


@pytest.fixture(scope="module")
def text():
    """A tokenizer whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": len(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    text = Text("")
    text._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return text


def answers(text, count):
    """Tokens of texts with characters of several tokens, bytes that are none, and special tokens; and an endless source
    of sizes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte, encode = {c: i for i, c in enumerate(alphabet)}, pre_tokenizers.ByteLevel(add_prefix_space=False)
    rng = np.random.default_rng(0)
    for _ in range(count):
        pieces = rng.choice(["a", "b ", "é", "😀", "日本", "\n"], size=rng.integers(1, 12))
        tokens = [byte[c] for part, _ in encode.pre_tokenize_str("".join(pieces)) for c in part]
        for at in rng.integers(0, len(tokens), size=rng.integers(0, 3)):
            tokens.insert(at, int(rng.integers(0, len(alphabet) + 1)))  # often no character at all
        yield tokens, lambda: int(rng.integers(1, 4))


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("stops", [(), ("é😀",), ("ab ",), ("\ufffd", "本"), ("a", "日")])
def test_an_answer_ends_at_the_same_token_and_text_however_tokens_arrive(text, stops, after):
    """As if they came one by one: at the first token whose text, with all before it, has a stop string. A stream shows
    the same text."""
    find = text.find_stop(stops, after) or (lambda tokens, new: None)
    for tokens, size in answers(text, 150):
        ends = [
            count
            for count in range(after + 1, len(tokens) + 1)
            if any(_ends_after(text, tokens[:count], stop, after) for stop in stops)
        ]
        growing, shown, at, end = GrowingText(text, stops, after), "", 0, None
        while at < len(tokens) and end is None:
            new = min(size(), len(tokens) - at)
            end = find(tokens[: at + new], new)
            shown += growing.add(tokens[at : at + new if end is None else end])
            at += new
        assert end == min(ends, default=None)
        answer = tokens[:end]
        whole = text.answer(answer, stops, after)
        assert whole.startswith(shown)
        assert shown + growing.end(answer) == whole
        if not after:
            assert whole == cut_at_stop(text.decode(answer), stops)


def _ends_after(text, tokens, stop, after):
    """Whether the text of tokens has a stop string that ends behind the whole characters of the first `after`."""
    begin = len(text._tokenizer.decode(tokens[:after]).rstrip("\ufffd"))
    whole = text._tokenizer.decode(tokens)
    return any(whole.startswith(stop, i) and i + len(stop) > begin for i in range(len(whole)))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (
            "tokenizer_config.json",
            '{"model_max_length": "x"}',
            "tokenizer_config.json: model_max_length must be",
        ),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json must be JSON"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json must hold a JSON object"),
        ("tokenizer.json", '{"model": null}', "must hold a tokenizer"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": 0, "b": 1000000000}}}',
            "1000000000 is not a plausible id of 2 tokens",
        ),
        (
            "tokenizer_config.json",
            json.dumps({"unk_token": "x" * 10**5}),
            "unk_token must have at most",
        ),
        ("vocab.json", '{"a": 4000000000}', "vocab.json: 4000000000 is not a plausible id"),
        ("added_tokens.json", '{"a": null}', "added_tokens.json: None is not a plausible id"),
    ],
)
def test_tokenizer_files_that_cannot_be_used_are_named(tmp_path, name, content, named):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=named) as failed:
        Text(str(tmp_path))
    assert str(tmp_path) in str(failed.value)
    assert str(failed.value).isprintable()
