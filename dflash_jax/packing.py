"""The positions of a block that a pass computes, one after the other, where rows do not all have as many.

Norms, products, experts and the head then see these positions alone, as a block [B, N] that they fill one after the
other, and only what mixes the positions of a row sees the block [B, T] of rows. A mesh splits rows into p parts; each
packs its own.
Shapes: B rows, T block positions, N of the packed block, p parts of the mesh, w packed positions of each, J of a path.
"""

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped

from dflash_jax.mesh import row_parts


class Packing(struct.PyTreeNode):
    """Where the positions of rows lie among those that are packed: the first `counts` of each row, row after row.

    Attributes:
        counts: packed positions of each row.
        rows, columns: row and position of each that is packed. What is left over has those of any other.
        places: of each position of the block among the packed ones of its part; any where it is not packed.
    """

    counts: Int[Array, " B"]
    rows: Int[Array, "p w"]
    columns: Int[Array, "p w"]
    places: Int[Array, "B T"]

    @classmethod
    def of(cls, counts: Int[Array, " B"], width: int, each: int) -> "Packing":
        """The first `counts` positions of each row of a block of this width.

        Args:
            each: how many positions there is room for, for each row of a part. Those that a part has no room for must
                not be asked for.
        """
        parts, B = row_parts(), counts.shape[0]
        positions = each * B
        ends = jnp.cumsum(counts.reshape(parts, -1), axis=1)
        starts = ends - counts.reshape(parts, -1)
        index = jnp.arange(positions // parts)
        behind = jnp.sum(index[None, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
        within = jnp.minimum(behind, B // parts - 1)
        columns = jnp.clip(index[None] - jnp.take_along_axis(starts, within, axis=1), 0, width - 1)
        places = starts.reshape(B, 1) + jnp.arange(width)[None]
        first = jnp.arange(parts)[:, None] * (B // parts)
        return cls(counts, first + within, columns, jnp.minimum(places, positions // parts - 1))

    @property
    def valid(self) -> Int[Array, " B"]:
        """How many packed positions of each row of the packed block are asked for, the first ones."""
        (B,), (parts, w) = self.counts.shape, self.rows.shape
        asked, each = jnp.sum(self.counts.reshape(parts, -1), axis=1), w * parts // B
        return jnp.clip(asked[:, None] - each * jnp.arange(B // parts)[None], 0, each).reshape(B)

    def pack(self, x: Shaped[Array, "B T *S"]) -> Shaped[Array, "B N *S"]:
        """What a block has at the packed positions."""
        return self.at(x, self.columns)

    def at(self, x: Shaped[Array, "B M *S"], index: Int[Array, "p w"]) -> Shaped[Array, "B N *S"]:
        """For each packed position, what its row has at an index."""
        B, (parts, _) = x.shape[0], self.rows.shape
        of_part = self.rows - (jnp.arange(parts) * (B // parts))[:, None]
        found = _take(_in_parts(x, parts), of_part * x.shape[1] + index)
        return found.reshape(B, index.size // B, *x.shape[2:])

    def of_rows(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "B N ..."]:
        """For each packed position, what its row has."""
        return self.at(x[:, None], jnp.zeros_like(self.rows))

    def spread(self, x: Shaped[Array, "B N *S"]) -> Shaped[Array, "B T *S"]:
        """The block with what was computed for its packed positions; anything at the others."""
        return self.along(x, self.places)

    def along(self, x: Shaped[Array, "B N *S"], places: Int[Array, "B J"]) -> Shaped[Array, "B J *S"]:
        """What was computed at these places of each row's part."""
        parts = self.rows.shape[0]
        found = _take(_in_parts(x, parts), places.reshape(parts, -1))
        return found.reshape(*places.shape, *x.shape[2:])


def joined(blocks: Sequence[Shaped[Array, "_ _ *S"]]) -> Shaped[Array, "b t *S"]:
    """The positions of several blocks one after the other, [p, n]; those of a single one as they are."""
    if len(blocks) == 1:
        return blocks[0]
    return jnp.concatenate([_in_parts(x, row_parts()) for x in blocks], axis=1)


def parted(x: Shaped[Array, "b t *S"], shapes: Sequence[tuple[int, ...]]) -> list[Shaped[Array, "_ _ *S"]]:
    """The blocks of these shapes [B, T] that were joined."""
    if len(shapes) == 1:
        return [x]
    ends = itertools.accumulate(math.prod(shape) // x.shape[0] for shape in shapes[:-1])
    cut = jnp.split(x, [*ends], axis=1)
    return [part.reshape(*shape, *x.shape[2:]) for part, shape in zip(cut, shapes, strict=True)]


def _in_parts(x: Shaped[Array, "_ _ *S"], parts: int) -> Shaped[Array, "p n *S"]:
    return x.reshape(parts, x.shape[0] * x.shape[1] // parts, *x.shape[2:])  # there may be nothing at a position


def _take(x: Shaped[Array, "p n *S"], index: Int[Array, "p w"]) -> Shaped[Array, "p w *S"]:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
