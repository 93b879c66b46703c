"""Text of answers that grow."""

import numpy as np
import pytest

from dflash_jax.infer.text import GrowingText, Text, cut_at_stop, settled
from tests import tiny


def test_settled():
    assert settled("abc", ["cd"]) == "ab"
    assert settled("abc", ["bcd", "cx"]) == "a"
    assert settled("abc", ["x"]) == "abc"


@pytest.mark.parametrize("stops", [(), ("é😀",), ("ab ",)])
def test_text_grows_to_what_it_is_as_a_whole(stops):
    """In pieces of any size, with characters of several tokens, bytes that are none, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"<end>": len(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    text = Text("")
    text._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    byte = {c: i for i, c in enumerate(alphabet)}
    rng = np.random.default_rng(0)
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for _ in range(200):
        pieces = rng.choice(["a", "b ", "é", "😀", "日本", "\n"], size=rng.integers(1, 12))
        tokens = [byte[c] for part, _ in encode.pre_tokenize_str("".join(pieces)) for c in part]
        for at in rng.integers(0, len(tokens), size=rng.integers(0, 3)):
            tokens.insert(at, int(rng.integers(0, len(alphabet) + 1)))  # often no character at all
        whole = cut_at_stop(text.decode(tokens), stops)
        growing, shown, at = GrowingText(text, stops), "", 0
        while at < len(tokens):
            size = int(rng.integers(1, 4))
            shown += growing.add(tokens[at : at + size])
            assert whole.startswith(shown)
            at += size
        assert shown + growing.end(tokens) == whole


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
    ],
)
def test_tokenizer_files_that_cannot_be_used_are_named(tmp_path, name, content, named):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=named) as failed:
        Text(str(tmp_path))
    assert str(tmp_path) in str(failed.value)
    assert str(failed.value).isprintable()
