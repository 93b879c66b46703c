"""The cache entry of an attention layer: keys and values, plain, as a ring, or in pages. There may be no values (see
`latent`).

Shapes: R cache rows, B block rows, K key-value heads, S slots, H head dim, T block positions, C snapshot positions, M
pages of a row.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax.kernels.anchored_attention import attend_anchored
from dflash_jax.kernels.block_attention import Joined, attend
from dflash_jax.kernels.cache_update import Part, append, room
from dflash_jax.mesh import HEADS, ROWS, from_owner, local_pages, local_rows, on_each_device, split_cache, split_evenly

Rows = Int[Array, " B"]  # something of every row of a block: its length, or the cache row that it is
Path = Int[Array, "B J"]  # block positions in the order in which they are committed
PIECE = 128  # positions of a long snapshot that are written at once, however narrow the blocks of its writer


class Fresh(struct.PyTreeNode):
    """Keys (rotated) and values of one layer that are not, or not yet, part of a cache.

    Attributes:
        joined: the same beside the block's queries, where a kernel reads them so (see `block_attention.together`).
    """

    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T Hv"] | None
    joined: Joined | None = None

    def parts(self) -> tuple[Array | Part | None, ...]:
        """Keys and values as a cache is given them."""
        if self.joined is None or self.v is None:
            return self.k, self.v
        rows, (_, keys, *first) = self.joined.rows, self.joined.places
        return Part(self.k, rows, first[0], keys), Part(self.v, rows, first[1], keys)

    def partition(self) -> "Fresh":
        """The mesh axes of a snapshot's arrays: its heads are split, or what is in a head that cannot be."""

        def axes(x: Array) -> P:
            if split_evenly(x.shape[1], HEADS):
                return P(None, HEADS)
            return P(None, None, None, split_evenly(x.shape[3], HEADS))

        return jax.tree.map(axes, self)


@runtime_checkable
class AnyFresh(Protocol):
    """What a pass found for an entry, as the entry holds it."""

    def parts(self) -> tuple[Array | Part | None, ...]:
        """The arrays for each of the entry's."""
        ...


class KV(struct.PyTreeNode):
    """Committed keys and values of one attention layer; an `Entry`.

    Attributes:
        k, v: position p lies in slot p, or in slot p modulo S if `ring`. In pages it lies in slot p modulo S of its
            row's page p // S, and R is the number of pages.
        ring: whether new positions overwrite the oldest (a sliding window needs no more than its width).
        paged: whether rows lie in pages.
        recent: how many pages of a row are read besides its first, the last ones; None is all.
        pages: which ones, of each row (see `pages.Pages`). They stand once, in the cache; see `Cache.entry`.
    """

    k: Float[Array, "R K S H"]
    v: Float[Array, "R K S Hv"] | None
    ring: bool = struct.field(pytree_node=False, default=False)
    paged: bool = struct.field(pytree_node=False, default=False)
    recent: int | None = struct.field(pytree_node=False, default=None)
    pages: Int[Array, "_ M"] | None = None

    @classmethod
    def allocate(
        cls, rows: int, heads: int, slots: int, size: int, dtype: DTypeLike, *, window: int | None, widest: int
    ) -> "KV":
        """An empty entry; with a window, a ring that holds it. Slots are rounded up to what the writer can update in
        place for blocks of up to `widest` positions."""
        places, ring = room(slots, widest), False
        if window is not None and room(max(window - 1, 1), widest) < places:
            places, ring = room(max(window - 1, 1), widest), True
        shape = (rows, heads, places, size)
        # One buffer a leaf: donation fails on a shared one.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring)

    def attend(
        self, q: Float[Array, "B T N H"], positions: Int[Array, "B T"], fresh: PyTree, lengths: Rows, **settings: Any
    ) -> Float[Array, "B T N Hv"]:
        """Attention of a block to the committed positions and to its own, as `stored` made it; see
        `kernels.block_attention.attend`."""
        settings |= self.places(settings.get("rows"))
        if self.recent is not None:
            settings["pages"], left_out = self._last_pages(settings["pages"], lengths, self.recent)
            positions, lengths = positions - left_out[:, None], lengths - left_out
            if (at := settings.get("key_positions")) is not None:
                settings["key_positions"] = at - left_out[:, None]
        return attend(q, positions, fresh.k, fresh.v, self, lengths, joined=fresh.joined, **settings)

    @property
    def pooled(self) -> bool:
        """Whether it lies in pages that rows may share."""
        return self.paged and self.recent is None

    def _last_pages(
        self, pages: Int[Array, "B M"], lengths: Rows, count: int
    ) -> tuple[Int[Array, "B _"], Int[Array, " B"]]:
        """The first page of each row and so many of the last ones, and how many positions between these are left out.
        What is read then lies as if these had never been."""
        size = self.k.shape[2]
        first = jnp.maximum(1, (lengths - 1) // size - count + 1)
        last = jnp.minimum(first[:, None] + jnp.arange(count)[None], pages.shape[1] - 1)
        return jnp.concatenate([pages[:, :1], jnp.take_along_axis(pages, last, axis=1)], axis=1), (first - 1) * size

    def places(self, rows: Rows | None) -> dict[str, Array | None]:
        """Where these rows are, as kernels ask for it: `rows` or `pages`."""
        if not self.paged:
            return {"rows": rows}
        assert self.pages is not None, "pages stand in the cache: ask `Cache.entry` for this one"
        return {"rows": None, "pages": self.pages if rows is None else self.pages[rows]}

    def attend_anchored(
        self, q: Float[Array, "B T N H"], fresh: Fresh, anchors: Rows, starts: Rows, per_row: int, **settings: Any
    ) -> Float[Array, "B T N Hv"]:
        """The same for `per_row` blocks to each row, differentiable; see `kernels.anchored_attention`."""
        assert self.v is not None
        fold = lambda x: x.reshape(-1, per_row, *x.shape[1:])
        q_folded, k, v = map(fold, (q, fresh.k, fresh.v))
        out = attend_anchored(q_folded, k, v, self.k, self.v, fold(anchors), fold(starts), **settings)
        return out.reshape(q.shape[0], *out.shape[2:])

    def stored(self, fresh: Fresh) -> PyTree:
        """What is fresh as this entry will hold it, which the block attends to, too."""
        return fresh

    @property
    def arrays(self) -> PyTree:
        """Keys and values, as a snapshot has them."""
        return Fresh(self.k, self.v)

    def parts(self) -> tuple[Array | None, ...]:
        """The same as the writer is given them, beside those of a block."""
        return self.k, self.v

    def having(self, *parts: Array | None) -> Self:
        """The entry with other arrays."""
        k, v = parts
        return self.replace(k=k, v=v)

    def begin(self, row: Int[Array, ""]) -> Self:
        """As it is: what lies beyond a row's length is never read."""
        return self

    def commit(
        self, fresh: AnyFresh, lengths: Rows, kept: Rows, *, path: Path | None = None, rows: Rows | None = None
    ) -> Self:
        """What does not fit is dropped."""
        return commit_alike([self], [fresh], lengths, kept, path=path, rows=rows)[0]

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> PyTree:
        """The row's `count` positions from `start` on, or the last of them that a ring holds."""
        size = count if self.paged else min(count, self.k.shape[2])
        start = start + (count - size)

        def local(entry: PyTree, row: jax.Array, pages: jax.Array | None, start: jax.Array) -> PyTree:
            slots = (start + jnp.arange(size)) % self.k.shape[2]
            if pages is None:
                rows, owned = local_rows(row[None], entry.k.shape[0], held)
                assert rows is not None
                pick = lambda x: x[rows[0]][:, slots]
            else:
                (of_row,), (owned,) = local_pages(pages, entry.k.shape[0], held)
                at = of_row[jnp.clip((start + jnp.arange(size)) // self.k.shape[2], 0, of_row.shape[0] - 1)]
                pick = lambda x: x[at, :, slots].swapaxes(0, 1)
            return jax.tree.map(lambda x: from_owner(pick(x)[None], owned, held or ()), entry)

        held, heads = split_cache(*self.k.shape[:2])
        run = on_each_device(local, (P(held, heads), P(), P(), P()), P(None, heads))
        return run(self.arrays, row, self.places(row[None]).get("pages"), start)

    def restore(self, snapshot: PyTree, row: Int[Array, ""], end: Int[Array, ""]) -> Self:
        """What lies before position 0 is left out. A long snapshot is written piece by piece."""
        size = snapshot.k.shape[2]
        width = size if size <= 2 * PIECE else PIECE

        def piece(i: Int[Array, ""] | int, entry: Self) -> Self:
            at = end - size + i * width  # of its first position
            skip = jnp.clip(-at, 0, width)
            kept = jnp.minimum(size - i * width, width) - skip
            path = jnp.clip(i * width + skip + jnp.arange(width), 0, size - 1)
            some = jax.tree.map(lambda x: x[:, :, path], snapshot)
            return entry.commit(some, (at + skip)[None], jnp.maximum(kept, 0)[None], rows=row[None])

        return piece(0, self) if width == size else jax.lax.fori_loop(0, -(-size // width), piece, self)

    def partition(self) -> Self:
        """Rows and heads are split."""
        return self.replace(k=P(ROWS, HEADS), v=P(ROWS, HEADS), pages=None if self.pages is None else P(ROWS))


Alike = TypeVar("Alike", bound=KV)


def commit_alike(
    entries: Sequence[Alike],
    fresh: Sequence[AnyFresh],
    lengths: Rows,
    kept: Rows,
    *,
    path: Path | None = None,
    rows: Rows | None = None,
) -> list[Alike]:
    """`KV.commit` of entries of one shape, which a device may write at once."""
    caches, blocks = [entry.parts() for entry in entries], [block.parts() for block in fresh]
    first, where = entries[0], entries[0].places(rows)
    how = {"path": path, "ring": first.ring}
    written = append(caches, blocks, lengths, kept, where["rows"], pages=where.get("pages"), **how)
    return [entry.having(*parts) for entry, parts in zip(entries, written, strict=True)]
