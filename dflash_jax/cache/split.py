"""A cache entry whose rows are not equally long: one long request must not make every row long.

Rows stand in groups of one length each. A mesh splits rows into parts, and every part has rows of every group: of its
rows, the first ones are the first group's.
Shapes: R cache rows, B block rows, T block positions, N query heads, H head dim.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax.cache.attention import Path, Rows
from dflash_jax.cache.pages import Pages
from dflash_jax.mesh import row_parts


class Group(NamedTuple):
    """So many rows with room for so many positions each."""

    rows: int
    slots: int


Capacity = int | tuple[Group, ...] | Pages  # slots of every row, the groups that rows stand in, or their pages


def groups_of(rows: int, slots: Capacity) -> tuple[Group, ...]:
    """The groups of a cache of `rows` rows: `slots` names them, or is the length of all, or pages for that.

    Raises:
        ValueError: the groups have not so many rows, or a mesh is entered that does not split each of them evenly.
    """
    if isinstance(slots, Pages):
        return (Group(rows, slots.of_row * slots.size),)
    groups = (Group(rows, slots),) if isinstance(slots, int) else slots
    parts = row_parts() if len(groups) > 1 else 1
    if sum(group.rows for group in groups) != rows or any(group.rows % parts for group in groups):
        raise ValueError(f"{groups} must have {rows} rows, each a multiple of {parts} (the mesh's parts of rows)")
    return groups


class Selected(NamedTuple):
    """The rows of a block that may lie in one group, m of each of p parts: those that do first, then others.

    Attributes:
        parts: p, in which the block lies.
        at: places in the block, within their part: the same of all parts, or each part's own.
        inside: whether they lie in the group; None is all of them.
        rows: of the group's entry, all different; None is every one, in order.
    """

    parts: int
    at: slice | Int[Array, "p m"]
    inside: Bool[Array, "p m"] | None = None
    rows: Int[Array, " _"] | None = None

    def take(self, x: PyTree) -> PyTree:
        """Their rows of an array [B, ...] or of several; None stays None."""

        def one(x: Array) -> Array:
            parted = x.reshape(self.parts, -1, *x.shape[1:])
            if isinstance(self.at, slice):
                return parted[:, self.at].reshape(-1, *x.shape[1:])
            at = self.at.reshape(*self.at.shape, *(1,) * (x.ndim - 1))
            return jnp.take_along_axis(parted, at, axis=1).reshape(-1, *x.shape[1:])

        return jax.tree.map(one, x)

    def take_counts(self, x: Int[Array, " B"]) -> Int[Array, " _"]:
        """The same of lengths or counts, which are 0 for a row that lies elsewhere."""
        return self.take(x) if self.inside is None else jnp.where(self.inside.reshape(-1), self.take(x), 0)

    def put(self, x: Float[Array, "B ..."], new: Float[Array, "_ ..."]) -> Float[Array, "B ..."]:
        """`x` with the rows that lie in the group replaced."""
        parted, new = (y.reshape(self.parts, -1, *y.shape[1:]) for y in (x, new))
        if isinstance(self.at, slice):
            return parted.at[:, self.at].set(new).reshape(x.shape)
        assert self.inside is not None
        at = jnp.where(self.inside, self.at, parted.shape[1])
        return parted.at[jnp.arange(self.parts)[:, None], at].set(new, mode="drop").reshape(x.shape)


class Split(struct.PyTreeNode):
    """An entry with rows in groups; an `Entry` where theirs are.

    Attributes:
        entries: of each group, alike but for their lengths.
        rows: of each group.
    """

    entries: tuple[PyTree, ...]
    rows: tuple[int, ...] = struct.field(pytree_node=False)

    def attend(
        self,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        fresh: PyTree,
        lengths: Rows,
        *,
        visible: Any,
        rows: Rows | None,
        starts: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B F"] | None = None,
        **settings: Any,
    ) -> Float[Array, "B T N Hv"]:
        """See `KV.attend`: the rows of each group attend to their own entry."""
        out: Array | None = None
        by_row = not isinstance(visible, str) and visible.ndim == 3
        for group, entry in enumerate(self.entries):
            selected = self._selected(rows, group)
            new = entry.attend(
                *selected.take((q, positions, fresh)),
                selected.take_counts(lengths),
                visible=selected.take(visible) if by_row else visible,
                rows=selected.rows,
                starts=selected.take(starts),
                key_positions=selected.take(key_positions),
                **settings,
            )
            out = selected.put(jnp.zeros((q.shape[0], *new.shape[1:]), new.dtype) if out is None else out, new)
        assert out is not None
        return out

    def begin(self, row: Int[Array, ""]) -> "Split":
        """Each group's entry with the row begun, if the row is its own."""

        def begun(entry: PyTree, group: int) -> PyTree:
            inside, at = self._place(row, group)
            new = entry.begin(jnp.where(inside, at, 0))
            return entry if new is entry else jax.tree.map(lambda a, b: jnp.where(inside, a, b), new, entry)

        return self.replace(entries=tuple(begun(entry, group) for group, entry in enumerate(self.entries)))

    def commit(self, fresh: PyTree, lengths: Rows, kept: Rows, *, path: Path | None, rows: Rows | None) -> "Split":
        new = []
        for group, entry in enumerate(self.entries):
            selected = self._selected(rows, group)
            counts = selected.take_counts(lengths), selected.take_counts(kept)
            new.append(entry.commit(selected.take(fresh), *counts, path=selected.take(path), rows=selected.rows))
        return self.replace(entries=tuple(new))

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> PyTree:
        """Of no more positions than the shortest row holds."""
        found = None
        for group, entry in enumerate(self.entries):
            inside, at = self._place(row, group)
            snapshot = entry.snapshot(jnp.where(inside, at, 0), start, count)
            found = snapshot if found is None else jax.tree.map(partial(jnp.where, inside), snapshot, found)
        return found

    def restore(self, snapshot: PyTree, row: Int[Array, ""], end: Int[Array, ""]) -> "Split":
        new = []
        for group, entry in enumerate(self.entries):
            inside, at = self._place(row, group)
            # Of a row that ends at 0, nothing is restored.
            new.append(entry.restore(snapshot, jnp.where(inside, at, 0), jnp.where(inside, end, 0)))
        return self.replace(entries=tuple(new))

    def partition(self) -> "Split":
        return self.replace(entries=tuple(entry.partition() for entry in self.entries))

    def _within(self, group: int) -> tuple[int, int, int, int]:
        """Parts of the mesh, rows of each part, where the group begins there, and how many rows it has there."""
        parts = row_parts()
        return parts, sum(self.rows) // parts, sum(self.rows[:group]) // parts, self.rows[group] // parts

    def _place(self, rows: Int[Array, "..."], group: int) -> tuple[Bool[Array, "..."], Int[Array, "..."]]:
        """Whether rows lie in the group, and which ones of its entry they are."""
        _, of_part, first, count = self._within(group)
        part, within = rows // of_part, rows % of_part - first
        return (within >= 0) & (within < count), part * count + within

    def _selected(self, rows: Int[Array, " B"] | None, group: int) -> Selected:
        parts, _, first, count = self._within(group)
        if rows is None:
            return Selected(parts, slice(first, first + count))
        if rows.shape[0] % parts:  # the block is not split: each device has all of it
            parts, count = 1, self.rows[group]
        inside, local = (x.reshape(parts, -1) for x in self._place(rows, group))
        most = min(inside.shape[1], count)
        at = jnp.argsort(~inside, axis=1, stable=True)[:, :most]
        inside, local = (jnp.take_along_axis(x, at, axis=1) for x in (inside, local))
        first = jnp.arange(parts)[:, None] * count  # row of the entry in each part
        place = jnp.where(inside, local - first, count)
        taken = jnp.zeros((parts, count), bool).at[jnp.arange(parts)[:, None], place].set(True, mode="drop")
        unused = jnp.argsort(taken, axis=1, stable=True)
        spare = jnp.take_along_axis(unused, jnp.maximum(jnp.cumsum(~inside, axis=1) - 1, 0), axis=1)
        return Selected(parts, at, inside, (first + jnp.where(inside, place, spare)).reshape(-1))
