"""Quantized weights. Shapes: E experts (or none), M outputs, D inputs, G groups of inputs that share a scale."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, PyTree

BLOCK = 128  # outputs, and inputs, that share a scale in FP8
GROUP = 32  # inputs that share one in MXFP4


class Quantised(struct.PyTreeNode):
    """A quantized weight in the place of a plain one: [..., M, D].

    Attributes:
        values: as they are stored.
        scale: what they are multiplied by.
        dtype: of what is computed with it; None where nothing says so.
        axes: of the mesh that is entered, over which outputs and inputs of a matrix are split; None where there is
            none, or nothing says so.
    """

    values: Num[Array, "*E M _"]
    scale: Num[Array, "..."]
    dtype: DTypeLike | None = struct.field(pytree_node=False, default=None, kw_only=True)
    axes: tuple[tuple[str, ...] | None, ...] | None = struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def form(self) -> str:
        """What kernels, and what they say, call the format."""
        raise NotImplementedError

    def astype(self, dtype: jnp.dtype) -> Float[Array, "*E M D"]:
        """The dequantized weight: float32 products, rounded once."""
        raise NotImplementedError

    def rows(self, index: Int[Array, "*R"]) -> Float[Array, "*R D"]:
        """Some rows of a matrix, dequantized, in `dtype`."""
        taken = jax.tree.map(lambda x: x[index], self)
        return taken.astype(self.dtype)

    def __getitem__(self, index: int) -> "Quantised":
        """The weight at this place of the first axis, which is not that of the outputs."""
        return jax.tree.map(lambda x: x[index], self)


class EightBit(Quantised):
    """Eight bits a number: whole numbers from -127 to 127, or E4M3.

    Attributes:
        values: [..., M, D] in int8 or float8_e4m3fn.
        scale: of each output, [..., M]; or of each block, [..., M / rows, D / columns], rounded up. In float32, unless
            a scale is of few numbers.
        block: rows and columns (outputs and inputs) that share a scale; None is a scale for each output.
    """

    block: tuple[int, int] | None = struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def form(self) -> str:
        name = "INT8" if self.values.dtype == jnp.int8 else "FP8"
        return name if self.block is None else f"{name} in blocks of {self.block[0]} x {self.block[1]}"

    def astype(self, dtype: jnp.dtype) -> Float[Array, "*E M D"]:
        scale = self.scale.astype(jnp.float32)
        if self.block is None:
            return (self.values.astype(jnp.float32) * scale[..., None]).astype(dtype)
        M, D = self.values.shape[-2:]
        scale = jnp.repeat(scale, self.block[0], axis=-2)[..., :M, :]
        scale = jnp.repeat(scale, self.block[1], axis=-1)[..., :D]
        return (self.values.astype(jnp.float32) * scale).astype(dtype)

    def rows(self, index: Int[Array, "*R"]) -> Float[Array, "*R D"]:
        if self.block is None:
            return super().rows(index)
        taken = self.scale[index // self.block[0]].astype(jnp.float32)
        scale = jnp.repeat(taken, self.block[1], axis=-1)[..., : self.values.shape[-1]]
        return (self.values[index].astype(jnp.float32) * scale).astype(self.dtype)


class FourBit(Quantised):
    """Four bits a number, two of them in a byte, the first in its lower half.

    Attributes:
        values: [..., M, D / 2] in uint8. Whole numbers are stored 8 smaller, in two's complement.
        scale: of each output and group of inputs, [..., M, G]: numbers, or, in uint8, exponents of 2 plus 127 (E8M0).
        zero: of each output and group, what is subtracted from a whole number; None is 8, or 0 if there are offsets.
        offset: of each output and group, what is subtracted from a number times its scale; None is 0.
        gain: of each output, [..., M]; None is 1. Not beside offsets.
        order: which input each column is of, [..., D]; None is as they come.
        code: whole numbers from 0 to 15 ("int4"), or a sign, two bits of exponent and one of mantissa ("e2m1").
    """

    zero: Num[Array, "*E M G"] | None = None
    offset: Float[Array, "*E M G"] | None = None
    gain: Float[Array, "*E M"] | None = None
    order: Int[Array, "*E D"] | None = None
    code: str = struct.field(pytree_node=False, default="int4", kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], 2 * self.values.shape[-1]

    @property
    def form(self) -> str:
        if self.code == "e2m1":
            return "MXFP4" if self.scale.dtype == jnp.uint8 else "NVFP4"
        return "INT4"

    @property
    def least(self) -> Float[Array, "*E M G"] | None:
        """What is subtracted from a stored whole number, of each output and group; None is nothing."""
        if self.zero is not None:
            return self.zero.astype(jnp.float32) - 8
        return None if self.offset is None else jnp.full(self.scale.shape, -8.0)

    def astype(self, dtype: jnp.dtype) -> Float[Array, "*E M D"]:
        codes = jnp.stack([self.values & 15, self.values >> 4], axis=-1).astype(jnp.int32)
        codes = codes.reshape(*self.scale.shape, -1)
        if self.code == "e2m1":
            numbers = e2m1(codes)
        else:
            numbers = ((codes ^ 8) - 8).astype(jnp.float32)
            numbers = numbers if (least := self.least) is None else numbers - least[..., None]
        powers = self.scale.dtype == jnp.uint8
        scale = e8m0(self.scale.astype(jnp.int32)) if powers else self.scale.astype(jnp.float32)
        if self.gain is not None:
            scale = scale * self.gain[..., None]
        found = numbers * scale[..., None]
        if self.offset is not None:
            found = found - self.offset.astype(jnp.float32)[..., None]
        found = found.reshape(self.shape).astype(dtype)
        if self.order is None:
            return found
        return jnp.take_along_axis(found, jnp.argsort(self.order, axis=-1)[..., None, :], axis=-1)


def joined(weight: Float[Array, "L M D"] | Quantised) -> Float[Array, "N D"] | Quantised:
    """Matrices along a first axis as one, of the outputs of all."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), weight)


def forms(params: PyTree) -> list[str]:
    """The formats of the quantized weights among parameters, each once."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    return sorted({leaf.form for leaf in leaves if isinstance(leaf, Quantised)})


def each(weight: Float[Array, "L M D"] | Quantised) -> list[Float[Array, "M D"] | Quantised]:
    """Matrices along a first axis, one by one."""
    return [weight[i] for i in range(weight.shape[0])]


# --------------------------------------------------------------------------------------------------
# Quantization of plain weights


INT4_GROUPS = 64, 32, 16, 8  # inputs that share a scale; the first one that divides them
CLIPPED = 11  # shares of a group's largest number, from 0.75 to 1, of which the best one becomes its scale


def quantised(weight: Float[Array, "*E M D"], how: str) -> Quantised:
    """A plain weight quantized by the largest number of each output ("int8"; "fp8", E4M3), or in groups of inputs
    ("int4"), whose scales are those of the least squared error.

    Raises:
        ValueError: an odd number of inputs, or none of the groups' sizes divides them.
    """
    wide = weight.astype(jnp.float32)
    if how == "int4":
        return _in_groups(wide, weight.dtype)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    most = 127.0 if how == "int8" else 448.0
    scale = jnp.where(largest == 0, 1.0, largest) / most
    small = wide / scale[..., None]
    values = jnp.round(small).astype(jnp.int8) if how == "int8" else small.astype(jnp.float8_e4m3fn)
    return EightBit(values, scale, dtype=weight.dtype)


@lru_cache
def quantising(how: str, where: Quantised | None = None) -> Callable[[Array], Quantised]:
    """`quantised` as a program, compiled once for all weights that are alike; `where` has the sharding of each array of
    its results, if that is not where they come to lie."""
    make = partial(quantised, how=how)
    return jax.jit(make) if where is None else jax.jit(make, out_shardings=where)


def _in_groups(weight: Float[Array, "*E M D"], dtype: jnp.dtype) -> FourBit:
    inputs = weight.shape[-1]
    group = next((size for size in INT4_GROUPS if inputs % size == 0), None)
    if group is None:
        raise ValueError(
            f"int4 needs a number of inputs that is a multiple of {' or '.join(map(str, INT4_GROUPS))}, got {inputs}"
        )
    groups = weight.reshape(*weight.shape[:-1], -1, group)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    largest = jnp.where(largest == 0, 1.0, largest)

    def at(share: Float[Array, ""]) -> tuple[Float[Array, "*E M G 1"], Float[Array, "*E M G _"]]:
        scale = (largest * share / 7).astype(dtype).astype(jnp.float32)
        return scale, jnp.clip(jnp.round(groups / scale), -8, 7)

    def better(i: Int[Array, ""], best: tuple[Array, Array]) -> tuple[Array, Array]:
        share, least = best
        tried = 0.75 + 0.25 * i.astype(jnp.float32) / (CLIPPED - 1)
        scale, codes = at(tried)
        error = jnp.sum((codes * scale - groups) ** 2, axis=-1, keepdims=True)
        return jnp.where(error < least, tried, share), jnp.minimum(error, least)

    start = jnp.ones_like(largest), jnp.full_like(largest, jnp.inf)
    share, _ = jax.lax.fori_loop(0, CLIPPED, better, start)
    scale, codes = at(share)
    numbers = codes.astype(jnp.int8).astype(jnp.uint8).reshape(weight.shape) & 15
    return FourBit(numbers[..., ::2] | numbers[..., 1::2] << 4, scale[..., 0].astype(dtype), dtype=dtype)


# --------------------------------------------------------------------------------------------------
# Formats by their bits, as kernels need them too: float32 numbers from int32 codes.


def e2m1(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """A sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero."""
    table = jnp.full(codes.shape, -0x379BCDF0, codes.dtype)  # 0xC8643210: twice the sizes, four bits each
    twice = jax.lax.shift_right_logical(table, codes << 2 & 28) & 15
    sign = codes << 28 & -(2**31)
    bits = jax.lax.bitcast_convert_type(twice.astype(jnp.float32) * 0.5, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ sign, jnp.float32)


def e8m0(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """Powers of two: the exponent plus 127; 0 is 0 instead of 2^-127."""
    return jax.lax.bitcast_convert_type(codes << 23, jnp.float32)


def e4m3(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """A sign, four bits of exponent and three of mantissa (float8_e4m3fn) of finite numbers."""
    size = codes & 0x7F
    normal = jax.lax.bitcast_convert_type(size << 20, jnp.float32) * 2.0**120
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where((codes & 0x80) != 0, -number, number)
