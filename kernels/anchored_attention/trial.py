"""A small case of a call of `api.attend_anchored`, on which its implementations are compared."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..interval_attention import ROUNDED
from ..verify import TOLERANCE

MOST = 1024  # queries or keys that any kernel takes at once
LEAST = 520  # keys of context, and queries of a row: several tiles of every kernel


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), type and options, with few rows, blocks and heads.

    Kernels take as many queries and keys at once as fit their numbers. A trial has numbers that the same tiles fit.
    """

    rows: int
    A: int
    T: int
    F: int
    N: int
    K: int
    H: int
    S: int
    dtype: str
    visible: str
    window: int | None
    scale: float

    @classmethod
    def of(
        cls,
        q: Float[Array, "B A T N H"],
        k: Float[Array, "B A K F H"],
        context_k: Float[Array, "B K S H"],
        *,
        visible: str,
        window: int | None,
        scale: float,
    ) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        (B, A, T, N, H), (K, F), S = q.shape, k.shape[2:4], context_k.shape[2]
        alike = lambda a: (_tiles(a * T), _tiles(a * F)) == (_tiles(A * T), _tiles(A * F))
        blocks = next((a for a in range(-(-LEAST // T), A) if alike(a)), A)
        slots = next((s for s in range(LEAST, S) if _tiles(s) == _tiles(S)), S)
        heads = min(K, 2)
        return cls(min(B, 2), blocks, T, F, N // K * heads, heads, H, slots, str(q.dtype), visible, window, scale)

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, TOLERANCE["float32"])

    def run(self, function: Callable[..., Array], /) -> tuple[Array, ...]:
        """What the blocks attend to, and the gradients of all arrays."""
        return jax.jit(lambda key: self.gradients(function, *self.arrays(key)))(jax.random.key(0))

    def arrays(self, key: PRNGKeyArray) -> tuple[Array, ...]:
        """The arrays of a call, with two documents in every row."""
        B, A, K, H = self.rows, self.A, self.K, self.H
        sizes = (A, self.T, self.N, H), (A, K, self.F, H), (A, K, self.F, H), (K, self.S, H), (K, self.S, H)
        *keys, last = jax.random.split(key, len(sizes) + 1)
        drawn = [jax.random.normal(key, (B, *size), self.dtype) for key, size in zip(keys, sizes, strict=True)]
        anchors = jnp.sort(jax.random.randint(last, (B, A), 0, self.S + 1), axis=1)
        return *drawn, anchors, jnp.where(anchors > self.S // 2, self.S // 3, 0)

    def call(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """The function's result for these arrays, with this call's options."""
        return function(*arrays, visible=self.visible, window=self.window, scale=self.scale)

    def gradients(self, function: Callable[..., Array], *arrays: Array) -> tuple[Array, ...]:
        """The same, and the gradients of all arrays but the bounds."""
        *given, anchors, starts = arrays
        out, pull = jax.vjp(lambda *x: self.call(function, *x, anchors, starts), *given)
        return out, *pull(jnp.cos(out))


def _tiles(count: int) -> tuple[int, bool]:
    """The largest tile that a number is a multiple of once it is rounded up, and whether it had to be."""
    return math.gcd(-(-count // ROUNDED) * ROUNDED, MOST), count % ROUNDED > 0
