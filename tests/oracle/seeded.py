"""Numbers that follow from a seed and a name, equal in every environment: nothing but numpy makes them."""

import zlib
from collections.abc import Mapping

import numpy as np

VOCAB, MASK, HIDDEN = 64, 63, 32


def numbers(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Standard normal float32 numbers of this name."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.standard_normal(shape).astype(np.float32)


def tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Weights of a drafter by their names: norms near one, matrices that keep the size of what they multiply.

    `d2t` takes draft tokens to tokens of the target before the mask, about evenly, and `t2d` says which are taken.
    """
    made = {}
    for name, shape in shapes.items():
        x = numbers(name, tuple(shape), seed)
        if name.endswith("d2t"):
            chosen = np.linspace(0, MASK - 1, shape[0]).astype(np.int64)
            made[name] = chosen - np.arange(shape[0])
        elif name.endswith("t2d"):
            made[name] = np.isin(np.arange(shape[0]), np.linspace(0, MASK - 1, draft_size(shapes)).astype(np.int64))
        elif "norm" in name and len(shape) == 1:
            made[name] = (1 + 0.2 * x).astype(np.float32)
        else:
            made[name] = (x / max(1, shape[-1]) ** 0.5).astype(np.float32)
    return made


def draft_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Tokens of a drafter's own vocabulary."""
    return next(shape[0] for name, shape in shapes.items() if name.endswith("d2t"))


def inputs(positions: int, taps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a text, one more than its positions, and the features of these: [C + 1] and [1, C, taps * H]."""
    tokens = np.random.default_rng([seed, positions]).integers(0, MASK, positions + 1)
    return tokens, numbers("features", (1, positions, taps * HIDDEN), seed)


def target(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A target's embedding and head: [V, H] each."""
    shape = (VOCAB, HIDDEN)
    return numbers("embedding", shape, seed), numbers("head", shape, seed) / np.float32(HIDDEN**0.5)
