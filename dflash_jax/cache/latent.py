"""The cache entry of a latent attention layer: of every position one vector, from which all heads have their keys and
values. Its first entries are the latent, the others a rotated part that the keys of all heads share.

Shapes: R cache rows, S slots, L entries of a vector, C of them in the latent; otherwise as in `attention`.
"""

from typing import Any, Self

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.cache.attention import KV, Fresh, Rows
from dflash_jax.kernels.block_attention import attend, expand
from dflash_jax.kernels.cache_update import room
from dflash_jax.mesh import split_cache


class Latent(KV):
    """Committed vectors of one layer, as keys [R, 1, S, L] of a single head without values; an `Entry`."""

    @classmethod
    def empty(cls, rows: int, slots: int, size: int, dtype: DTypeLike, widest: int) -> "Latent":
        """An entry without positions; see `KV.allocate`."""
        return cls(jnp.zeros((rows, 1, room(slots, widest), size), dtype), None)

    def attend(
        self,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        fresh: Fresh,
        lengths: Rows,
        *,
        up: Float[Array, "N U C"] | None = None,
        expanded: bool = False,
        **settings: Any,
    ) -> Float[Array, "B T N Hv"]:
        """See `KV.attend`.

        Args:
            up: what makes keys and values of every head from latents.
            expanded: whether it does. Else the queries are of whole vectors, and what comes out is of latents.
        """
        assert up is not None
        settings |= self.places(settings.get("rows"))
        if expanded:
            return attend(q, positions, *expand(fresh.k, up, q.shape[-1]), self, lengths, up=up, **settings)
        return attend(q, positions, fresh.k, fresh.k[..., : up.shape[2]], self, lengths, **settings)

    def partition(self) -> Self:
        """Rows are split, over the axes of heads, too, where these divide them."""
        return self.replace(k=P(*split_cache(*self.k.shape[:2])))
