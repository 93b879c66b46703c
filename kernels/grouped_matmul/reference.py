"""XLA implementation: `jax.lax.ragged_dot` on TPU, else a loop over the groups that have rows.

On CPU and GPU `ragged_dot` multiplies every row with every group's weights, and needs as much memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from dflash_jax.quantised import Quantised

from ..dispatch import platform
from ..products import precision, product
from .visits import tile_height


def grouped_matmul(
    x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised, ends: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    if weights.dtype != x.dtype or isinstance(weights, Quantised) or platform() != "tpu":
        return loop(x, weights, ends)
    return ragged(x, weights, ends)


def ragged(x: Float[Array, "M D"], weights: Num[Array, "E N D"], ends: Int[Array, " E"]) -> Float[Array, "M N"]:
    """XLA's own operation."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(
        x, weights, jnp.diff(ends, prepend=0), numbers, precision=precision(x), preferred_element_type=jnp.float32
    )


def loop(
    x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised, ends: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Tiles of some rows of one group, one after the other.

    A tile may reach into the rows of the next group; the tiles of that one come later, and overwrite what it left.
    """
    M, (E, N, _) = x.shape[0], weights.shape
    height = tile_height(M, E, 8)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = -(-(ends - begins) // height)  # of each group
    last = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, height), (0, 0)))

    def one(t: Int[Array, ""], out: Float[Array, "P N"]) -> Float[Array, "P N"]:
        group = jnp.searchsorted(last, t, side="right")
        begin = begins[group] + (t - (last[group] - tiles[group])) * height
        rows = jax.lax.dynamic_slice_in_dim(padded, begin, height)
        weight = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, keepdims=False), weights)
        found = product("nd,md->mn", weight.astype(x.dtype), rows)
        return jax.lax.dynamic_update_slice_in_dim(out, found, begin, 0)

    out = jax.lax.fori_loop(0, last[-1], one, jnp.zeros((M + height, N), jnp.float32))
    return out[:M]
