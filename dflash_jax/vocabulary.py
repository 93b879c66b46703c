"""A checkpoint's tokenizer, and which token ids it can turn into text.

The only user of `transformers` outside the tests.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax.checkpoint.tokenizer import check_tokenizer_files, listed_tokens
from dflash_jax.files import one_line, read_json, said
from dflash_jax.process import torch_hidden

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def decodable_tokens(directory: Path, vocab_size: int) -> Bool[Array, " V"] | None:
    """Ids that stand in the tokenizer's vocabulary; None where all do, or where there is no tokenizer.

    Embedding tables are often larger than the vocabulary, by rows that nobody trained.

    Raises:
        ValueError: the tokenizer files cannot be read.
    """
    if (ids := listed_tokens(directory)) is None:
        if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
            return None
        ids = load_tokenizer(directory).get_vocab().values()
    known = np.zeros(vocab_size, bool)
    known[[i for i in ids if 0 <= i < vocab_size]] = True
    return None if known.all() else jnp.asarray(known)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint; None where it has no files of one.

    Raises:
        ValueError: there are tokenizer files, but they cannot be used.
    """
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    check_tokenizer_files(directory)
    with torch_hidden():
        from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        with torch_hidden():
            tokenizer: Any = _tokenizer_class(directory).from_pretrained(str(directory))
        tokenizer.decode(tokenizer.encode("a"))  # some values are only looked at when they are needed
    except Exception as error:  # tokenizer files are read by several libraries, which raise what they like
        reason = said(error).strip().splitlines()[0]
        wrong = f"{directory} must hold a tokenizer (tokenizer.json and its config): {reason}"
        raise ValueError(one_line(wrong)) from error
    return tokenizer


def _tokenizer_class(directory: Path) -> Any:
    """transformers' class for a checkpoint's tokenizer. The common one, where the files name it, is not searched for
    among all models, which takes half a second, and two with torch installed."""
    place = directory / "tokenizer_config.json"
    if place.is_file() and read_json(place).get("tokenizer_class") == "TokenizersBackend":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def token_id(directory: Path, text: str) -> int:
    """The id of a token of a checkpoint's tokenizer.

    Args:
        text: the whole token, such as `<|MASK|>`.

    Raises:
        ValueError: there is no such token, or no tokenizer that can be read.
    """
    tokenizer = load_tokenizer(directory)
    tokens = tokenizer.get_vocab() if tokenizer else {}
    if text not in tokens:
        override = json.dumps({"mask_token_id": max(tokens.values(), default=-1) + 1})
        raise ValueError(
            f"{directory} must hold a tokenizer with the drafter's mask token {text!r:.80}, found none of this name. "
            "SGLang adds such a token behind all others; if the drafter was trained so, say "
            f"--drafter-config '{override}'"
        )
    return tokens[text]
