"""A small case of a call of `api.linear`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from dflash_jax.quantised import Quantised

from ..drawn import Kind
from ..products import FEW_ROWS
from ..verify import TOLERANCE

ROWS = 8, 16, 32, 64, FEW_ROWS  # one trial stands for all calls with so many or fewer


def rows_of(count: int) -> int:
    """The rows of the trial that stands for a call with so many."""
    return next((rows for rows in ROWS if count <= rows), count)


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`) and types, and what stands for the weight."""

    rows: int
    outputs: int
    inputs: int
    dtype: str
    kind: Kind

    @classmethod
    def of(cls, x: Float[Array, "B T D"], weight: Quantised) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        rows = rows_of(x.shape[0] * x.shape[1])
        outputs, inputs = weight.shape[-2:]
        return cls(rows, outputs, inputs, str(x.dtype), Kind.of(weight))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def run(self, call: Callable[..., Array]) -> Array:
        """Random rows and weights."""

        def multiply(key: PRNGKeyArray) -> Array:
            first, second = jax.random.split(key)
            x = jax.random.normal(first, (1, self.rows, self.inputs), self.dtype)
            return call(x, self.kind.draw(second, (self.outputs, self.inputs)))

        return jax.jit(multiply)(jax.random.key(0))
