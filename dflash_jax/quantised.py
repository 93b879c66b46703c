"""Weights in few bits. Shapes: M outputs, D inputs, G groups of inputs that share a scale."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Num

BLOCK = 128  # outputs, and inputs, that share a scale in FP8


class Quantised(struct.PyTreeNode):
    """A weight in few bits, in the place of a plain one: `values * scale`.

    Attributes:
        values: in the dtype they are stored in.
        scale: of each output, [M], or of each output and group of inputs, [M, G].
    """

    values: Num[Array, "*M D"]
    scale: Num[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of what is computed with it."""
        return self.scale.dtype

    def astype(self, dtype: jnp.dtype) -> Float[Array, "M D"]:
        """The plain weight."""
        groups = self.scale.reshape(self.scale.shape[0], -1)
        each = self.values.shape[-1] // groups.shape[1]
        return self.values.astype(dtype) * jnp.repeat(groups.astype(dtype), each, axis=1)


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
        codes = codes.reshape(*self.scale.shape, 32)
        exponent, half = (codes >> 1) & 3, (codes & 1).astype(jnp.float32) / 2
        size = jnp.where(exponent == 0, half, (1 + half) * (1 << jnp.maximum(exponent - 1, 0)).astype(jnp.float32))
        power = jax.lax.bitcast_convert_type(self.scale.astype(jnp.int32) << 23, jnp.float32)[..., None]
        return (jnp.where(codes & 8, -size, size) * power).reshape(self.shape).astype(dtype)


class FP8(Quantised):
    """Eight bits a number, and a scale for every block of 128 outputs and 128 inputs (DeepSeek's format).

    Attributes:
        values: [..., M, D] in float8_e4m3fn.
        scale: [..., M / 128, D / 128] in float32, rounded up; numbers are multiplied by it.
    """

    def astype(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        rows, columns = self.values.shape[-2:]
        scale = jnp.repeat(jnp.repeat(self.scale, BLOCK, axis=-2)[..., :rows, :], BLOCK, axis=-1)[..., :columns]
        return (self.values.astype(jnp.float32) * scale).astype(dtype)
