"""Random weights for the small cases on which kernels are checked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from dflash_jax.quantised import EightBit, FourBit, Quantised


class Kind(NamedTuple):
    """What stands for a weight: its format, or the type of a plain one; its scales' shape (without that of experts) and
    type, and more of both classes of quantized weights."""

    form: str
    scales: tuple[int, ...] = ()
    scale: str = ""
    block: tuple[int, int] | None = None
    zero: bool = False
    offset: str = ""

    @classmethod
    def of(cls, weight: Array | Quantised, axes: int = 0) -> "Kind":
        """That of a weight with so many axes before outputs and inputs."""
        if not isinstance(weight, Quantised):
            return cls(str(weight.dtype))
        sizes, scale = weight.scale.shape[axes:], str(weight.scale.dtype)
        if isinstance(weight, EightBit):
            return cls(weight.form, sizes, scale, weight.block)
        assert isinstance(weight, FourBit)
        offset = "" if weight.offset is None else str(weight.offset.dtype)
        return cls(weight.form, sizes, scale, None, weight.zero is not None, offset)

    def draw(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Array | Quantised:
        """Random numbers and zero points, and scales of several sizes."""
        first, second, third = jax.random.split(key, 3)
        if not self.scale:
            return jax.random.normal(first, shape, self.form)
        scales = *shape[:-2], *self.scales
        exponent = jax.random.randint(second, scales, -9, -4)
        if self.scale == "uint8":
            scale = (exponent + 127).astype(jnp.uint8)
        else:
            scale = jnp.exp2(exponent.astype(jnp.float32)).astype(self.scale)
        if self.form.startswith(("FP8", "INT8")):
            numbers = 16 * jax.random.normal(first, shape)
            small = jnp.int8 if self.form.startswith("INT8") else jnp.float8_e4m3fn
            return EightBit(numbers.astype(small), scale, block=self.block)
        values = jax.random.bits(first, (*shape[:-1], shape[-1] // 2), jnp.uint8)
        zero = jax.random.randint(third, scales, 0, 16).astype(jnp.uint8) if self.zero else None
        offset = (5 * jnp.exp2(exponent.astype(jnp.float32))).astype(self.offset) if self.offset else None
        return FourBit(values, scale, zero=zero, offset=offset, code="int4" if self.form == "INT4" else "e2m1")
