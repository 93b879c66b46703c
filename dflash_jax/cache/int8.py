"""The cache entry of an attention layer in 8 bits: codes of keys and values, with a scale for each token and head.

Keys and values are quantized once, after their rotation and before the block attends, so that a position is the same
whether it is read from the block or from the cache.
Shapes: as in `attention`.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Int8

from dflash_jax.cache.attention import KV, Fresh, Rows
from dflash_jax.kernels.block_attention import attend
from dflash_jax.mesh import HEADS, ROWS, split_evenly


class Codes(struct.PyTreeNode):
    """Keys (rotated) and values of one layer in 8 bits that are not, or not yet, part of a cache.

    Attributes:
        scales: of the keys and of the values: codes times their scale.
    """

    k: Int8[Array, "B K T H"]
    v: Int8[Array, "B K T Hv"]
    scales: Float[Array, "B K T 2"]

    @classmethod
    def of(cls, fresh: Fresh) -> "Codes":
        """Keys and values, rounded to 127 steps to either side of 0."""
        assert fresh.v is not None
        (k, of_keys), (v, of_values) = map(_coded, (fresh.k, fresh.v))
        return cls(k, v, jnp.concatenate([of_keys, of_values], axis=-1))

    def parts(self) -> tuple[Array, ...]:
        """Codes and scales as a cache is given them."""
        return self.k, self.v, self.scales

    def partition(self) -> "Codes":
        """The mesh axes of a snapshot's arrays: heads that a mesh cannot split lie on every device."""
        return jax.tree.map(lambda x: P(None, split_evenly(x.shape[1], HEADS)), self)


def _coded(x: Float[Array, "B K T H"]) -> tuple[Int8[Array, "B K T H"], Float[Array, "B K T 1"]]:
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-30) / 127
    return jnp.round(wide / scales).astype(jnp.int8), scales


class Int8KV(KV):
    """Committed keys and values of one attention layer as codes; an `Entry`.

    Attributes:
        scales: of keys and of values.
    """

    k: Int8[Array, "R K S H"]
    v: Int8[Array, "R K S Hv"]  # pyright: ignore[reportIncompatibleVariableOverride] (a cache does not change it)
    scales: Float[Array, "R K S 2"] | None = None

    @classmethod
    def like(cls, entry: KV) -> "Int8KV":
        """An empty entry with the room of this one."""
        zeros = lambda x: jnp.zeros(x.shape, jnp.int8)
        scales = jnp.zeros((*entry.k.shape[:3], 2), jnp.float32)
        return cls(zeros(entry.k), zeros(entry.v), entry.ring, entry.paged, entry.recent, entry.pages, scales)

    def stored(self, fresh: Fresh) -> Codes:
        """See `KV.stored`."""
        return Codes.of(fresh)

    def attend(
        self, q: Float[Array, "B T N H"], positions: Int[Array, "B T"], fresh: Codes, lengths: Rows, **settings: Any
    ) -> Float[Array, "B T N Hv"]:
        """See `KV.attend`."""
        settings |= self.places(settings.get("rows"))
        return attend(q, positions, fresh.k, fresh.v, self, lengths, scales=fresh.scales, **settings)

    @property
    def arrays(self) -> Codes:
        """See `KV.arrays`."""
        assert self.scales is not None
        return Codes(self.k, self.v, self.scales)

    def parts(self) -> tuple[Array | None, ...]:
        """See `KV.parts`."""
        return self.k, self.v, self.scales

    def having(self, *parts: Array | None) -> Self:
        """See `KV.having`."""
        k, v, scales = parts
        return self.replace(k=k, v=v, scales=scales)

    def partition(self) -> Self:
        """Rows and heads are split."""
        return super().partition().replace(scales=P(ROWS, HEADS))


Stored = Fresh | Codes  # what is fresh as an entry holds it
