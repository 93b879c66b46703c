"""Which token ids a checkpoint's tokenizer can turn into text."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax.files import read_json, reading, said


def decodable_tokens(directory: Path, vocab_size: int) -> Bool[Array, " V"] | None:
    """Ids that stand in the tokenizer's vocabulary; None where all do, or where there is no tokenizer.

    Embedding tables are often larger than the vocabulary, by rows that nobody trained.

    Raises:
        ValueError: the tokenizer files cannot be read.
    """
    ids = _token_ids(directory)
    if ids is None:
        return None
    known = np.zeros(vocab_size, bool)
    known[[i for i in ids if 0 <= i < vocab_size]] = True
    return None if known.all() else jnp.asarray(known)


def _token_ids(directory: Path) -> set[int] | None:
    path = directory / "tokenizer.json"
    if path.is_file():
        # Read as it is: to build a tokenizer takes seconds.
        return _listed(path) | _added(directory / "tokenizer_config.json")
    if (directory / "tokenizer.model").is_file() or (directory / "vocab.json").is_file():
        from dflash_jax.infer.text import Text

        return Text(str(directory)).used_tokens
    return None


def _listed(path: Path) -> set[int]:
    """Tokens of a `tokenizer.json`."""
    with reading(path):
        try:
            raw = read_json(path)
            vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or []
            ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
            return {_id(i) for i in ids} | {_id(token["id"]) for token in added}
        except Exception as error:  # values of any other type
            why = said(error).removeprefix(f"{path} ")
            raise ValueError(f"{path} must hold a tokenizer that can be read: {why}") from error


def _added(path: Path) -> set[int]:
    """Tokens that only `tokenizer_config.json` adds."""
    if not path.is_file():
        return set()
    with reading(path):
        return {_id(int(i)) for i in read_json(path).get("added_tokens_decoder") or {}}


def _id(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"a token id must be a whole number from 0, got {value!r:.60}")
    return value
