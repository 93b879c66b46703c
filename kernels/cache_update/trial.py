"""A small case of a call of `api.append`, on which its implementations are compared."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), type and options, with few rows and slots."""

    rows: int
    T: int
    K: int
    H: int
    Hv: int
    slots: int
    dtype: str
    ring: bool

    @classmethod
    def of(
        cls,
        cache_k: Float[Array, "R K S H"],
        cache_v: Float[Array, "R K S Hv"],
        k: Float[Array, "B K T H"],
        ring: bool,
    ) -> "Trial":
        """The trial of a call with arrays of these shapes."""
        (B, K, T, H), slots, Hv = k.shape, cache_k.shape[2], cache_v.shape[3]
        step = 128 << max(0, (T - 1).bit_length() - 7)  # a multiple of all windows that an implementation may write
        return cls(min(B, 2), T, K, H, Hv, slots if slots % step else min(slots, 4 * step), str(k.dtype), ring)

    @property
    def tolerance(self) -> float:
        return 0.0

    def run(self, implementation: str) -> tuple[Array, Array]:
        """Both caches: a block over the border of a window, and one at the end that keeps half of its positions."""
        from .api import append

        S, T = self.slots, self.T
        lengths = jnp.asarray([S // 4 - T // 2, S - T // 4 - 1], jnp.int32)[: self.rows].clip(0)
        kept = jnp.asarray([T, T - T // 2], jnp.int32)[: self.rows]

        def call(key: PRNGKeyArray) -> tuple[Array, Array]:
            keys = jax.random.split(key, 4)
            draw = lambda i, *size: jax.random.normal(keys[i], size, self.dtype)
            # One cache row more than the block has; what is not kept is NaN.
            cache_k, cache_v = (draw(i, self.rows + 1, self.K, S, width) for i, width in enumerate((self.H, self.Hv)))
            valid = (jnp.arange(T)[None] < kept[:, None])[:, None, :, None]
            k, v = (
                jnp.where(valid, draw(2 + i, self.rows, self.K, T, width), jnp.nan)
                for i, width in enumerate((self.H, self.Hv))
            )
            return append(
                cache_k,
                cache_v,
                k,
                v,
                lengths,
                kept,
                self.rows - jnp.arange(self.rows),
                ring=self.ring,
                implementation=implementation,  # type: ignore[arg-type]
            )

        return jax.jit(call)(jax.random.key(0))
