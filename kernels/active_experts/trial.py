"""A small case of a call of `api.multiply`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from dflash_jax.quantised import Quantised

from ..drawn import Kind
from ..verify import TOLERANCE

EXPERTS, TOKENS = 4, (8, 16, 32, 64)  # one trial stands for all calls with so many tokens or fewer


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), types, and what stands for the weights."""

    tokens: int
    slots: int
    outputs: int
    inputs: int
    alike: bool
    dtype: str
    kind: Kind

    @classmethod
    def of(cls, x: Float[Array, "X T D"] | jax.ShapeDtypeStruct, weights: Array | Quantised, slots: int) -> "Trial":
        """The trial of a call with arrays of these shapes, and so many slots."""
        tokens = next((tokens for tokens in TOKENS if x.shape[1] <= tokens), x.shape[1])
        _, outputs, inputs = weights.shape
        return cls(tokens, slots, outputs, inputs, x.shape[0] == 1, str(x.dtype), Kind.of(weights, 1))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def run(self, call: Callable[..., Array]) -> Array:
        """Random tokens for all slots, whose experts repeat."""

        def multiply(key: PRNGKeyArray) -> Array:
            first, second = jax.random.split(key)
            slots = jnp.concatenate([jnp.arange(self.slots)[::-1] % EXPERTS, jnp.asarray([self.slots])])
            shape = 1 if self.alike else self.slots, self.tokens, self.inputs
            x = jax.random.normal(first, shape, self.dtype)
            return call(x, self.kind.draw(second, (EXPERTS, self.outputs, self.inputs)), slots.astype(jnp.int32))

        return jax.jit(multiply)(jax.random.key(0))
