"""From checkpoint tensors to parameters, declared: a `Table` says for every parameter what it is made of.

Loading goes along the table, saving takes it backwards. Nothing here reads a file. Weights keep torch's [out, in].
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from dflash_jax.checkpoint.sources import Source, Stored
from dflash_jax.quantised import Quantised

Order = tuple[int, ...] | None  # axes of what is taken, in the parameter's order; None leaves them
Take = int | slice | tuple[int, ...]  # along one axis: one place, a slice (with a step), or places in any order


@dataclass(frozen=True)
class Part:
    """Where a piece of a tensor goes: `parameter[index] = transpose(tensor[take], order)`.

    Attributes:
        source: the tensor.
        index: of the parameter: a place or a slice without a step along each axis.
        take: of the tensor, along each of its axes; all of an axis that is not named.
        order: axes of what was taken, in the parameter's order; None leaves them.
    """

    source: Source
    index: tuple[int | slice, ...]
    take: tuple[Take, ...] = ()
    order: Order = None

    def places(self) -> list[int | range | np.ndarray]:
        """What is taken along each axis of the tensor: one place, or several."""
        shape = self.source.shape
        takes = [*self.take, *[slice(None)] * (len(shape) - len(self.take))]
        places: list[int | range | np.ndarray] = []
        for size, take in zip(shape, takes, strict=True):
            if isinstance(take, slice):
                places.append(range(*take.indices(size)))
                continue
            places.append(take if isinstance(take, int) else np.asarray(take))
            if np.size(places[-1]) and not 0 <= np.min(places[-1]) <= np.max(places[-1]) < size:
                raise ValueError(f"{self}: an axis of {size} has no {take}")
        return places


@dataclass(frozen=True)
class Leaf:
    """One parameter and what it is made of.

    Attributes:
        shape: of the parameter.
        parts: together they fill it.
        dtype: of the parameter; None is the model's, and "stored" the one that it has in the file.
        product: whether it is the weight of a product, which may be quantized as it is loaded.
        known: that they do, so that it need not be checked.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str | None = None
    product: bool = False
    known: InitVar[bool] = False

    def __post_init__(self, known: bool):
        if known:
            return
        filled = 0
        for part in self.parts:
            region = [at for at in part.index if isinstance(at, slice)]
            if len(part.index) != len(self.shape) or any(at.step not in (None, 1) for at in region):
                raise ValueError(f"a part's index must be places and slices without a step, got {part.index}")
            taken = [len(places) for places in part.places() if not isinstance(places, int)]
            order = part.order or tuple(range(len(taken)))
            if sorted(order) != list(range(len(taken))):
                raise ValueError(f"order {part.order} must be a permutation of the {len(taken)} axes that are taken")
            sizes = [len(range(*at.indices(n))) for at, n in zip(part.index, self.shape, strict=True) if at in region]
            if sizes != [taken[axis] for axis in order]:
                raise ValueError(f"a part of shape {[taken[a] for a in order]} does not fill a region of {sizes}")
            filled += math.prod(sizes)
        if filled != math.prod(self.shape):
            raise ValueError(f"the parts of a parameter of shape {self.shape} fill {filled} places of it")
        if len(self.parts) > 1 and self._overlap():
            raise ValueError(f"parts of a parameter of shape {self.shape} overlap")

    def _overlap(self) -> bool:
        """Whether two parts fill the same place: counted on the grid of all their edges."""
        boxes = []
        for part in self.parts:
            axes = zip(part.index, self.shape, strict=True)
            boxes.append([at.indices(n)[:2] if isinstance(at, slice) else (at % n, at % n + 1) for at, n in axes])
        edges = [np.unique([box[axis] for box in boxes]) for axis in range(len(self.shape))]
        counts = np.zeros([len(ends_of) for ends_of in edges], np.int32)
        for box in boxes:
            counts[tuple(slice(*np.searchsorted(ends_of, ends)) for ends_of, ends in zip(edges, box, strict=True))] += 1
        return bool(counts.max(initial=0) > 1)


@dataclass(frozen=True)
class QuantisedLeaf:
    """A weight that stays quantized.

    Attributes:
        arrays: the parameters that it is made of, by their names in `kind`.
        kind: of the weight.
        how: what else makes one of its kind.
    """

    arrays: Mapping[str, Leaf]
    kind: type[Quantised]
    how: Mapping[str, Any] = field(default_factory=dict)

    def made(self, arrays: Mapping[str, Any], dtype: DTypeLike | None) -> Quantised:
        """The weight of these arrays, for products in this dtype."""
        return self.kind(**arrays, dtype=dtype, **self.how)


Table = dict[str, Leaf | QuantisedLeaf]


def leaves(table: Table) -> Iterator[tuple[str, Leaf]]:
    """Every parameter array by its path; those of a quantized weight are `path/values`, `path/scale` and so on."""
    for path, leaf in table.items():
        if isinstance(leaf, QuantisedLeaf):
            yield from ((f"{path}/{name}", part) for name, part in leaf.arrays.items())
        else:
            yield path, leaf


def of_product(leaf: Leaf) -> Leaf:
    """The weight of a product, which may be quantized as it is loaded."""
    return replace(leaf, product=True, known=True)


@dataclass(frozen=True)
class Section:
    """Rows that belong together and are split over devices together.

    Attributes:
        source: the tensor they are rows of.
        rows: which, in their order here; None is all.
        copies: how often they are there: that many shards in a row hold the same.
    """

    source: Source
    rows: Sequence[int] | None = None
    copies: int = 1


def copied(name: str, *shape: int, dtype: str | None = None) -> Leaf:
    """A tensor taken as it is."""
    return Leaf(shape, (Part(Stored(name, shape), tuple(slice(0, size) for size in shape)),), dtype)


def fused(
    sections: Sequence[Section], shards: int = 1, dtype: str | None = None, *, axis: int = 0, order: Order = None
) -> Leaf:
    """Sections one after another along an axis, which is what their rows are.

    In `shards` parts: the first holds the first part of each section, and so on, so that a device that holds one part
    holds rows of every section.

    Args:
        axis: of the parameter.
        order: of the tensors' axes.

    Raises:
        ValueError: a section cannot be split in so many parts.
    """
    parts, start, source = [], 0, sections[0].source.shape
    shape = list(source) if order is None else [source[i] for i in order]
    along = axis if order is None else order[axis]
    for shard in range(shards):
        for section in sections:
            rows = range(section.source.shape[along]) if section.rows is None else section.rows
            if (total := len(rows) * section.copies) % shards or shards % section.copies:
                raise ValueError(f"{len(rows)} rows, {section.copies} times, cannot be split over {shards} shards")
            count = total // shards
            first = shard // section.copies * count
            rows = rows[first : first + count]
            take = slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else tuple(rows)
            index = [slice(0, n) for n in shape]
            index[axis] = slice(start, start + count)
            parts.append(Part(section.source, tuple(index), (*[slice(None)] * along, take), order))
            start += count
    shape[axis] = start
    return Leaf(tuple(shape), tuple(parts), dtype)


def fused_each(rows: Sequence[Sequence[Section]], shards: int = 1, dtype: str | None = None) -> Leaf:
    """`fused` sections of each along a new first axis, where they differ in their sources alone. Of many thousands of
    tensors, as experts have, only the first ones are checked.

    Raises:
        ValueError: they differ in more; or as `fused` does.
    """
    first = fused(rows[0], shards, dtype)
    alike = lambda sections: [(section.source.shape, section.rows, section.copies) for section in sections]
    if any(alike(sections) != alike(rows[0]) for sections in rows):
        raise ValueError(f"what stands side by side must be alike, got {[alike(sections) for sections in rows]!r:.200}")
    section_of = [[section.source for section in rows[0]].index(part.source) for part in first.parts]
    parts = tuple(
        Part(sections[of].source, (i, *part.index), part.take, part.order)
        for i, sections in enumerate(rows)
        for of, part in zip(section_of, first.parts, strict=True)
    )
    return Leaf((len(rows), *first.shape), parts, dtype, known=True)


def stacked(leaves: Sequence[Leaf]) -> Leaf:
    """Leaves of one shape along a new first axis."""
    parts = tuple(replace(part, index=(i, *part.index)) for i, leaf in enumerate(leaves) for part in leaf.parts)
    return Leaf((len(leaves), *leaves[0].shape), parts, leaves[0].dtype)
