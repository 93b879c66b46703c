"""Numbers of four bits as checkpoints pack them in words of 32 bits.

They are read as bytes of two numbers, the first in the lower half, in rows of one output each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dflash_jax.checkpoint.sources import FLOATS, Expected, Read, Source

NUMBERS = 8  # in a word
Box = tuple[slice, ...]


def nibbles(words: np.ndarray) -> np.ndarray:
    """The numbers in words, along a new last axis, from the lowest bits on."""
    bytes_ = np.ascontiguousarray(words)[..., None].view(np.uint8)
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*words.shape, NUMBERS)


def in_words(numbers: np.ndarray) -> np.ndarray:
    """The opposite: eight numbers of the last axis in a word."""
    return in_bytes(numbers.reshape(*numbers.shape[:-1], -1)).view(np.int32).reshape(numbers.shape[:-1])


def in_bytes(numbers: np.ndarray) -> np.ndarray:
    """Two numbers of the last axis in a byte."""
    return np.ascontiguousarray(numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)


def of_bytes(values: np.ndarray) -> np.ndarray:
    """The opposite."""
    return np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)


def covering(inside: slice, size: int) -> tuple[slice, slice]:
    """The stretch of groups of this size that has all of another, and where that lies in it."""
    outer = slice(inside.start // size, -(-inside.stop // size))
    first = inside.start - outer.start * size
    return outer, slice(first, first + inside.stop - inside.start)


@dataclass(frozen=True)
class Signed:
    """Two whole numbers from 0 to 15 in a byte, read as 8 less each, in two's complement, as in `quantised.FourBit`.

    Attributes:
        unsigned: the bytes as another source gives them.
    """

    unsigned: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unsigned.shape

    @property
    def stored(self) -> Mapping[str, Expected]:
        return self.unsigned.stored

    def read(self, read: Read, box: Box) -> np.ndarray:
        return self.unsigned.read(read, box) ^ np.uint8(0x88)

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        return self.unsigned.write(tensor ^ np.uint8(0x88))


@dataclass(frozen=True)
class Packed:
    """compressed-tensors' words along inputs, beside the shape of the matrix.

    Attributes:
        name: of the matrix; its words are under `{name}_packed`, its shape under `{name}_shape`.
        shape: of its bytes.
    """

    name: str
    shape: tuple[int, int]

    @property
    def stored(self) -> Mapping[str, Expected]:
        rows, count = self.shape
        words, shape = Expected((rows, count // 4), ("I32",)), Expected((2,), ("I32", "I64"))
        return {f"{self.name}_packed": words, f"{self.name}_shape": shape}

    def read(self, read: Read, box: Box) -> np.ndarray:
        outer, inside = covering(box[1], 4)
        words = read(f"{self.name}_packed", (box[0], outer))
        return np.ascontiguousarray(words).view(np.uint8)[:, inside]  # the first byte holds a word's lowest bits

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        rows, count = self.shape
        words, shape = np.ascontiguousarray(tensor).view(np.int32), np.asarray([rows, 2 * count], np.int64)
        return {f"{self.name}_packed": words, f"{self.name}_shape": shape}


@dataclass(frozen=True)
class PackedZeros:
    """compressed-tensors' zero points, packed along outputs: [M, G], one in a byte."""

    name: str
    shape: tuple[int, int]

    @property
    def stored(self) -> Mapping[str, Expected]:
        outputs, groups = self.shape
        return {self.name: Expected((-(-outputs // NUMBERS), groups), ("I32",))}

    def read(self, read: Read, box: Box) -> np.ndarray:
        outer, inside = covering(box[0], NUMBERS)
        words = read(self.name, (outer, box[1]))
        return np.moveaxis(nibbles(words), 2, 1).reshape(-1, words.shape[1])[inside]

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        padded = np.pad(tensor, ((0, -len(tensor) % NUMBERS), (0, 0)))
        return {self.name: in_words(np.moveaxis(padded.reshape(-1, NUMBERS, tensor.shape[1]), 1, 2))}


@dataclass(frozen=True)
class Turned:
    """A matrix that is stored with its axes the other way round."""

    name: str
    shape: tuple[int, int]
    dtypes: tuple[str, ...] = FLOATS

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {self.name: Expected(self.shape[::-1], self.dtypes)}

    def read(self, read: Read, box: Box) -> np.ndarray:
        return read(self.name, box[::-1]).T

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        return {self.name: np.ascontiguousarray(tensor.T)}


@dataclass(frozen=True)
class Columns:
    """AWQ's words along outputs, [K, M / 8], or its zero points, [G, M / 8]: the outputs in a word take turns.

    Attributes:
        shape: of bytes, [M, K / 2], or of zero points, [M, G].
        zeros: whether it is those.
    """

    name: str
    shape: tuple[int, int]
    zeros: bool = False
    order: ClassVar[tuple[int, ...]] = (0, 2, 4, 6, 1, 3, 5, 7)  # which output stands where in a word

    @property
    def stored(self) -> Mapping[str, Expected]:
        outputs, count = self.shape
        return {self.name: Expected((count if self.zeros else 2 * count, outputs // NUMBERS), ("I32",))}

    def read(self, read: Read, box: Box) -> np.ndarray:
        outer, inside = covering(box[0], NUMBERS)
        inputs = box[1] if self.zeros else slice(2 * box[1].start, 2 * box[1].stop)
        found = nibbles(read(self.name, (inputs, outer)))[..., np.argsort(self.order)]
        numbers = found.reshape(found.shape[0], -1).T[inside]
        return numbers if self.zeros else in_bytes(numbers)

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        numbers = tensor if self.zeros else of_bytes(tensor)
        words = numbers.T.reshape(numbers.shape[1], -1, NUMBERS)[..., list(self.order)]
        return {self.name: in_words(words)}


@dataclass(frozen=True)
class Ordered:
    """GPTQ's order of inputs: sorted by their groups, `{name}.g_idx`.

    Attributes:
        shape: the number of inputs.
        group: inputs that share a scale.
    """

    name: str
    shape: tuple[int]
    group: int

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {f"{self.name}.g_idx": Expected(self.shape, ("I32", "I64"))}

    def read(self, read: Read, box: Box) -> np.ndarray:
        groups, count = read(f"{self.name}.g_idx", None), self.shape[0] // self.group
        if groups.min() < 0 or groups.max() >= count or np.any(np.bincount(groups, minlength=count) != self.group):
            raise ValueError(f"{self.name}.g_idx must name each of the groups {self.group} times")
        return np.argsort(groups, kind="stable").astype(np.int32)[box]

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        groups = np.empty(self.shape, np.int32)
        groups[tensor] = np.arange(self.shape[0]) // self.group
        return {f"{self.name}.g_idx": groups}


@dataclass(frozen=True)
class Words:
    """GPTQ's words along inputs, [K / 8, M].

    Attributes:
        name: of the module.
        shape: of its bytes, [M, K / 2].
        group: inputs that share a scale.
        first: the module whose order of inputs it has; None is as they are.
    """

    name: str
    shape: tuple[int, int]
    group: int
    first: str | None = None

    @property
    def stored(self) -> Mapping[str, Expected]:
        outputs, count = self.shape
        words = Expected((count // 4, outputs), ("I32",))
        return {f"{self.name}.qweight": words, f"{self.name}.g_idx": Expected((2 * count,), ("I32", "I64"))}

    def read(self, read: Read, box: Box) -> np.ndarray:
        inputs = 2 * self.shape[1]
        if self.first is None:
            if np.any(read(f"{self.name}.g_idx", None) != np.arange(inputs) // self.group):
                raise ValueError(f"{self.name}.g_idx must be in order, as desc_act = false says")
            outer, inside = covering(box[1], 4)
            words = read(f"{self.name}.qweight", (outer, box[0])).T
            return np.ascontiguousarray(words).view(np.uint8)[:, inside]
        order, first = (Ordered(x, (inputs,), self.group).read(read, (slice(None),)) for x in (self.name, self.first))
        if np.any(order != first):
            raise ValueError(f"{self.name}.g_idx must be that of {self.first}, with which it is multiplied")
        words = read(f"{self.name}.qweight", (slice(0, inputs // NUMBERS), box[0])).T
        return in_bytes(nibbles(words).reshape(len(words), -1)[:, order[2 * box[1].start : 2 * box[1].stop]])

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """Raises ValueError for another order than that of inputs."""
        if self.first is not None:
            raise ValueError(f"{self.name} cannot be written with its inputs in another order")
        words = np.ascontiguousarray(np.ascontiguousarray(tensor).view(np.int32).T)
        groups = (np.arange(2 * self.shape[1]) // self.group).astype(np.int32)
        return {f"{self.name}.qweight": words, f"{self.name}.g_idx": groups}


@dataclass(frozen=True)
class Zeros:
    """GPTQ's zero points, packed along outputs, [G, M / 8].

    Attributes:
        shape: [M, G].
        added: what the stored ones lack: 1 in the first version of the format.
    """

    name: str
    shape: tuple[int, int]
    added: int = 0

    @property
    def stored(self) -> Mapping[str, Expected]:
        outputs, groups = self.shape
        return {self.name: Expected((groups, outputs // NUMBERS), ("I32",))}

    def read(self, read: Read, box: Box) -> np.ndarray:
        outer, inside = covering(box[0], NUMBERS)
        found = nibbles(read(self.name, (box[1], outer)))
        return ((found.reshape(found.shape[0], -1).T + self.added) & 15)[inside]

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        numbers = (tensor.astype(np.int32) - self.added) & 15
        return {self.name: in_words(numbers.astype(np.uint8).T.reshape(self.shape[1], -1, NUMBERS))}


E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # and the same below zero


@dataclass(frozen=True)
class Unpacked:
    """A matrix of four bits a number, dequantized as it is read: what `quantised.FourBit` stands for.

    Attributes:
        shape: of the matrix.
        arrays: its arrays by their names.
        code: "int4" or "e2m1".
    """

    shape: tuple[int, int]
    arrays: tuple[tuple[str, Source], ...]
    code: str

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {name: how for _, part in self.arrays for name, how in part.stored.items()}

    def read(self, read: Read, box: Box) -> np.ndarray:
        every = lambda part: (box[0], *(slice(0, size) for size in part.shape[1:]))
        found = {
            name: part.read(read, (slice(0, self.shape[1]),) if name == "order" else every(part))
            for name, part in self.arrays
        }
        codes = of_bytes(found["values"]).reshape(*found["scale"].shape, -1)
        if self.code == "e2m1":
            numbers = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        else:
            least = 0 if "offset" in found else 8
            zero = found["zero"][..., None].astype(np.float32) if "zero" in found else least
            numbers = (codes ^ 8).astype(np.float32) - zero
        scale = found["scale"]
        scale = 2.0 ** (scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
        whole = numbers * scale[..., None]
        whole = whole - found["offset"][..., None] if "offset" in found else whole
        whole = whole.reshape(len(codes), -1)
        whole = whole * found["gain"][:, None] if "gain" in found else whole
        if "order" in found:
            whole = whole[:, np.argsort(found["order"])]
        return whole[:, box[1]]

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """Raises ValueError."""
        raise ValueError(f"{self.arrays[0][1]} cannot be written from a plain weight")
