"""Which tile of rows meets which group: what a grid of products goes through, one visit after the other."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """One entry per visit. Those of a tile come one after the other; what is left over repeats the last, for no rows.

    Attributes:
        tile: of rows.
        group: whose weights they are multiplied with.
        begin, end: rows of the group.
    """

    tile: Int[Array, " V"]
    group: Int[Array, " V"]
    begin: Int[Array, " V"]
    end: Int[Array, " V"]


def visits(ends: Int[Array, " E"], rows: int, height: int) -> Visits:
    """The visits of so many rows in tiles of one height, as many as there can be.

    Args:
        ends: see `api.grouped_matmul`.
    """
    groups, tiles = ends.shape[0], -(-rows // height)
    begin = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    first = begin // height
    count = jnp.where(ends > begin, (ends - 1) // height - first + 1, 0)
    places = jnp.arange(groups)  # running sums as one sum, which on a GPU is one kernel in place of three
    last = jnp.sum(jnp.where(places[None] <= places[:, None], count[None], 0), axis=1, dtype=jnp.int32)
    most = tiles + min(groups, rows) - 1
    at = jnp.minimum(jnp.arange(most), jnp.maximum(last[-1] - 1, 0))
    group = jnp.minimum(
        jnp.sum(last[None] <= at[:, None], axis=1, dtype=jnp.int32), groups - 1
    )  # a search would be a loop on the device
    used = jnp.arange(most) < last[-1]
    tile = jnp.clip(first[group] + at - (last[group] - count[group]), 0, tiles - 1)
    return Visits(*(x.astype(jnp.int32) for x in (tile, group, begin[group], jnp.where(used, ends[group], 0))))


def tile_height(rows: int, groups: int, least: int, most: int = 128) -> int:
    """Rows of a tile: twice what a group has on average, a power of two from `least` to `most`."""
    return min(most, max(least, 1 << (2 * rows // groups).bit_length()))
