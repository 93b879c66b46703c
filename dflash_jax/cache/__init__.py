"""The committed state of a model. A forward pass only reads a cache; `commit` is its only writer.

A cache is a tuple of entries, one for each layer that has one of its own. What an entry holds is its own affair: keys
and values, a ring of them, a recurrent state. Lengths are not part of it: they stand once, in the decoding state.
Shapes: R cache rows, B block rows, T block positions, J positions of an accepted path.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax.cache.attention import KV as KV
from dflash_jax.cache.attention import Fresh as Fresh
from dflash_jax.cache.attention import Path, Rows, commit_alike
from dflash_jax.cache.int8 import Int8KV
from dflash_jax.cache.pages import Capacity as Capacity
from dflash_jax.cache.pages import Pages as Pages
from dflash_jax.cache.pages import Recent as Recent
from dflash_jax.cache.pages import Windowed as Windowed
from dflash_jax.mesh import HEADS, ROWS, WHOLE, Layout, row_parts, split_evenly


class Carried(Protocol):
    """What a model carries from step to step, for every row: a pytree, such as a `Cache`."""

    def begin(self, row: Int[Array, ""]) -> Self:
        """The same with this row empty, ready for a new sequence."""
        ...

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> PyTree:
        """What a row needs to continue after its committed positions `start..start+count-1`, given all before them;
        a pytree of arrays [1, ...] with a method `partition` of its own. The row must end there. One that has an
        attribute `whole` that is true needs none of those before, however many they are."""
        ...

    def restore(self, snapshot: PyTree, row: Int[Array, ""], end: Int[Array, ""]) -> Self:
        """The same with a snapshot, of this one or of one with another number of slots, whose last position is
        `end - 1`."""
        ...

    def partition(self) -> Self:
        """The mesh axes of every array: a `PartitionSpec` in the place of each."""
        ...


class Entry(Carried, Protocol):
    """What one layer has committed; see `attention.KV`."""

    def commit(self, fresh: PyTree, lengths: Rows, kept: Rows, *, path: Path | None, rows: Rows | None) -> Self:
        """The entry with the first `kept` positions of a block after `lengths`; see `commit`."""
        ...


class Mixer(Protocol):
    """The description of a layer, as far as its cache and the mesh are concerned. See `config.AttentionConfig`."""

    @property
    def shares(self) -> int | None:
        """An earlier layer whose entry it reads, or None."""
        ...

    def entry(self, rows: int, slots: int, dtype: DTypeLike, layout: Layout, widest: int) -> Entry: ...
    def indivisible(self, layout: Layout, block: int = 1) -> str | None:
        """Why it cannot be split so, or None.

        Args:
            block: outputs, and inputs, of a weight that cannot be parted (of quantized blocks).
        """
        ...


class Cache(struct.PyTreeNode):
    """The committed state of one model. Its methods are those of its entries (see `Carried`).

    Attributes:
        entries: one for each layer that has its own.
        of_layer: index of the entry that each layer reads; layers may share one.
        pages: of each row, where entries may lie in pages (see `pages`).
        held: positions that each row has pages for.
    """

    entries: tuple[Entry, ...]
    of_layer: tuple[int, ...] = struct.field(pytree_node=False)
    pages: Int[Array, "R M"] | None = None
    held: Int[Array, " R"] | None = None

    def room(self, lengths: Rows, rows: Rows | None) -> Rows | None:
        """How many more positions rows of these lengths have memory for, besides their anchors, which histories have;
        None is no limit."""
        if self.held is None:
            return None
        return jnp.maximum(0, (self.held if rows is None else self.held[rows]) - 1 - lengths)

    @property
    def page(self) -> int | None:
        """Positions of a page that rows may share; None if no entry lies in such pages."""
        sizes = (entry.k.shape[2] for entry in self.entries if isinstance(entry, KV) and entry.pooled)
        return next(sizes, None)

    def entry(self, layer: int) -> Entry:
        """What a layer reads."""
        return self.bound[self.of_layer[layer]]

    @property
    def bound(self) -> list[Entry]:
        """The entries, those in pages with the table."""
        put = lambda entry: entry.replace(pages=self.pages) if isinstance(entry, KV) and entry.paged else entry
        return list(map(put, self.entries))

    def having(self, entries: Iterable[Entry]) -> "Cache":
        """The same with other entries, whose table is left out."""
        plain = lambda entry: entry.replace(pages=None) if isinstance(entry, KV) else entry
        return self.replace(entries=tuple(map(plain, entries)))

    def begin(self, row: Int[Array, ""]) -> "Cache":
        return self.having(entry.begin(row) for entry in self.bound)

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> tuple[PyTree, ...]:
        return tuple(entry.snapshot(row, start, count) for entry in self.bound)

    def restore(self, snapshot: tuple[PyTree, ...], row: Int[Array, ""], end: Int[Array, ""]) -> "Cache":
        """An entry whose snapshot is None stays as it is."""
        pairs = zip(self.bound, snapshot, strict=True)
        return self.having(e if one is None else e.restore(one, row, end) for e, one in pairs)

    def partition(self) -> "Cache":
        pages, held = (None if x is None else PartitionSpec(ROWS) for x in (self.pages, self.held))
        return self.replace(entries=tuple(entry.partition() for entry in self.entries), pages=pages, held=held)


def init_cache(
    mixers: Sequence[Mixer],
    rows: int,
    slots: Capacity,
    dtype: DTypeLike,
    layout: Layout = WHOLE,
    widest: int = 1,
    *,
    int8: bool = False,
) -> Cache:
    """Allocates an empty cache of `rows` rows with room for `slots` positions.

    Args:
        mixers: one per layer; one that shares reads the entry of an earlier layer.
        slots: of every row, or pages that all rows share, or the last positions. What holds something else than all
            positions lies in rows then, too.
        widest: the longest block that is committed at once, for which writers may want some room.
        int8: whether keys and values are kept as codes of 8 bits. Latents and recurrent states are not.
    """
    entries: list[Entry] = []
    of_layer: list[int] = []
    for mixer in mixers:
        of_layer.append(len(entries) if mixer.shares is None else of_layer[mixer.shares])
        if mixer.shares is None:
            make = lambda rows, slots, m=mixer: m.entry(rows, slots, dtype, layout, widest)
            if int8:
                make = lambda rows, slots, made=make: _coded(made(rows, slots))
            entries.append(make(rows, slots) if isinstance(slots, int) else _in_pages(make, rows, slots, widest))
    cache = Cache(tuple(entries), tuple(of_layer))
    if isinstance(slots, Pages):
        cache = cache.replace(pages=jnp.asarray(slots.empty(rows, row_parts())), held=jnp.zeros(rows, jnp.int32))
    elif isinstance(slots, Recent):
        cache = cache.replace(pages=jnp.asarray(slots.table(rows, widest)))
    return cache


def _coded(entry: Entry) -> Entry:
    """The same as codes, if it holds keys and values."""
    return Int8KV.like(entry) if type(entry) is KV else entry


def _in_pages(make: Callable[[int, int], Entry], rows: int, slots: Pages | Recent, widest: int) -> Entry:
    """An entry in pages, if it holds all positions, and the heads of a mesh split it: rows of one that they do not are
    split further than the pages of others."""
    like = jax.eval_shape(lambda: make(rows, slots.longest))
    if not isinstance(like, KV) or like.ring or not split_evenly(like.k.shape[1], HEADS):
        return make(rows, slots.longest)
    if isinstance(slots, Pages):
        total, recent = slots.total, None
    else:
        total, recent = rows * (1 + slots.ring(widest)), slots.seen
    room = lambda x: jnp.zeros((total, x.shape[1], slots.size, x.shape[3]), x.dtype)
    return jax.tree.map(room, like.replace(paged=True, recent=recent))


def with_pages(carried: PyTree, table: Callable[[], tuple[Int[Array, "R M"], Int[Array, " R"]]]) -> PyTree:
    """The same with these pages, and positions held, in each cache whose rows share pages: arrays for each, since
    programs donate their own."""

    def put(x: PyTree) -> PyTree:
        if not isinstance(x, Cache) or x.held is None:
            return x
        pages, held = table()
        return x.replace(pages=pages, held=held)

    return jax.tree.map(put, carried, is_leaf=lambda x: isinstance(x, Cache))


def once_read(kept: Rows, hidden: Float[Array, "B T D"]) -> Rows:
    """`kept`, as a value that is not known before the pass that returned `hidden` is complete.

    How many positions are committed often follows from that pass. Where it does not, as for a prompt, nothing keeps
    XLA from writing a layer's cache before the pass has read it, and so it copies every cache first. (Its
    optimization barrier helps from jax 0.12 on only.)
    """
    return kept + (jnp.sum(jnp.isnan(hidden)) < 0).astype(kept.dtype)  # a count is never negative: adds 0


def commit(
    cache: Cache,
    fresh: Sequence[PyTree],
    lengths: Rows,
    kept: Rows,
    *,
    path: Path | None = None,
    rows: Rows | None = None,
) -> Cache:
    """Appends the first `kept` positions of a block, in the order of `path`, to each row.

    Args:
        cache: the cache that the block was computed against.
        fresh: what the pass found for the block, one per entry.
        lengths: committed positions of each row before.
        kept: how many positions each row keeps; 0 leaves the row as it is.
        path: block positions in commit order (a tree's accepted path); None takes them as they are.
        rows: cache row of each of the block's rows, all different; None if the block has every row, in order.
    """
    entries, alike = cache.bound, dict[Hashable, dict[int, KV]]()
    for i, (entry, block) in enumerate(zip(cache.bound, fresh, strict=True)):
        if isinstance(entry, KV) and type(entry).commit is KV.commit:
            shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves((entry, block)))
            alike.setdefault((jax.tree.structure(entry), shapes), {})[i] = entry
        else:
            entries[i] = entry.commit(block, lengths, kept, path=path, rows=rows)
    for some in alike.values():
        written = commit_alike([*some.values()], [fresh[i] for i in some], lengths, kept, path=path, rows=rows)
        for i, entry in zip(some, written, strict=True):
            entries[i] = entry
    return cache.having(entries)


def size_in_bytes(tree: PyTree) -> int:
    """Bytes of all arrays (or their shapes) in a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
