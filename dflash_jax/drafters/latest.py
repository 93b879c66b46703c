"""What a drafter carries that knows the features of a row's last committed position besides a cache.

Shapes: B rows, R rows of the state, J committed positions, D width.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax.cache import Cache
from dflash_jax.decoding.state import Seen
from dflash_jax.mesh import ROWS


class Latest(struct.PyTreeNode):
    """A cache, and the fused features of each row's last committed position.

    Attributes:
        cache: of the positions before it, and of its own unless `behind`.
        feature: zeros before a row's first position.
        behind: how many of the last committed positions are not in the cache.
    """

    cache: Cache
    feature: Float[Array, "R D"]
    behind: int = struct.field(pytree_node=False, default=0)

    def rows(self, rows: Int[Array, " B"] | None) -> Float[Array, "B D"]:
        """The features of these rows; None is all."""
        return self.feature if rows is None else self.feature[rows]

    def after(self, cache: Cache, fused: Float[Array, "B J D"], seen: Seen) -> "Latest":
        """With this cache, and the features of the last position that is kept of those that were seen.

        Args:
            fused: of all that were seen.
        """
        end = jnp.take_along_axis(fused, jnp.maximum(seen.kept - 1, 0)[:, None, None], axis=1)[:, 0]
        end = jnp.where((seen.kept > 0)[:, None], end, self.rows(seen.rows))
        return self.replace(cache=cache, feature=end if seen.rows is None else self.feature.at[seen.rows].set(end))

    def begin(self, row: Int[Array, ""]) -> "Latest":
        return self.replace(cache=self.cache.begin(row))

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> "Snapshot":
        feature = jax.lax.dynamic_slice_in_dim(self.feature, row, 1)
        return Snapshot(self.cache.snapshot(row, start - self.behind, count), feature)

    def restore(self, snapshot: "Snapshot", row: Int[Array, ""], end: Int[Array, ""]) -> "Latest":
        feature = jax.lax.dynamic_update_slice_in_dim(self.feature, snapshot.feature, row, 0)
        return self.replace(cache=self.cache.restore(snapshot.entries, row, end - self.behind), feature=feature)

    def partition(self) -> "Latest":
        return self.replace(cache=self.cache.partition(), feature=P(ROWS))


class Snapshot(struct.PyTreeNode):
    """What lies in the cache of some positions, and the features after them; see `cache.Entry.snapshot`."""

    entries: tuple[PyTree, ...]
    feature: Float[Array, "1 D"]

    def partition(self) -> "Snapshot":
        return self.replace(entries=tuple(entry.partition() for entry in self.entries), feature=P())
