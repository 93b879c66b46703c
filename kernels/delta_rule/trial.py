"""A small case of a call of `api.read_block`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), with few rows and heads."""

    rows: int
    T: int
    K: int
    G: int
    H: int
    Hv: int
    tree: bool

    @classmethod
    def of(cls, k: Float[Array, "B T K H"], v: Float[Array, "B T K G Hv"], tree: bool) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        (B, T, K, H), (G, Hv) = k.shape, v.shape[3:]
        return cls(min(B, 2), T, min(K, 2), G, H, Hv, tree)

    @property
    def tolerance(self) -> float:
        return 2e-5

    def run(self, call: Callable[..., tuple[Array, ...]]) -> tuple[Array, ...]:
        """Keys that are alike, and little decay: the hardest system to solve. One head forgets all at one position."""

        def read(key: PRNGKeyArray) -> tuple[Array, ...]:
            keys = jax.random.split(key, 6)
            draw = lambda i, *size: jax.random.normal(keys[i], size)
            unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            heads = self.rows, self.T, self.K
            q, k = (unit(draw(i, *heads, self.H) + 1) for i in (0, 1))
            g, beta = -0.05 * jax.random.uniform(keys[2], (*heads, self.G)), jax.nn.sigmoid(2 + draw(3, *heads, self.G))
            g = g.at[:, self.T // 4, 0, 0].set(-1e5)
            state = draw(4, self.rows, self.K, self.G, self.H, self.Hv)
            visible = None
            if self.tree:  # two branches
                at = jnp.arange(self.T)
                alike = (at[:, None] % 2 == at[None] % 2) | (at[None] == 0)
                visible = jnp.broadcast_to((alike & (at[:, None] >= at[None]))[None], (self.rows, self.T, self.T))
            inputs = q * self.H**-0.5, k, draw(5, *heads, self.G, self.Hv), g, beta, state, visible
            return call(*inputs)

        return jax.jit(read)(jax.random.key(0))
