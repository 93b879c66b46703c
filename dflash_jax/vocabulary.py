"""Which token ids a checkpoint's tokenizer can turn into text."""

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


def _token_ids(directory: Path) -> Set[int] | None:
    if (listed := listed_tokens(directory)) is not None:
        return listed
    if (directory / "tokenizer.model").is_file() or (directory / "vocab.json").is_file():
        from dflash_jax.infer.text import Text

        return Text(str(directory)).used_tokens
    return None
