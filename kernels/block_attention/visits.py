"""Which chunks of which rows the TPU kernel visits: a list, so that a short row costs nothing beside a long one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MOST = 1 << 16  # entries of a list, which lies in scalar memory


class Visits(NamedTuple):
    """Attributes:
    first, last: the first chunk of a row that is visited, and the last one. A row that sees none has one visit.
    listed: rows and chunks, as `row << bits | chunk`. Each entry stands for `1 << together` visits, of this chunk and
        of those after it up to the row's last. There is a part for each core.
    lengths: entries of each part. The others repeat the last one of them.
    """

    first: Int[Array, " B"]
    last: Int[Array, " B"]
    listed: Int[Array, "P L"]
    lengths: Int[Array, " P"]
    bits: int
    together: int


def visits(low: Int[Array, "B T"], lengths: Int[Array, " B"], slots: int, chunk: int, cores: int = 1) -> Visits:
    """Those of rows of `slots` slots, each of which sees its positions from `low` to `lengths`; for one core or two."""
    B, chunks = lengths.shape[0], -(-slots // chunk)
    together = max(0, (-(-B * chunks // MOST) - 1).bit_length())
    first = jnp.where(lengths > slots, 0, jnp.minimum(jnp.min(low, axis=1), lengths) // chunk)
    first = jnp.minimum(first, chunks - 1)
    last = jnp.maximum(first, -(-jnp.minimum(lengths, slots) // chunk) - 1)
    entries = ((last - first) >> together) + 1
    ends = jnp.cumsum(entries)
    starts, total, bits = ends - entries, ends[-1], (chunks - 1).bit_length()
    longest = (chunks - 1 >> together) + 1
    if B == 1 or cores == 1:
        begins, sizes, most = jnp.zeros(1, jnp.int32), total[None], B * longest
    else:  # the first part ends with the row in which half of the visits are done
        middle = starts[jnp.clip(jnp.sum(2 * starts < total), 1, B - 1)]
        begins, sizes = jnp.stack([jnp.zeros_like(middle), middle]), jnp.stack([middle, total - middle])
        most = -(-B * longest // 2) + longest

    def of_part(begin: Int[Array, ""], size: Int[Array, ""]) -> Int[Array, " L"]:
        at = (begin + jnp.minimum(jnp.arange(most), size - 1))[:, None]
        of_row = (at >= starts[None]) & (at < ends[None])
        values = ((jnp.arange(B) << bits) + first)[None] + ((at - starts[None]) << together)
        return jnp.sum(jnp.where(of_row, values, 0), axis=1)

    listed = jax.vmap(of_part)(begins, sizes)
    first, last, listed, sizes = (x.astype(jnp.int32) for x in (first, last, listed, sizes))
    return Visits(first, last, listed, sizes, bits, together)
