"""Which token ids a checkpoint's tokenizer can turn into text."""

import json
from collections.abc import Set
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax.checkpoint.tokenizer import listed_tokens


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


def token_id(directory: Path, text: str) -> int:
    """The id of a token of a checkpoint's tokenizer.

    Args:
        text: the whole token, such as `<|MASK|>`.

    Raises:
        ValueError: there is no such token, or no tokenizer that can be read.
    """
    from dflash_jax.infer.text import Text

    tokens = Text(str(directory)).tokens
    if text not in tokens:
        override = json.dumps({"mask_token_id": max(tokens.values(), default=-1) + 1})
        raise ValueError(
            f"{directory} must hold a tokenizer with the drafter's mask token {text!r:.80}, found none of this name. "
            "SGLang adds such a token behind all others; if the drafter was trained so, say "
            f"--drafter-config '{override}'"
        )
    return tokens[text]


def _token_ids(directory: Path) -> Set[int] | None:
    if (listed := listed_tokens(directory)) is not None:
        return listed
    if (directory / "tokenizer.model").is_file() or (directory / "vocab.json").is_file():
        from dflash_jax.infer.text import Text

        return Text(str(directory)).used_tokens
    return None
