"""The tensors of a checkpoint as a model understands them, whatever they are stored as. Nothing here reads a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

# What safetensors calls them, and what they are.
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
FLOATS = ("F32", "F16", "BF16")

Read = Callable[[str, tuple[slice, ...] | None], np.ndarray]  # a box of a stored tensor; None is all of it


class Expected(NamedTuple):
    """A tensor of a checkpoint: its shape, and the dtypes that it may have.

    Attributes:
        squeezed: whether axes of size 1 may be there or not.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    squeezed: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is as expected."""
        bare = lambda shape: [size for size in shape if size != 1]
        return shape == self.shape or (self.squeezed and bare(shape) == bare(self.shape))


class Source(Protocol):
    """A tensor as the model understands it, whatever it is stored as.

    Attributes:
        shape: of the tensor.
        stored: names, shapes and allowed dtypes of the checkpoint tensors that hold it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> Mapping[str, Expected]: ...
    def read(self, read: Read, box: tuple[slice, ...]) -> np.ndarray:
        """A box (slices without a step) of the tensor."""
        ...

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """The checkpoint tensors that hold `tensor`."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor that is stored as it is."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {self.name: Expected(self.shape, self.dtypes)}

    def read(self, read: Read, box: tuple[slice, ...]) -> np.ndarray:
        return read(self.name, box)

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        return {self.name: tensor}


@dataclass(frozen=True)
class PerOutput:
    """The scale of each output of a weight, stored for each or once for all.

    Attributes:
        shape: the number of outputs.
        single: whether it is stored once.
        inverse: whether one over it is stored.
    """

    name: str
    shape: tuple[int]
    single: bool = False
    inverse: bool = False

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {self.name: Expected((1,) if self.single else (*self.shape, 1), FLOATS, squeezed=True)}

    def read(self, read: Read, box: tuple[slice, ...]) -> np.ndarray:
        found = np.broadcast_to(read(self.name, None).reshape(-1), self.shape)[box]
        return 1 / found.astype(np.float32) if self.inverse else found

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        tensor = 1 / tensor if self.inverse else tensor
        return {self.name: tensor[:1] if self.single else tensor[:, None]}


@dataclass(frozen=True)
class Scaled:
    """A matrix stored as small numbers and their scales, dequantized as it is read: `values * scale`.

    Attributes:
        values: the small numbers.
        scale: of blocks of them, or of each output.
        block: rows and columns that share a scale, where it has both axes; the last block of an axis may be smaller.
    """

    values: Stored
    scale: Stored | PerOutput
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {**self.values.stored, **self.scale.stored}

    def read(self, read: Read, box: tuple[slice, ...]) -> np.ndarray:
        values = self.values.read(read, box).astype(np.float32)
        if isinstance(self.scale, PerOutput):
            return values * self.scale.read(read, box[:1]).astype(np.float32)[:, None]
        outer = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(box, self.block, strict=True))
        scale = self.scale.read(read, outer).astype(np.float32)
        for axis, (inside, side) in enumerate(zip(box, self.block, strict=True)):
            first = inside.start - inside.start // side * side
            size = inside.stop - inside.start
            scale = np.repeat(scale, side, axis=axis).take(np.arange(first, first + size), axis=axis)
        return values * scale

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        kind, wide = DTYPES[self.values.dtypes[0]], np.asarray(tensor, np.float32)
        floating = self.values.dtypes[0].startswith("F8")
        largest = float(ml_dtypes.finfo(kind).max if floating else np.iinfo(kind).max)
        (rows, columns), whole = self.block, isinstance(self.scale, PerOutput)
        if isinstance(self.scale, PerOutput):
            rows, columns = self.shape[0] if self.scale.single else 1, self.shape[1]
        shape = -(-self.shape[0] // rows), -(-self.shape[1] // columns)
        scale, values = np.empty(shape, np.float32), np.empty(self.shape, kind)
        for i, j in np.ndindex(*shape):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = max(float(np.abs(wide[at]).max()), 1e-30) / largest
            small = wide[at] / scale[i, j]
            values[at] = (small if floating else np.rint(small)).astype(kind)
        return {**self.values.write(values), **self.scale.write(np.repeat(scale[:, 0], rows) if whole else scale)}


@dataclass(frozen=True)
class Merged:
    """A tensor whose last two axes are stored apart: blocks of a row, and what is in a block.

    Attributes:
        shape: with the two as one.
        block: size of the last stored axis.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    dtypes: tuple[str, ...] = FLOATS

    @property
    def stored(self) -> Mapping[str, Expected]:
        return {self.name: Expected((*self.shape[:-1], self.shape[-1] // self.block, self.block), self.dtypes)}

    def read(self, read: Read, box: tuple[slice, ...]) -> np.ndarray:
        *outer, last = box
        blocks = slice(last.start // self.block, -(-last.stop // self.block))
        found = read(self.name, (*outer, blocks, slice(0, self.block)))
        start = last.start - blocks.start * self.block
        return found.reshape(*found.shape[:-2], -1)[..., start : start + last.stop - last.start]

    def write(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        return {self.name: tensor.reshape(*tensor.shape[:-1], -1, self.block)}
