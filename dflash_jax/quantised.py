"""Quantised weights. Shapes: E experts (or none), M outputs, D inputs, G groups of inputs that share a scale."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Num

BLOCK = 128  # outputs, and inputs, that share a scale in FP8
GROUP = 32  # inputs that share one in MXFP4 and INT4


class Quantised(struct.PyTreeNode):
    """A quantised weight, in the place of a plain one: `values * scale`.

    Attributes:
        values: in the dtype they are stored in.
        scale: of each output, [M], or of each output and group of inputs, [M, G].
    """

    values: Num[Array, "*E M D"]
    scale: Num[Array, "*E M"] | Num[Array, "*E M G"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of what is computed with it."""
        return self.scale.dtype

    def astype(self, dtype: jnp.dtype) -> Float[Array, "M D"]:
        """The dequantised weight."""
        groups = self.scale.reshape(self.scale.shape[0], -1)
        width = self.values.shape[-1] // groups.shape[1]
        return self.values.astype(dtype) * jnp.repeat(groups.astype(dtype), width, axis=1)


class MXFP4(Quantised):
    """Four bits a number, and eight a group of 32 for their exponent (OCP microscaling; gpt-oss).

    Attributes:
        values: [..., D / 2] bytes; the lower half of a byte is the first of its two numbers, each E2M1.
        scale: [..., D / 32] bytes, exponents of 2 plus 127.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], 2 * self.values.shape[-1]

    @property
    def dtype(self) -> Any:
        """Nothing says what is computed with it."""
        return None

    def astype(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        codes = jnp.stack([self.values & 15, self.values >> 4], axis=-1).astype(jnp.int32)
        numbers = e2m1(codes.reshape(*self.scale.shape, GROUP)) * e8m0(self.scale.astype(jnp.int32))[..., None]
        return numbers.reshape(self.shape).astype(dtype)


class FP8(Quantised):
    """Eight bits a number, and a scale for every block of 128 outputs and 128 inputs (DeepSeek's format).

    Attributes:
        values: [..., M, D] in float8_e4m3fn.
        scale: [..., M / 128, D / 128] in float32, rounded up; numbers are multiplied by it. Of weights that are joined
            of others whose outputs are no multiples of 128: [..., M, D / 128].
    """

    @property
    def block_rows(self) -> int:
        """Outputs that share a scale."""
        return 1 if self.scale.shape[-2] == self.values.shape[-2] else BLOCK

    def astype(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        rows, columns = self.values.shape[-2:]
        scale = jnp.repeat(self.scale, self.block_rows, axis=-2)[..., :rows, :]
        scale = jnp.repeat(scale, BLOCK, axis=-1)[..., :columns]
        return (self.values.astype(jnp.float32) * scale).astype(dtype)


class INT4(Quantised):
    """Four bits a number, and a scale for every group of 32 inputs (compressed-tensors' `pack-quantized`; Kimi).

    Attributes:
        values: [..., D / 8] in int32: eight whole numbers from -8 to 7, plus 8, the first one in the lowest bits.
        scale: [..., D / 32] in the dtype of what is computed with it; numbers are multiplied by it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], 8 * self.values.shape[-1]

    def astype(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        codes = jnp.stack([self.values >> shift & 15 for shift in range(0, 32, 4)], axis=-1)
        numbers = (codes - 8).reshape(*self.scale.shape, GROUP).astype(jnp.float32)
        return (numbers * self.scale.astype(jnp.float32)[..., None]).reshape(self.shape).astype(dtype)


# --------------------------------------------------------------------------------------------------
# Formats by their bits, as kernels need them too: float32 numbers from int32 codes.


def e2m1(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """A sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero."""
    size = codes & 7
    twice = jnp.where(size < 4, size, jnp.where(size < 6, 2 * size - 4, 4 * size - 16))
    return jnp.where((codes & 8) != 0, -twice, twice).astype(jnp.float32) * 0.5


def e8m0(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """Powers of two: the exponent plus 127; 0 is 0 instead of 2^-127."""
    return jax.lax.bitcast_convert_type(codes << 23, jnp.float32)


def e4m3(codes: Int[Array, "..."]) -> Float[Array, "..."]:
    """A sign, four bits of exponent and three of mantissa (float8_e4m3fn) of finite numbers."""
    size = codes & 0x7F
    normal = jax.lax.bitcast_convert_type(size << 20, jnp.float32) * 2.0**120
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where((codes & 0x80) != 0, -number, number)
