"""Committed keys and values. A forward pass only reads a cache; `commit` is its only writer.

Shapes: R cache rows, B block rows, K key-value heads, S slots, H head dim, T block positions, J path length.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.config import DecoderConfig
from dflash_jax.kernels.cache_update import append
from dflash_jax.mesh import HEADS, ROWS, from_owner, local_row, on_each_device

TILE = 128  # slots


class Block(struct.PyTreeNode):
    """Fresh keys (rotated) and values of one layer, not yet committed."""

    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]


class KV(struct.PyTreeNode):
    """Committed keys and values of one attention layer.

    Attributes:
        k, v: position p lies in slot p, or in slot p modulo S if `ring`.
        ring: whether new positions overwrite the oldest (a sliding window needs no more than its width).
    """

    k: Float[Array, "R K S H"]
    v: Float[Array, "R K S H"]
    ring: bool = struct.field(pytree_node=False, default=False)

    def read(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> Block:
        """One row's `count` positions from `start` on, which must be committed; of a ring, those it still holds."""

        def local(k: jax.Array, v: jax.Array, row: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
            row, here = local_row(row, k.shape[0], False)
            slots = (start + jnp.arange(count)) % k.shape[2]
            return tuple(from_owner(x[row][:, slots][None], here) for x in (k, v))

        held = PartitionSpec(ROWS, HEADS)
        whole = PartitionSpec(None, HEADS)
        run = on_each_device(local, (held, held, PartitionSpec(), PartitionSpec()), (whole, whole))
        return Block(*run(self.k, self.v, row, start))

    def write(self, block: Block, lengths: Int[Array, " B"], kept: Int[Array, " B"], row: Int[Array, ""] | int) -> "KV":
        """Writes the first `kept` block positions behind `lengths`; what does not fit is dropped."""
        k, v = append(self.k, self.v, block.k, block.v, lengths, kept, row, ring=self.ring)
        return self.replace(k=k, v=v)


class Cache(struct.PyTreeNode):
    """The committed state of one model.

    Attributes:
        entries: one per layer.
        lengths: committed positions of each row; the next position to be written.
    """

    entries: tuple[KV, ...]
    lengths: Int[Array, " R"]


def init_cache(config: DecoderConfig, rows: int, slots: int, dtype: jnp.dtype) -> Cache:
    """Allocates an empty cache of `rows` rows with room for `slots` positions; a windowed layer gets a ring that holds
    its window. More than a tile of slots is rounded up to whole tiles: a kernel would have to copy any other cache."""

    def whole(size: int) -> int:
        return -(-size // TILE) * TILE if size > TILE // 2 else size

    def entry(window: int | None) -> KV:
        ring, size = False, whole(slots)
        if window is not None and whole(max(window - 1, 1)) < size:
            ring, size = True, whole(max(window - 1, 1))
        shape = (rows, config.num_key_value_heads, size, config.head_dim)
        # One buffer a leaf: donation fails on a shared one.
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring)

    return Cache(tuple(entry(layer.window) for layer in config.layers), jnp.zeros(rows, jnp.int32))


def row_lengths(cache: Cache, row: Int[Array, ""] | int, rows: int) -> Int[Array, " B"]:
    """Committed lengths of the `rows` cache rows from `row` on."""
    return jax.lax.dynamic_slice(cache.lengths, (row,), (rows,))


def once_read(kept: Int[Array, " B"], hidden: Float[Array, "B T D"]) -> Int[Array, " B"]:
    """`kept`, as a value that is not known before the pass that returned `hidden` is complete.

    How many positions are committed often follows from that pass. Where it does not, as for a prompt, nothing keeps
    XLA from writing a layer's cache before the pass has read it, and so it copies every cache first. (Its
    optimization barrier helps from jax 0.12 on only.)
    """
    return kept + (jnp.sum(jnp.isnan(hidden)) < 0).astype(kept.dtype)  # a count is never negative: adds 0


def commit(
    cache: Cache,
    blocks: Sequence[Block],
    kept: Int[Array, " B"],
    *,
    path: Int[Array, "B J"] | None = None,
    row: Int[Array, ""] | int = 0,
) -> Cache:
    """Appends the first `kept` positions of a block, in the order of `path`, to each row.

    Args:
        cache: the cache the blocks were computed against.
        blocks: one per entry.
        kept: how many positions each row keeps; 0 leaves the row as it is.
        path: block positions in commit order (a tree's accepted path); None takes them as they are.
        row: first cache row; the block's rows are contiguous.
    """
    lengths = row_lengths(cache, row, kept.shape[0])
    if path is not None:
        at = path[:, None, :, None]
        blocks = [Block(*(jnp.take_along_axis(x, at, axis=2) for x in (b.k, b.v))) for b in blocks]
    entries = tuple(e.write(b, lengths, kept, row) for e, b in zip(cache.entries, blocks, strict=True))
    return Cache(entries, jax.lax.dynamic_update_slice(cache.lengths, lengths + kept, (row,)))
