"""TPU implementation: one Pallas kernel that streams the cache through VMEM once, however few queries look at it.

A grid step holds a chunk of slots of several key-value heads. The queries that share a head are the rows of one
matrix product. Steps over the chunks of one row of the batch run in order with an online softmax, which begins with
the block's own keys (and the sink) and so needs no merge at the end. What a row cannot see is not fetched and has no
step: they are a list (`visits`).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Num

from ..products import precision
from ..tpu_memory import cores, in_hbm
from .page_copies import copied
from .visits import visits

HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = 576, 512  # of keys, and of values that are a part of them
LANES = 128
STEP_BYTES = 1 << 20  # keys and values a grid step reads; much less, and the step's fixed cost shows
HEADS = 8  # key-value heads per grid step, at most
ROWS = 512  # queries of one key-value head per grid step, at most
FEW_ROWS = 128  # of which the loop over heads is unrolled
MASKED = -1e30  # finite: infinities would turn into NaN where a query sees nothing of a chunk


def declines(
    q: Float[Array, "B T N H"],
    v: Num[Array, "B K F Hv"],
    cache_k: Num[Array, "R K S H"],
    cache_v: Num[Array, "R K S Hv"] | None,
) -> str | None:
    """Why these shapes are not served, or None."""
    dims = q.shape[-1], v.shape[-1]
    if cache_v is None and dims != LATENT_DIMS:
        return f"head dims {dims} of keys and of values that are a part of them; it supports {LATENT_DIMS}"
    if cache_v is not None and (other := [size for size in dims if size not in HEAD_DIMS]):
        return f"head dim {other[0]}; it supports {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (jnp.float32, jnp.bfloat16) or not v.dtype == cache_k.dtype in (q.dtype, jnp.int8):
        kinds = "it supports float32 and bfloat16, or codes of 8 bits"
        return f"queries in {q.dtype}, values in {v.dtype}, cache in {cache_k.dtype}; {kinds}"
    if cache_k.shape[2] == 0:
        return "the cache has no slots"
    return None


def attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K F H"],
    v: Num[Array, "B K F Hv"],
    cache_k: Num[Array, "R K S H"],
    cache_v: Num[Array, "R K S Hv"] | None,
    lengths: Int[Array, " B"],
    low: Int[Array, "B T"] | None,
    mask: Bool[Array, "#B T F"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None,
    scales: tuple[Float[Array, "B K F 2"], Float[Array, "R K S 2"]] | None = None,
) -> Float[Array, "B T N Hv"]:
    """See `api.attend`; `low` is the first position a query sees, `mask` what it sees of the block, `scales` those of
    fresh and of cached keys and values that are codes."""
    B, T, N, H = q.shape
    K, page, F, Hv = *cache_k.shape[1:3], *v.shape[2:]
    if pages is None:  # a row is one page
        pages = (jnp.arange(B) if rows is None else rows)[:, None]
    M, G = pages.shape[1], N // K
    heads = _heads(B, K)
    tile = T if T * G <= ROWS else max(1, ROWS // G)  # positions of a tile of queries
    tiles = -(-T // tile)
    more, height = tiles * tile - T, tile * G
    slot_bytes = heads * (H if cache_v is None else H + Hv) * cache_k.dtype.itemsize
    S, paged = M * page, M > 1
    chunk, several = (page, pages_at_once(M, page, slot_bytes)) if paged else (_chunk(page, slot_bytes), 1)

    def fold(x: Array) -> Array:
        """[b, T, n, X] -> [b, tiles, n, tile, X]; positions added at the end see nothing."""
        x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        return x.reshape(x.shape[0], tiles, tile, *x.shape[2:]).swapaxes(2, 3)

    # XLA lays out an array whose heads do not fill the lanes with the slots along them. To ask for any other is to
    # copy it.
    turned_k = H % LANES != 0
    turned_v = turned_k if cache_v is None else Hv % LANES != 0
    wide = max(F, 8)  # a product with a single column is no matrix product
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, wide - F), (0, 0))).astype(q.dtype) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, wide - F)))

    per_query = lambda x: jnp.repeat(fold(x[:, :, None]), G, axis=2).reshape(x.shape[0], tiles, height, x.shape[-1])
    queries = fold(q).reshape(B, tiles, K, height, H)
    bounds = jnp.zeros((B, T), jnp.int32) if low is None else low
    visited = visits(bounds, lengths, S, several * chunk, cores())
    place = partial(_visit, most=visited.listed.shape[1], bits=visited.bits, together=visited.together)

    def of_row(index):
        """The index of a block that depends on row, heads and tile of queries."""
        return lambda p, h, r, s, listed, last, *_: index(place(p, s, listed, last)[0], h, r)

    held = [(cache_k, turned_k), *([] if cache_v is None else [(cache_v, turned_v)])]
    fresh, sink = [k, v], []
    if sinks is not None:
        sink.append(jnp.repeat(sinks.astype(jnp.float32).reshape(K, G), tile, axis=1)[..., None])
    if scales is not None:  # with slots along the lanes
        fresh.append(jnp.pad(scales[0], ((0, 0), (0, 0), (0, wide - F), (0, 0))).swapaxes(2, 3))
        held.append((scales[1], True))
    caches = [in_hbm(x.swapaxes(2, 3) if turned else x) for x, turned in held]
    of_block, of_queries = of_row(lambda b, h, r: (b, h, 0, 0)), of_row(lambda b, h, r: (b, r, h, 0, 0))
    of_mask = of_row(lambda b, h, r: (b if mask.shape[0] > 1 else 0, r, 0, 0))

    def of_cache(x: Array, turned: bool) -> pl.BlockSpec:
        if paged:
            return pl.BlockSpec(memory_space=pltpu.HBM)  # see `page_copies`

        def index(p, h, r, s, listed, last, parts, lengths, first, highest, pages):
            b, at, _ = place(p, s, listed, last)
            return (pages[b], h, 0, at) if turned else (pages[b], h, at, 0)

        return pl.BlockSpec((None, heads, *((x.shape[2], chunk) if turned else (chunk, x.shape[3]))), index)

    in_specs = [
        pl.BlockSpec((None, None, heads, height, H), of_queries),
        pl.BlockSpec((None, None, height, 1), of_row(lambda b, h, r: (b, r, 0, 0))),
        pl.BlockSpec((None, None, height, wide), of_mask),
        *(pl.BlockSpec((heads, height, 1), lambda p, h, *_: (h, 0, 0)) for _ in sink),
        *(pl.BlockSpec((None, heads, *x.shape[2:]), of_block) for x in fresh),
        *(of_cache(x, turned) for x, (_, turned) in zip(caches, held, strict=True)),
    ]
    scores = {"scale": scale, "softcap": softcap}
    scratch = [pltpu.VMEM((heads, height, width), jnp.float32) for width in (LANES, LANES, Hv)]
    buffers = [pltpu.VMEM((2, several, heads, *x.shape[2:]), x.dtype) for x in caches]
    of_copies = [*buffers, pltpu.SemaphoreType.DMA((2,))] if paged else []
    out = pl.pallas_call(
        partial(
            _kernel,
            slots=S,
            place=place,
            pages_of_row=M,
            turned_k=turned_k,
            turned_v=turned_v,
            has_values=cache_v is not None,
            sinks=sinks is not None,
            codes=scales is not None,
            **scores,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(*visited.lengths.shape, K // heads, tiles, jnp.max(visited.lengths) << visited.together),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, None, heads, height, Hv), of_queries),
            scratch_shapes=[*scratch, *of_copies],
        ),
        out_shape=jax.ShapeDtypeStruct((B, tiles, K, height, Hv), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        name="block_attention",
    )(
        visited.listed.reshape(-1),
        visited.last,
        visited.lengths << visited.together,
        lengths.astype(jnp.int32),
        visited.first,
        jnp.max(bounds, axis=1).astype(jnp.int32),
        pages.reshape(-1).astype(jnp.int32),
        queries,
        per_query(bounds[..., None]),
        per_query(mask.astype(jnp.int32)),
        *sink,
        *fresh,
        *caches,
    )
    out = out.reshape(B, tiles, N, tile, Hv).swapaxes(2, 3).reshape(B, tiles * tile, N, Hv)
    return out[:, :T]


def _kernel(
    *refs,
    slots: int,
    place: Callable[..., tuple[Array, Array, Array | bool]],
    pages_of_row: int,
    turned_k: bool,
    turned_v: bool,
    has_values: bool,
    sinks: bool,
    codes: bool,
    scale: float,
    softcap: float | None,
):
    """One chunk of slots of one row of the batch, or one of each of several pages: see the module. All rows of `q[h]`
    share key-value head h.

    `top` and `total` [heads, rows, LANES] are the highest score of each row, in every lane, and what its lanes add up
    to: so a chunk reduces across the lanes once, and moves nothing back across them.
    """
    listed, final, parts, lengths, first, highest, pages, q, low, mask, *rest = refs
    sink = rest.pop(0) if sinks else None
    k, v, *rest = rest
    scales = [rest.pop(0)] if codes else None
    arrays = 1 + has_values + codes  # of a cache
    caches, (out, top, total, acc, *copies) = rest[:arrays], rest[arrays:]
    part, group, step = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    b, at, live = place(part, step, listed, final)
    live &= step < parts[part]
    heads = q.shape[0]
    if copies:
        *buffers, done = copies
        several, size = buffers[0].shape[1], slots // pages_of_row

        def needed(step):
            b, at, there = place(part, step, listed, final)
            for page in (at * several + nth for nth in range(several)):
                used = page * size < jnp.minimum(lengths[b], slots)
                yield there & used, lambda page=page: pages[b * pages_of_row + page]

        of_group = pl.ds(group * heads, heads)
        half = copied(needed, step, parts[part], caches, buffers, of_group, done)
        caches = [[x.at[half, nth] for nth in range(several)] for x in buffers]
    else:
        caches = [[x] for x in caches]
    cache_k, cache_v, cache_scales = caches[0], caches[1] if has_values else None, caches[-1] if codes else None
    each = cache_k[0].shape[2 if turned_k else 1]
    chunk = len(cache_k) * each
    cached = live & (lengths[b] > 0)

    def of_heads(do):
        # Together, one head's products overlap another's exponentials; of large tiles that takes long to compile.
        if q.shape[1] <= FEW_ROWS:
            do(range(heads))
        else:
            jax.lax.fori_loop(0, heads, lambda h, _: do([h]), None)

    def dot(x, y, turned):
        """x @ y, or x @ y.T where y is turned."""
        dims = ((1,), (1 if turned else 0,)), ((), ())
        return jax.lax.dot_general(x, y, dims, precision=precision(x), preferred_element_type=jnp.float32)

    def first_lane(x):
        """[rows, 1] in one lane, and zeros."""
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1) == 0, x, 0.0)

    def row_sums(p):
        """[rows, LANES] that adds up to the sums of the rows of p [rows, C]."""
        if p.shape[1] % LANES:
            return first_lane(jnp.sum(p, axis=-1, keepdims=True))
        return sum(p[:, at : at + LANES] for at in range(0, p.shape[1], LANES))

    def side_by_side(parts):
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def scored(h, keys, turned, seen, scales):
        """Scores [rows, C] of head h, those that are not seen as `MASKED`."""
        s = side_by_side([dot(q[h], part[h].astype(q.dtype), turned) for part in keys])
        s *= scale if scales is None else scale * side_by_side([part[h, :1] for part in scales])
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        return s if seen is None else jnp.where(seen, s, MASKED)

    def weighted(h, p, values, turned, seen, scales):
        """Sums [rows, Hv] of values, weighted by p, which are zero where nothing is seen."""
        if scales is not None:
            p = p * side_by_side([part[h, 1:] for part in scales])
            p = p if seen is None else jnp.where(seen, p, 0.0)  # what was never written has any scale, even NaN
        size, p = p.shape[1] // len(values), p.astype(q.dtype)
        return sum(dot(p[:, i * size : (i + 1) * size], part, turned) for i, part in enumerate(values))

    def powers(s, higher, seen):
        p = jnp.exp(s - _across(higher, s.shape[1]))
        return p if seen is None else jnp.where(seen, p, 0.0)

    @pl.when(live & (at == first[b]))
    def _():
        seen = mask[...] != 0

        def begin(these):
            scores = [scored(h, [k], True, seen, scales) for h in these]
            for h, s in zip(these, scores, strict=True):
                higher = jnp.broadcast_to(jnp.max(s, axis=-1, keepdims=True), top.shape[1:])
                if sink is not None:
                    higher = jnp.maximum(higher, sink[h])
                p = powers(s, higher, seen)
                sums = jnp.sum(p, axis=-1, keepdims=True)
                if sink is not None:
                    sums += jnp.exp(sink[h] - higher[:, :1])
                top[h], total[h] = higher, first_lane(sums)
                acc[h] = weighted(h, p, [v[h]], False, seen, scales)

        of_heads(begin)

    def visit(seen, written):
        """One step of the online softmax of every head; None for what is all seen and written."""

        def values(h):
            size = v.shape[2]  # of latents, the first numbers of the keys' entries
            part = (lambda x: x[h, :size] if turned_k else x[h, :, :size]) if cache_v is None else lambda x: x[h]
            found = [part(x) for x in (cache_k if cache_v is None else cache_v)]
            if codes:
                return [x.astype(q.dtype) for x in found]  # which are finite
            if written is None:
                return found
            ends = [*range(each, chunk, each)]
            there = jnp.split(written, ends, axis=1 if turned_v else 0)
            return [jnp.where(here, x, 0) for here, x in zip(there, found, strict=True)]  # any else may be NaN

        def step(these):
            scores = [scored(h, cache_k, not turned_k, seen, cache_scales) for h in these]
            for h, s in zip(these, scores, strict=True):
                higher = jnp.maximum(top[h], jnp.max(s, axis=-1, keepdims=True))
                p, keep = powers(s, higher, seen), jnp.exp(top[h] - higher)
                top[h], total[h] = higher, keep * total[h] + row_sums(p)
                of_chunk = weighted(h, p, values(h), turned_v, seen, cache_scales)
                acc[h] = _across(keep, acc.shape[2]) * acc[h] + of_chunk

        of_heads(step)

    # A slot holds the last position before `length` that is congruent to it; a plain cache has not wrapped.
    start, last = at * chunk, lengths[b] - 1
    newest = last % slots

    def position(slot):
        return last - newest + slot - jnp.where(slot > newest, slots, 0)

    oldest = position(start)
    whole = (oldest >= highest[b]) & (position(start + chunk - 1) == oldest + chunk - 1) & (start + chunk <= slots)

    @pl.when(cached & whole)
    def _():
        visit(None, None)

    @pl.when(cached & jnp.logical_not(whole))
    def _():
        def held(shape, axis):
            slot = start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return jnp.where(slot < slots, position(slot), -1)

        seen = held((1, chunk), 1)
        written = (seen if turned_v else held((chunk, 1), 0)) >= 0
        visit((seen >= 0) & (seen >= low[...]), written)

    @pl.when(live & (at == final[b]))
    def _():
        def finish(these):
            for h in these:
                # Only positions added to fill a tile see nothing at all.
                sums = jnp.broadcast_to(jnp.sum(total[h], axis=-1, keepdims=True), total.shape[1:])
                out[h] = (acc[h] * _across(1.0 / jnp.where(sums > 0, sums, 1.0), acc.shape[2])).astype(out.dtype)

        of_heads(finish)


def _across(x: Float[Array, "rows 128"], size: int) -> Float[Array, "rows C"]:
    """The same number in all lanes of a row, in `size` of them."""
    return jnp.concatenate([x] * -(-size // LANES), axis=1)[:, :size]


def _visit(part, step, listed, last, *, most: int, bits: int, together: int):
    """Row and chunk of a step, and whether there is such a chunk; see `visits.Visits`."""
    entry = listed[part * most + (step >> together)]
    b, at = entry >> bits, entry & ((1 << bits) - 1)
    if together:
        at += step & ((1 << together) - 1)
        return b, jnp.minimum(at, last[b]), at <= last[b]
    return b, at, True


def _heads(B: int, K: int) -> int:
    """Key-value heads per grid step; a single row of the batch leaves work for two cores."""
    most = min(HEADS, max(1, K // 2) if B == 1 else K)
    return max(h for h in range(1, most + 1) if K % h == 0)


def pages_at_once(M: int, page: int, bytes_per_slot: int) -> int:
    """How many of the M pages of a row a grid step reads: a power of two, at most 8, that keeps to `STEP_BYTES`."""
    if page % LANES:
        return 1
    return max(n for n in (1, 2, 4, 8) if n == 1 or (n <= M and n * page * bytes_per_slot <= STEP_BYTES))


def _chunk(S: int, bytes_per_slot: int) -> int:
    """Slots per grid step: a power of two that keeps to `STEP_BYTES`, at least 128; all of a small cache."""
    fits = max(LANES, 1 << max(1, STEP_BYTES // bytes_per_slot).bit_length() - 1)
    return S if fits >= S else min(fits, 2048)
