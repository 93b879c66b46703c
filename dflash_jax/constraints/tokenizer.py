"""The bytes of a tokenizer's tokens."""

import json
import re
from collections.abc import Callable
from typing import Any

from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.vocabulary import Vocabulary
from dflash_jax.files import Value

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of SentencePiece, a byte that is no character of its own


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """What the tokens of a tokenizer from `transformers` are made of.

    Args:
        tokenizer: None where a checkpoint has none.
        size: of the target's vocabulary; ids beyond the tokenizer's are no text.

    Raises:
        ConstraintError: its tokens do not say which bytes they are.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConstraintError("no_constraints", "constraints need the target's tokenizer.json, which was not found")
    given = json.loads(backend.to_str())
    kinds = set(_kinds(given.get("decoder"))) | set(_kinds(given.get("pre_tokenizer")))
    if "ByteLevel" in kinds:
        read = _byte_level()
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        read = _sentencepiece
    elif "Fuse" in kinds:  # tokens are their text
        read = lambda token: token.encode(errors="replace")
    else:
        raise ConstraintError(
            "no_constraints",
            f"constraints need a tokenizer of bytes (ByteLevel) or SentencePiece, found {sorted(filter(None, kinds))}",
        )
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    tokens = list[bytes | None]([None] * size)
    for text, i in tokenizer.get_vocab().items():
        if 0 <= i < size and i not in added:
            tokens[i] = read(text)
    return Vocabulary(tokens, {text: i for i, text in added.items() if 0 <= i < size})


def _kinds(part: Value) -> list[str]:
    """Types of a part of a tokenizer, and of those that it is made of."""
    if not isinstance(part, dict):
        return []
    inner = [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return [part.get("type", ""), *(kind for one in inner for kind in _kinds(one))]


def _byte_level() -> Callable[[str], bytes | None]:
    """Reads tokens in which each character stands for a byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

    def read(token: str) -> bytes | None:
        if not all(character in byte_of for character in token):
            return None
        return bytes(byte_of[character] for character in token)

    return read


def _sentencepiece(token: str) -> bytes | None:
    if found := _BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("\u2581", " ").encode(errors="replace")
