"""The blocks of GGUF's quantized tensors, taken apart into numbers and what they are multiplied by.

Reference: the block structures in ggml `ggml-common.h`; the package `gguf` gives the same numbers, dequantized.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Read = Callable[[np.ndarray], np.ndarray]  # of blocks, one row after the other: [blocks, bytes]


class Kind(NamedTuple):
    """How blocks of a kind are read: as numbers times scales, less offsets.

    Attributes:
        numbers: [blocks, size] of int8, or [blocks, size / 2] of uint8, with two neighbors of four bits in each.
        scale: [blocks, groups], of as many groups as a block has.
        offset: the same, or None; of four bits without one, 8 is subtracted from the numbers.
    """

    numbers: Read
    scale: Read
    offset: Read | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 number at a byte of each block: [blocks, 1]."""
    return blocks.view(np.float16)[:, at // 2, None]


def _nibbles(stored: np.ndarray, together: int) -> np.ndarray:
    """Of so many bytes the lower halves, then the upper ones."""
    bytes_ = stored.reshape(len(stored), -1, together)
    halves = np.empty((*bytes_.shape[:2], 2, together), np.uint8)
    np.bitwise_and(bytes_, 15, out=halves[:, :, 0])
    np.right_shift(bytes_, 4, out=halves[:, :, 1])
    return halves.reshape(len(stored), -1)


def _pairs(stored: np.ndarray, together: int) -> np.ndarray:
    """The same with two neighbors in a byte, the first one in its lower half."""
    bytes_ = stored.reshape(len(stored), -1, together)
    first, second = bytes_[..., ::2], bytes_[..., 1::2]
    halves = np.empty((*bytes_.shape[:2], 2, together // 2), np.uint8)
    np.bitwise_or(first & 15, second << 4, out=halves[:, :, 0])
    np.bitwise_or(first >> 4, second & 240, out=halves[:, :, 1])
    return halves.reshape(len(stored), -1)


def _wide(blocks: np.ndarray, at: int) -> np.ndarray:
    return _half(blocks, at).astype(np.float32)


def _k_scale(blocks: np.ndarray) -> np.ndarray:
    """Of eight groups, six bits each; the last four have their upper two bits elsewhere."""
    first, third = blocks[:, 4:8], blocks[:, 12:16]
    six = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=1)
    return _wide(blocks, 0) * six.astype(np.float32)


def _k_offset(blocks: np.ndarray) -> np.ndarray:
    second, third = blocks[:, 8:12], blocks[:, 12:16]
    six = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=1)
    return _wide(blocks, 2) * six.astype(np.float32)


def _six_bits(blocks: np.ndarray) -> np.ndarray:
    """Four bits of each number, then two."""
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(blocks), -1)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def _eight_bits(blocks: np.ndarray, at: int, end: int | None = None) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at:end]).view(np.int8)


# Of each kind that stays packed, by GGUF's name.
KINDS = {
    "Q4_0": Kind(lambda b: _pairs(b[:, 2:], 16), lambda b: _half(b, 0)),
    "Q4_1": Kind(lambda b: _pairs(b[:, 4:], 16), lambda b: _half(b, 0), lambda b: -_wide(b, 2)),
    "Q4_K": Kind(lambda b: _pairs(b[:, 16:], 32), _k_scale, _k_offset),
    "Q8_0": Kind(lambda b: _eight_bits(b, 2), lambda b: _half(b, 0)),
    "Q6_K": Kind(_six_bits, lambda b: _wide(b, 208) * _eight_bits(b, 192, 208).astype(np.float32)),
}
