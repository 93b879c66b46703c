"""A small case of a call of `api.grouped_matmul`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

from dflash_jax.quantised import GROUP, EightBit, FourBit, Quantised

from ..verify import TOLERANCE

GROUPS, ROWS = 8, 256  # of a trial, at most


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`) and type, with few groups and rows."""

    rows: int
    groups: int
    outputs: int
    inputs: int
    dtype: str
    stored: str = ""  # what weights are stored in, if not in that type
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale of eight bits

    @classmethod
    def of(cls, x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        groups, outputs, inputs = weights.shape
        block, stored = None, "" if weights.dtype == x.dtype else str(weights.dtype)
        if isinstance(weights, EightBit):
            block, stored = weights.block, str(weights.values.dtype)
        elif isinstance(weights, FourBit):
            stored = weights.form
        return cls(min(x.shape[0], ROWS), min(groups, GROUPS), outputs, inputs, str(x.dtype), stored, block)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def run(self, call: Callable[..., Array]) -> Array:
        """Groups of every size, one of them empty, and some rows after them."""

        def multiply(key: PRNGKeyArray) -> Array:
            first, second = jax.random.split(key)
            x = jax.random.normal(first, (self.rows, self.inputs), self.dtype)
            weights = self._weights(second)
            share = jnp.arange(self.groups) * self.rows // max(1, self.groups * (self.groups - 1) // 2 + 1)
            return call(x, weights, jnp.cumsum(share))

        return jax.jit(multiply)(jax.random.key(0))

    def _weights(self, key: PRNGKeyArray) -> Array | Quantised:
        """Random ones, about as large as those of a layer."""
        shape = self.groups, self.outputs, self.inputs
        if self.stored == "MXFP4":
            bits = jax.random.bits(key, (*shape[:2], self.inputs // 2), jnp.uint8)
            scale = jnp.full((*shape[:2], self.inputs // GROUP), 125, jnp.uint8)
            return FourBit(bits, scale, code="e2m1")
        weights = jax.random.normal(key, shape, self.dtype)
        if not self.stored:
            return weights
        values = jnp.round(weights * 16).astype(self.stored) if self.stored == "int8" else weights.astype(self.stored)
        if self.block is None:
            return values
        blocks = (self.groups, *(-(-size // side) for size, side in zip(shape[1:], self.block, strict=True)))
        return EightBit(values, jnp.ones(blocks, jnp.float32), block=self.block)
