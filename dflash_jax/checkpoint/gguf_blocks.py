"""The blocks of GGUF's quantized tensors, taken apart into numbers and what they are multiplied by.

Reference: the block structures in ggml `ggml-common.h`; the package `gguf` gives the same numbers, dequantized.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Blocks(NamedTuple):
    """Blocks of one row after the other: numbers times scales, less offsets.

    Attributes:
        numbers: [blocks, size], int8, or uint8 from 0 to 15.
        scale: [blocks, groups], of as many groups as a block has.
        offset: the same, or None; of four bits without one, 8 is subtracted from the numbers.
    """

    numbers: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 number at a byte of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(stored: np.ndarray, together: int) -> np.ndarray:
    """Of so many bytes the lower halves, then the upper ones."""
    bytes_ = stored.reshape(len(stored), -1, together)
    halves = np.empty((*bytes_.shape[:2], 2, together), np.uint8)
    np.bitwise_and(bytes_, 15, out=halves[:, :, 0])
    np.right_shift(bytes_, 4, out=halves[:, :, 1])
    return halves.reshape(len(stored), -1)


def _q4_0(blocks: np.ndarray) -> Blocks:
    return Blocks(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Blocks:
    return Blocks(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), -_half(blocks, 2).astype(np.float32))


def _q8_0(blocks: np.ndarray) -> Blocks:
    return Blocks(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _q4_k(blocks: np.ndarray) -> Blocks:
    """Eight groups: scales and offsets of six bits each, of which the last four have their upper bits elsewhere."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=1).astype(np.float32)
    offset = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=1).astype(np.float32)
    wide = lambda at: _half(blocks, at).astype(np.float32)
    return Blocks(_nibbles(blocks[:, 16:], 32), wide(0) * scale, wide(2) * offset)


def _q6_k(blocks: np.ndarray) -> Blocks:
    """Sixteen groups: four bits of each number, then two, then scales of eight bits."""
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(blocks), -1)
    numbers = (low | high << 4).astype(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(numbers, _half(blocks, 208).astype(np.float32) * scale)


# Of each kind that stays packed, by GGUF's name.
KINDS: dict[str, Callable[[np.ndarray], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}
