"""A small vocabulary with tokens that are hard to constrain: halves of characters, ends of strings, blanks."""

from collections.abc import Sequence
from pathlib import Path

from dflash_jax.constraints.vocabulary import Vocabulary
from tests import tiny

# Each is made of two tokens before it, as in byte-pair encoding.
MERGED = [
    *['"}', '",', '":', '", ', '": ', '{"', '["', '"]', "}}", "},", '\\"', "\\n", "\\u", "\\u0", "\\\\", "\\\\n"],
    *[
        "\n ",
        "\n  ",
        "\n    ",
        "  ",
        "    ",
        " {",
        ' "',
        "é",
        "中",
        '中"',
        'é",',
        "ab",
        "abc",
        "tr",
        "true",
        "nu",
        "null",
    ],
    *["12", "123", "-1", "1.", "0.5", "1e", "e5", "[]", "{}", "]}", '"a', '"a"', '"a":', '"b": ', "a b", "\t", "\t\t"],
    *["<t", "</think>", '"\n', "}\n", ",\n", "é中", "\U0001f600", "\\ud", "d8", "\\ud8"],
]
END, MASK = 0, 1
FIRST = 2  # the token of byte 0
TEXTS = [bytes([byte]) for byte in range(256)] + list(dict.fromkeys(x.encode() for x in MERGED if len(x.encode()) > 1))
TEXTS += [b"\xc3\xa9\xe4", b'\xb8\xad"', b"\xf0\x9f", b"\x98\x80", b'"\xe4\xb8']  # beginnings and ends of characters
SIZE = -(-(FIRST + len(TEXTS)) // 8) * 8


def vocabulary(marks: Sequence[str] = ()) -> Vocabulary:
    """The vocabulary; ids from the last text on are special tokens with these names, then no tokens."""
    tokens: list[bytes | None] = [None, None, *TEXTS]
    special = {"<end>": END, "<mask>": MASK}
    for mark in marks:  # a text that is one is no text any more
        place = tokens.index(mark.encode()) if mark.encode() in tokens else len(tokens)
        tokens[place : place + 1] = [None]
        special[mark] = place
    return Vocabulary([*tokens, *[None] * (size(marks) - len(tokens))], special)


def size(marks: Sequence[str] = ()) -> int:
    """Rows of the embedding table of such a vocabulary."""
    return -(-(FIRST + len(TEXTS) + len(marks)) // 8) * 8


def write_tokenizer(directory: Path, marks: Sequence[str] = (), template: str | None = None) -> Path:
    """The same as files; texts are encoded byte by byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letter = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    ids = {"".join(letter[byte] for byte in text): FIRST + i for i, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.BPE(ids | {"<end>": END, "<mask>": MASK}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    # As in published vocabularies: those with bars are special, others are decoded as text.
    tokenizer.add_tokens([AddedToken(mark, special="|" in mark, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>")
    fast.chat_template = template or "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    return directory


def write_models(directory: Path) -> Path:
    """A target with this tokenizer, and a drafter of each kind under its name."""
    write_tokenizer(tiny.write_target(directory / "target", tiny.target_config(vocab_size=SIZE, eos_token_id=END)))
    for name, raw in tiny.kinds().items():
        raw = raw | {"vocab_size": SIZE, "eos_token_id": None}
        if "dflash_config" in raw:
            raw["dflash_config"] = raw["dflash_config"] | {"mask_token_id": MASK}
        tiny.write_drafter(directory / name, raw)
    return directory
