"""TPU implementation. XLA's scatter wants a layout of its own and copies the whole cache into it, twice a step.

Of each row, the aligned windows of slots that the block falls into are read, changed and written back. A
product with a 0/1 matrix moves the block to its slots: positions shift by any amount, and every sum has one term.
The short blocks of decoding steps are written by `rows_tpu`.
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
from . import rows_tpu

LANES = 128
SHORT = 64  # positions of the blocks of decoding steps, at most: see `rows_tpu`
SUBLANES = {1: 32, 2: 16, 4: 16}  # slots of a window at least, whole tiles, by the bytes of a number


def declines(caches: Sequence[Num[Array, "R K S _"]], blocks: Sequence[Num[Array, "B K T _"]]) -> str | None:
    """Why these shapes are not served, or None."""
    for cache, block in zip(caches, blocks, strict=True):
        if block.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8) or cache.dtype != block.dtype:
            return f"block in {block.dtype}, cache in {cache.dtype}; it supports float32, bfloat16 and int8"
        if cache.shape[2] % (window := _window(cache, block)):
            return f"{cache.shape[2]} slots; it supports multiples of {window}, as wide as the block"
    return None


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
    if pages is None:  # a row is one page
        pages = (jnp.arange(lengths.shape[0]) if rows is None else rows)[:, None]
    windows = [_window(cache, block) for cache, block in zip(caches, blocks, strict=True)]
    rooms = map(rows_tpu.room, caches, blocks, windows, map(_turned, caches))
    if blocks[0].shape[2] <= min(SHORT, *windows) and 2 * max(rooms) <= rows_tpu.BYTES:
        written = list(caches)
        for window in sorted(set(windows)):
            same = [i for i, size in enumerate(windows) if size == window]
            some = [written[i] for i in same], [blocks[i] for i in same], [_turned(caches[i]) for i in same]
            for i, new in zip(same, rows_tpu.append(*some, lengths, kept, pages, window, ring), strict=True):
                written[i] = new
        return written
    scalars = lengths.astype(jnp.int32), kept.astype(jnp.int32), pages.astype(jnp.int32)
    return [_append(cache, block, scalars, ring) for cache, block in zip(caches, blocks, strict=True)]


def _append(cache: Array, block: Array, scalars: tuple[Array, ...], ring: bool) -> Array:
    turned, window = _turned(cache), _window(cache, block)
    (lengths, kept, pages), (B, K, T, H), page = scalars, block.shape, cache.shape[2]
    M = pages.shape[1]
    S, of_page = M * page, page // window

    def of_cache(b, j, lengths, kept, pages):
        at = _place(lengths[b], j, window, S, ring)
        which, at = (0, at) if M == 1 else (jax.lax.div(at, of_page), jax.lax.rem(at, of_page))
        row = pages[b * M + which]
        return (row, 0, 0, at) if turned else (row, 0, at, 0)

    spec = pl.BlockSpec((None, K, H, window) if turned else (None, K, window, H), of_cache)
    view = in_hbm(cache.swapaxes(2, 3) if turned else cache)
    out = pl.pallas_call(
        partial(_kernel, slots=S, window=window, turned=turned, ring=ring),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, min(pl.cdiv(T, window) + 1, S // window)),
            in_specs=[pl.BlockSpec((None, K, T, H), lambda b, j, *_: (b, 0, 0, 0)), spec],
            out_specs=spec,
        ),
        out_shape=pltpu.HBM(view.shape, view.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="cache_update",
    )(lengths, kept, pages.reshape(-1), block, view)
    return out.swapaxes(2, 3) if turned else out


def _kernel(lengths, kept, pages, block, cache, out, *, slots, window, turned, ring):
    """Row b, its j-th window."""
    b, j = pl.program_id(0), pl.program_id(1)
    length, T = lengths[b], block.shape[1]
    at = _place(length, j, window, slots, ring)
    fresh = (j == 0) | (at != _place(length, j - 1, window, slots, ring))

    def moved(axis):
        """Whether block position t goes to slot s of the window; s lies along `axis`."""
        shape = (T, window) if axis else (window, T)
        slot = at * window + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        t = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
        target = length + t
        hit = (slot == (jax.lax.rem(target, jnp.int32(slots)) if ring else target)) & (t < kept[b])
        return hit & (t >= kept[b] - slots) if ring and slots < T else hit

    @pl.when(fresh)  # else the window before is still held, and already changed
    def _():
        move = moved(1 if turned else 0)
        hit = jnp.sum(move.astype(jnp.float32), axis=0 if turned else 1, keepdims=True) > 0
        valid = jax.lax.broadcasted_iota(jnp.int32, (T, 1), 0) < kept[b]

        def one(h, _):
            # What is not kept may be anything, even infinite, and must not meet a zero.
            rows = jnp.where(valid, block[h].astype(jnp.bfloat16) if block.dtype == jnp.int8 else block[h], 0)
            pair, dims = ((rows, move), ((0,), (0,))) if turned else ((move, rows), ((1,), (0,)))
            a, c = (x.astype(rows.dtype) for x in pair)
            exact = precision(rows)
            new = jax.lax.dot_general(a, c, (dims, ((), ())), precision=exact, preferred_element_type=jnp.float32)
            out[h] = jnp.where(hit, new.astype(out.dtype), cache[h])

        jax.lax.fori_loop(0, block.shape[0], one, None)


def _turned(cache: Array) -> bool:
    """Whether XLA lays the slots along the lanes: it does where heads do not fill them (see block attention)."""
    return cache.shape[3] % LANES != 0


def _window(cache: Array, block: Array) -> int:
    """Slots of a window: those of the block, a power of two, so that one number of slots suits all widths, but no more
    than those of a small page."""
    least = LANES if _turned(cache) else SUBLANES[cache.dtype.itemsize]
    return max(least, min(cache.shape[2] & -cache.shape[2], 1 << (block.shape[2] - 1).bit_length()))


def _place(length, j, window: int, slots: int, ring: bool):
    """The j-th window of slots after `length`, of all windows."""
    windows = slots // window
    at = jax.lax.div(length, jnp.int32(window)) + j  # no sign to mind, unlike `//`
    return jax.lax.rem(at, jnp.int32(windows)) if ring else jnp.minimum(at, windows - 1)
