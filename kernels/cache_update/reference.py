"""XLA implementation: a scatter for each array."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def append(
    caches: Sequence[Num[Array, "R K S _"]],
    blocks: Sequence[Num[Array, "B K T _"]],
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None,
    ring: bool,
) -> list[Num[Array, "R K S _"]]:
    """See `api.append`."""
    page, T = caches[0].shape[2], blocks[0].shape[2]
    S = page if pages is None else page * pages.shape[1]
    j = jnp.arange(T)[None]
    slots = lengths[:, None] + j
    written = j < kept[:, None]
    if ring:
        slots = slots % S
        written = written & (j >= kept[:, None] - S)  # of a chunk longer than the ring, the last S
    if pages is not None:
        rows = jnp.take_along_axis(pages, jnp.minimum(slots // page, pages.shape[1] - 1), axis=1)
        slots, written = slots % page, written & (slots < S)
    else:
        rows = (jnp.arange(lengths.shape[0]) if rows is None else rows)[:, None]
    slots = jnp.where(written, slots, page)
    put = lambda cache, x: cache.at[rows, :, slots].set(x.swapaxes(1, 2), mode="drop")
    return [put(cache, x) for cache, x in zip(caches, blocks, strict=True)]
