"""GPU implementation, by Triton: all layers at once, where XLA starts a kernel or three for each array."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int, Num

from ..abstract_gpu import named
from .part import Part

MOST = 128  # arrays of one kernel, which has room for the addresses of 512
TILE = 32  # positions of a program


def declines(caches: Sequence[Num[Array, "R K S _"]], blocks: Sequence[Num[Array, "B K T _"]]) -> str | None:
    """Why these shapes are not served, or None."""
    for cache, block in zip(caches, blocks, strict=True):
        if cache.dtype != block.dtype:
            return f"block in {block.dtype}, cache in {cache.dtype}; it supports one type for both"
        if cache.size >= 2**31 and cache.size * cache.dtype.itemsize <= 2**32:  # in 64 bits beyond
            return f"a cache of {cache.size} numbers, whose places Pallas would count in 32 bits"
    return None


def append(
    caches: Sequence[Num[Array, "R K S _"]],
    blocks: Sequence[Part],
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None,
    path: Int[Array, "B J"] | None,
    ring: bool,
) -> list[Num[Array, "R K S _"]]:
    """See `api.append`."""
    if pages is None:  # a row is one page
        pages = (jnp.arange(lengths.shape[0]) if rows is None else rows)[:, None]
    scalars = [x.astype(jnp.int32) for x in (lengths, kept, pages, *(() if path is None else (path,)))]
    done: list[Array] = []
    for begin in range(0, len(caches), MOST):
        part = slice(begin, begin + MOST)
        done += _append(caches[part], blocks[part], scalars, ring)
    return done


def _append(caches: Sequence[Array], blocks: Sequence[Part], scalars: Sequence[Array], ring: bool) -> Sequence[Array]:
    (B, K), count, anywhere = (*scalars[0].shape, caches[0].shape[1]), len(caches), pl.BlockSpec(memory_space=pl.ANY)
    written = scalars[3].shape[1] if len(scalars) > 3 else blocks[0].block.shape[2]
    tile, first = min(TILE, pl.next_power_of_2(written)), len(scalars) + count
    places = [(x.first, x.every) for x in blocks]
    call = pl.pallas_call(
        partial(_kernel, places=places, written=written, tile=tile, ring=ring),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        grid=(count, B, K * pl.cdiv(written, tile)),
        in_specs=[anywhere] * (first + count),
        out_specs=[anywhere] * count,
        input_output_aliases={first + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        name="cache_update",
    )
    with named():
        return call(*scalars, *(x.source for x in blocks), *caches)


def _kernel(
    lengths: Ref, kept: Ref, pages: Ref, *refs: Ref,
    places: Sequence[tuple[int, int]], written: int, tile: int, ring: bool,
) -> None:  # fmt: skip
    """A tile of positions of one head of a row, for one of the arrays."""
    count = len(places)
    *path, sources, outs = *refs[: -3 * count], refs[-3 * count : -2 * count], refs[-count:]
    array, b, place = (pl.program_id(axis) for axis in range(3))
    page, of_row, tiles = outs[0].shape[2], pages.shape[1], pl.cdiv(written, tile)
    slots = page * of_row
    head, t = place // tiles, place % tiles * tile + jnp.arange(tile)
    count_kept = jnp.minimum(kept[b], written)
    slot, inside = lengths[b] + t, t < count_kept
    if ring:
        inside &= t >= count_kept - slots  # of a chunk longer than the ring, the last ones
        slot = slot % slots
    else:
        inside &= slot < slots
    from_ = plgpu.load(path[0].at[b, t], mask=inside, other=0) if path else t
    row = pages[b, 0]
    if of_row > 1:
        which = jax.lax.div(slot, jnp.int32(page))
        row, slot = plgpu.load(pages.at[b, which], mask=inside, other=0)[:, None], slot - page * which

    for i, (source, out, (first, every)) in enumerate(zip(sources, outs, places, strict=True)):

        @pl.when(array == i)
        def _(source=source, out=out, first=first, every=every):
            width = source.shape[2]
            column = jnp.arange(pl.next_power_of_2(width))[None]
            mask = inside[:, None] & (column < width)
            found = plgpu.load(source.at[b, (first + head * every + from_)[:, None], column], mask=mask, other=0)
            plgpu.store(out.at[row, head, slot[:, None], column], found, mask=mask)
