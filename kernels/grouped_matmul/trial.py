"""A small case of a call of `api.grouped_matmul`, on which its implementations are compared."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dflash_jax.quantised import Quantised

from ..verify import TOLERANCE

GROUPS, ROWS = 8, 256  # of a trial, at most


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`) and type, with few groups and rows."""

    rows: int
    groups: int
    outputs: int
    inputs: int
    dtype: str

    @classmethod
    def of(cls, x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        groups, outputs, inputs = weights.shape
        return cls(min(x.shape[0], ROWS), min(groups, GROUPS), outputs, inputs, str(x.dtype))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def run(self, implementation: str) -> Array:
        """Groups of every size, one of them empty, and some rows behind them."""
        from .api import grouped_matmul

        def call(key: PRNGKeyArray) -> Array:
            first, second = jax.random.split(key)
            x = jax.random.normal(first, (self.rows, self.inputs), self.dtype)
            weights = jax.random.normal(second, (self.groups, self.outputs, self.inputs), self.dtype)
            share = jnp.arange(self.groups) * self.rows // max(1, self.groups * (self.groups - 1) // 2 + 1)
            return grouped_matmul(x, weights, share, implementation=implementation)  # type: ignore[arg-type]

        return jax.jit(call)(jax.random.key(0))
