"""A small case of a call of `api.append`, on which its implementations are compared."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), type and options, with few rows and slots.

    Attributes:
        Hv: of values; None without any.
    """

    rows: int
    T: int
    K: int
    H: int
    Hv: int | None
    slots: int
    dtype: str
    ring: bool

    @classmethod
    def of(
        cls,
        cache_k: Float[Array, "R K S H"],
        cache_v: Float[Array, "R K S Hv"] | None,
        k: Float[Array, "B K T H"],
        ring: bool,
    ) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        (B, K, T, H), slots, Hv = k.shape, cache_k.shape[2], None if cache_v is None else cache_v.shape[3]
        step = 128 << max(0, (T - 1).bit_length() - 7)  # a multiple of all windows that an implementation may write
        return cls(min(B, 2), T, K, H, Hv, slots if slots % step else min(slots, 4 * step), str(k.dtype), ring)

    @property
    def tolerance(self) -> float:
        return 0.0

    def run(self, call: Callable[..., tuple[Array, Array | None]]) -> tuple[Array, Array | None]:
        """Both caches: a block over the border of a window, and one at the end that keeps half of its positions."""
        S, T = self.slots, self.T
        lengths = jnp.asarray([S // 4 - T // 2, S - T // 4 - 1], jnp.int32)[: self.rows].clip(0)
        kept = jnp.asarray([T, T - T // 2], jnp.int32)[: self.rows]

        valid = (jnp.arange(T)[None] < kept[:, None])[:, None, :, None]

        def drawn(key: PRNGKeyArray, width: int | None) -> tuple[Array, Array] | tuple[None, None]:
            """A cache with one row more than the block has, and a block; what is not kept is NaN."""
            if width is None:
                return None, None
            draw = lambda i, *size: jax.random.normal(jax.random.fold_in(key, i), (*size, width), self.dtype)
            block = jnp.where(valid, draw(1, self.rows, self.K, T), jnp.nan)
            return draw(0, self.rows + 1, self.K, S), block

        def update(key: PRNGKeyArray) -> tuple[Array, Array | None]:
            (cache_k, k), (cache_v, v) = map(drawn, jax.random.split(key, 2), (self.H, self.Hv))
            assert cache_k is not None
            assert k is not None
            rows = self.rows - jnp.arange(self.rows)
            return call(cache_k, cache_v, k, v, lengths, kept, rows, ring=self.ring)

        return jax.jit(update)(jax.random.key(0))
