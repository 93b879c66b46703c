"""TPU implementation for the short blocks of decoding steps: windows of several rows are on their way at once.

A copy between the device's memory and a core takes about as long for a few KiB as for one. So a step of decoding,
which writes a little for every row and layer, would mostly wait if it handled windows one after another, as
`pallas_tpu` does. Here the windows of the next rows are copied while one is changed, and those of the rows before are
on their way back. Of several caches, a row's windows are handled together. A window to which nothing is written is
not copied.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Num

from ..products import precision
from ..tpu_memory import in_hbm

LANES, SUBLANES = 128, 32
TOGETHER, HEADS = 8, 64  # caches of one call, at most, and heads of all of them
DEEPEST, BYTES = 8, 6 << 20  # rows whose windows lie in a core's memory, and what they may take there
WINDOWS = 2  # into which a row's block falls, at most


def room(cache: Num[Array, "R K S _"], block: Num[Array, "B K T _"], window: int, turned: bool) -> int:
    """Bytes of a core's memory for the block of a row and its windows, or somewhat more."""
    (K, T, width), whole = block.shape[1:], lambda size, step: -(-size // step) * step
    tiles = lambda rows, columns: whole(rows, SUBLANES) * whole(columns, LANES)
    of_window = tiles(width, window) if turned else tiles(window, width)
    return cache.dtype.itemsize * K * (tiles(T, width) + WINDOWS * of_window)


def append(
    caches: Sequence[Num[Array, "R K S _"]],
    blocks: Sequence[Num[Array, "B K T _"]],
    turned: Sequence[bool],
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    pages: Int[Array, "B M"],
    window: int,
    ring: bool,
) -> list[Num[Array, "R K S _"]]:
    """Writes blocks that are no longer than a window. A row is in pages, or is one; `turned` are caches whose slots lie
    along the lanes."""
    B, page = lengths.shape[0], caches[0].shape[2]
    of_page = page // window
    windows = pages.shape[1] * of_page  # of a row
    parts = min(WINDOWS, windows)
    at = (lengths // window)[:, None] + jnp.arange(parts)[None]
    there = (at * window < (lengths + kept)[:, None]) & (kept > 0)[:, None]
    if ring:
        at %= windows
    else:
        there &= at < windows
    held = jnp.take_along_axis(pages, jnp.minimum(at // of_page, pages.shape[1] - 1), axis=1)
    scalars = jnp.where(there, held, -1), at % of_page, (lengths % window)[:, None], kept[:, None]
    scalars = [x.astype(jnp.int32).reshape(-1) for x in scalars]
    how = {"rows": B, "parts": parts, "window": window, "wraps": ring and windows == 1}
    views = [in_hbm(cache.swapaxes(2, 3) if turn else cache) for cache, turn in zip(caches, turned, strict=True)]
    written = list[Array]()
    triples = zip(caches, blocks, turned, strict=True)
    most = max(room(cache, block, window, turn) for cache, block, turn in triples)
    together = max(1, min(TOGETHER, HEADS // caches[0].shape[1], BYTES // (2 * most)))
    how["depth"] = max(2, min(DEEPEST, BYTES // (together * most)))
    for begin in range(0, len(views), together):
        some = slice(begin, begin + together)
        written += _written(views[some], blocks[some], scalars, turned=tuple(turned[some]), **how)
    return [x.swapaxes(2, 3) if turn else x for x, turn in zip(written, turned, strict=True)]


def _written(
    caches: Sequence[Array],
    blocks: Sequence[Array],
    scalars: Sequence[Array],
    *,
    turned: tuple[bool, ...],
    depth: int,
    **how: int,
) -> Sequence[Array]:
    n, window, parts = len(caches), how["window"], how["parts"]
    scratch = [
        pltpu.VMEM((depth, *shape), block.dtype)
        for block, cache, turn in zip(blocks, caches, turned, strict=True)
        for shape in (
            block.shape[1:],
            (parts, block.shape[1], *((cache.shape[2], window) if turn else (window, cache.shape[3]))),
        )
    ]
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        partial(_kernel, turned=turned, **how),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * 2 * n,
            out_specs=[anywhere] * n,
            scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((2, depth))],
        ),
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in caches],
        input_output_aliases={len(scalars) + n + i: i for i in range(n)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="cache_update",
    )(*scalars, *map(in_hbm, blocks), *caches)


def _kernel(places, within, offsets, kept, *refs, turned, rows: int, parts: int, window: int, wraps: bool):
    """All rows, one after another; see the module. `refs` are blocks, caches, these as results, and scratch."""
    n = len(turned)
    blocks, caches, (*scratch, moving) = refs[:n], refs[2 * n : 3 * n], refs[3 * n :]
    buffers, held = scratch[::2], scratch[1::2]
    depth = buffers[0].shape[0]
    ahead = depth // 2

    def windows(row, do):
        """Calls `do` with where each window of a row lies in the cache and in its buffer."""
        for j in range(parts):
            place = places[row * parts + j]

            @pl.when(place >= 0)
            def _(j=j, place=place):
                slots = pl.ds(within[row * parts + j] * window, window)
                for cache, buffer, turn in zip(caches, held, turned, strict=True):
                    in_cache = cache.at[place, :, :, slots] if turn else cache.at[place, :, slots]
                    do(in_cache, buffer.at[row % depth, j])

    def written(row):
        return places[row * parts] >= 0  # a block begins in its first window

    def copy(source, target, direction, row):
        return pltpu.make_async_copy(source, target, moving.at[direction, row % depth])

    def reads(row, do):
        @pl.when(written(row))
        def _():
            for block, buffer in zip(blocks, buffers, strict=True):
                do(copy(block.at[row], buffer.at[row % depth], 0, row))
            windows(row, lambda in_cache, buffer: do(copy(in_cache, buffer, 0, row)))

    def writes(row, do):
        windows(row, lambda in_cache, buffer: do(copy(buffer, in_cache, 1, row)))

    start, wait = lambda copy: copy.start(), lambda copy: copy.wait()

    def comes_from(shape, axis, j, offset):
        """The position of a block that goes to a slot of its j-th window; slots lie along an axis."""
        position = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + j * window - offset
        return jnp.where(position < 0, position + window, position) if wraps else position

    def change(row):
        offset, count, T = offsets[row], kept[row], buffers[0].shape[2]
        for buffer, target, turn in zip(buffers, held, turned, strict=True):
            half, dtype = row % depth, buffer.dtype
            valid = jax.lax.broadcasted_iota(jnp.int32, (T, 1), 0) < count
            for j in range(parts):
                shape = (T, window) if turn else (window, T)
                move = comes_from(shape, int(turn), j, offset) == jax.lax.broadcasted_iota(
                    jnp.int32, shape, int(not turn)
                )
                position = comes_from((1, window) if turn else (window, 1), int(turn), j, offset)
                hit = (position >= 0) & (position < count)
                for h in range(buffer.shape[1]):
                    # What is not kept may be anything, even infinite, and must not meet a zero.
                    x = buffer[half, h]
                    x = jnp.where(valid, x.astype(jnp.bfloat16) if dtype == jnp.int8 else x, 0)
                    pair, dims = ((x, move), ((0,), (0,))) if turn else ((move, x), ((1,), (0,)))
                    a, c = (y.astype(x.dtype) for y in pair)
                    new = jax.lax.dot_general(
                        a, c, (dims, ((), ())), precision=precision(x), preferred_element_type=jnp.float32
                    )
                    target[half, j, h] = jnp.where(hit, new.astype(dtype), target[half, j, h])

    jax.lax.fori_loop(0, min(ahead, rows), lambda row, _: reads(row, start), None)

    def visit(row, _):
        @pl.when(row + ahead < rows)
        def _():
            pl.when(row + ahead >= depth)(lambda: writes(row + ahead - depth, wait))  # its place is free again
            reads(row + ahead, start)

        reads(row, wait)
        pl.when(written(row))(lambda: change(row))
        writes(row, start)

    jax.lax.fori_loop(0, rows, visit, None)
    jax.lax.fori_loop(max(0, rows - depth), rows, lambda row, _: writes(row, wait), None)
