"""A small case of a call of `api.grouped_matmul`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dflash_jax.quantised import BLOCK, FP8, GROUP, MXFP4, Quantised

from ..verify import TOLERANCE

GROUPS, ROWS = 8, 256  # of a trial, at most


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`) and type, with few groups and rows."""

    rows: int
    groups: int
    outputs: int
    inputs: int
    dtype: str
    quantised: type[Quantised] | None = None
    block_rows: int = BLOCK  # outputs that share a scale in FP8

    @classmethod
    def of(cls, x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        groups, outputs, inputs = weights.shape
        kind = type(weights) if isinstance(weights, Quantised) else None
        block_rows = weights.block_rows if isinstance(weights, FP8) else BLOCK
        return cls(min(x.shape[0], ROWS), min(groups, GROUPS), outputs, inputs, str(x.dtype), kind, block_rows)

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
        if self.quantised is MXFP4:
            bits = jax.random.bits(key, (*shape[:2], self.inputs // 2), jnp.uint8)
            return MXFP4(bits, jnp.full((*shape[:2], self.inputs // GROUP), 125, jnp.uint8))
        weights = jax.random.normal(key, shape, self.dtype)
        if self.quantised is FP8:
            blocks = (self.groups, -(-self.outputs // self.block_rows), -(-self.inputs // BLOCK))
            return FP8(weights.astype(jnp.float8_e4m3fn), jnp.ones(blocks, jnp.float32))
        return weights
