"""Implementation for Hopper (Pallas, Mosaic GPU): split-K over the cache, 64 queries to a tensor-core tile.

A thread block takes the queries that share one key-value head, in tiles of 64, and one of several stretches of the
row's cache; the last stretch goes on with the block's own keys. One warpgroup copies chunks of slots to shared memory a
few chunks ahead (TMA), multiplies them (WGMMA) and keeps an online softmax in registers. What the row cannot see is not
read. The stretches and the sink are merged in XLA. Of so many rows that there is one stretch, the kernel itself divides
and writes where the next product reads.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Num

from .. import fragments, tensor_cores
from .stretches import merged, scaled

HEAD_DIMS = (64, 128, 256)
ROWS = 64  # queries of a tile: the rows of one WGMMA
CHUNK = 64  # slots copied at once
TILE = 8  # rows of a tile in shared memory
STAGE_BYTES = 64 << 10  # of shared memory for chunks in flight: two blocks share an SM
CODES_BYTES = 48 << 10  # the same of chunks of codes, beside one chunk of what they stand for
BLOCKS = 264  # thread blocks that run at once, two on every SM of an H100 or H200: caches are split into no more
LEAST = 2  # chunks a split must be worth
WRITTEN = 128  # widest heads whose results the kernel writes in their final form
MASKED = -1e30


def declines(
    q: Float[Array, "B T N H"],
    v: Num[Array, "B K F Hv"],
    cache_k: Num[Array, "R K S H"],
    cache_v: Num[Array, "R K S Hv"] | None,
) -> str | None:
    """Why these shapes are not served, or None."""
    if cache_v is None:
        return "values that are a part of the keys"
    for size in (q.shape[-1], v.shape[-1]):
        if size not in HEAD_DIMS:
            return f"head dim {size}; it supports {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not v.dtype == cache_k.dtype in (q.dtype, jnp.int8):
        kinds = "it supports bfloat16 and float16, or codes of 8 bits"
        return f"queries in {q.dtype}, values in {v.dtype}, cache in {cache_k.dtype}; {kinds}"
    if cache_k.dtype == jnp.int8 and q.dtype == jnp.float16:  # scaled, small probabilities would be subnormal in it
        return "codes of 8 bits beside queries in float16; it supports bfloat16"
    if cache_k.shape[2] == 0 or cache_k.shape[2] % CHUNK:
        return f"{cache_k.shape[2]} slots; it supports multiples of {CHUNK}"
    return tensor_cores.missing()


class Places(NamedTuple):
    """Where the rows of a block lie, in one array for all of them or in one for each.

    Attributes:
        queries, keys: rows of one key-value head.
        first_key, first_value: rows before them.
    """

    queries: int
    keys: int
    first_key: int
    first_value: int


class Joined(struct.PyTreeNode):
    """A block's queries, keys and values in one array, so that it is made by one launch and read as it is.

    Attributes:
        rows: the queries of all key-value heads, then the keys of all, then the values of all. Each head's are filled
            up with zeros to whole tiles, and more zeros follow, so that nothing is read beyond the array.
        places: where they are.
    """

    rows: Float[Array, "B _ H"]
    places: Places = struct.field(pytree_node=False)


def join(q: Float[Array, "B T N H"], k: Float[Array, "B K F H"], v: Float[Array, "B K F Hv"]) -> Joined | None:
    """A block in one array; None if its queries are not as many as its keys, or its values of another size."""
    (B, T, N, H), (K, F, Hv) = q.shape, v.shape[1:]
    if T != F or Hv != H:
        return None
    Q = N // K * T
    tiles, block_chunks, width = _tiles(Q, F)
    queries, keys = (-(-count // TILE) * TILE for count in (Q, F))
    places = Places(queries, keys, K * queries, K * (queries + keys))
    parts = (_by_head(q, v), queries), (k, keys), (v, keys)
    rows = [jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[2]), (0, 0))).reshape(B, -1, H) for x, count in parts]
    ends = (K - 1) * queries + tiles * ROWS, places.first_value + (K - 1) * keys + block_chunks * width
    total = K * (queries + 2 * keys)
    zeros = jnp.zeros((B, max(*ends, total) - total, H), q.dtype)
    return Joined(jnp.concatenate([*rows, zeros], axis=1), places)


def finishes(rows: int, positions: int, heads: int, key_heads: int, width: int) -> bool:
    """Whether nothing of a block is left to XLA: it has so many rows that their caches are not split, and a tile has
    whole positions. For values of a larger width Mosaic would search a layout for minutes."""
    group = heads // key_heads
    tiles = -(-(group * positions) // ROWS)
    return 2 * rows * key_heads * tiles > BLOCKS and ROWS % group == 0 and width <= WRITTEN


def rows_that_finish(positions: int, heads: int, key_heads: int) -> int:
    """The fewest rows of which `finishes` may hold."""
    tiles = -(-(heads // key_heads * positions) // ROWS)
    return BLOCKS // 2 // (key_heads * tiles) + 1


def _by_head(q: Float[Array, "B T N H"], v: Num[Array, "B K F Hv"]) -> Float[Array, "B K Q H"]:
    """The queries that share a key-value head: head by head, or position by position, as they are written then."""
    (B, T, N, H), K = q.shape, v.shape[1]
    order = (0, 2, 1, 3, 4) if finishes(B, T, N, K, v.shape[3]) else (0, 2, 3, 1, 4)
    return q.reshape(B, T, K, -1, H).transpose(order).reshape(B, K, -1, H)


def _tiles(queries: int, keys: int) -> tuple[int, int, int]:
    """Tiles of the queries of one key-value head, chunks of a block's keys, and rows of one of these."""
    chunks = -(-keys // CHUNK)
    return -(-queries // ROWS), chunks, CHUNK if chunks > 1 else -(-keys // TILE) * TILE


@partial(jax.jit, static_argnames=("scale", "softcap"), inline=True)  # traced and lowered once for layers alike
def attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K F H"],
    v: Num[Array, "B K F Hv"],
    cache_k: Num[Array, "R K S H"],
    cache_v: Num[Array, "R K S Hv"],
    lengths: Int[Array, " B"],
    low: Int[Array, "B T"] | None,
    mask: Bool[Array, "#B T F"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None,
    joined: Joined | None,
    scales: tuple[Float[Array, "B K F 2"], Float[Array, "R K S 2"]] | None = None,
) -> Float[Array, "B T N Hv"]:
    """See `api.attend`; `low` is the first position a query sees, `mask` what it sees of the block, `scales` those of
    fresh and of cached keys and values that are codes.

    The kernel gives, for each stretch, unnormalized values and sums of exponentials, both divided by 2**n, and n.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    B, T, N, H = q.shape
    K, page, F, Hv = *cache_k.shape[1:3], *v.shape[2:]
    if pages is None:  # a row is one page
        pages = (jnp.arange(B) if rows is None else rows)[:, None]
    S, G, Q = page * pages.shape[1], N // K, N // K * T
    bounds = jnp.zeros((B, T), jnp.int32) if low is None else low
    finished = finishes(B, T, N, K, Hv)
    bounds, mask = (jnp.repeat(x, G, axis=1) if finished else jnp.tile(x, (1, G, 1)[: x.ndim]) for x in (bounds, mask))
    tiles, block_chunks, width = _tiles(Q, F)
    more, wider = tiles * ROWS - Q, block_chunks * width - F
    low = jnp.pad(bounds, ((0, 0), (0, more)))
    if joined is not None:
        block, places = [joined.rows] * 3, joined.places
    else:
        sides = (_by_head(q, v), more), (k, wider), (v, wider)
        block = [jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, 0))).reshape(B, -1, x.shape[-1]) for x, rows in sides]
        places = Places(tiles * ROWS, block_chunks * width, 0, 0)
    mask = jnp.pad(mask, ((0, 0), (0, more), (0, block_chunks * CHUNK - F))).astype(jnp.int32)
    splits = max(1, min(BLOCKS // (B * K * tiles), S // CHUNK // LEAST))
    stage_bytes = STAGE_BYTES if scales is None else CODES_BYTES
    depth = max(2, min(6, stage_bytes // (CHUNK * (H + Hv) * cache_k.dtype.itemsize), S // CHUNK))
    first = jnp.where(lengths > S, 0, jnp.minimum(jnp.min(low[:, :Q], axis=1), lengths) // CHUNK)
    chunks = jnp.maximum(0, -(-jnp.minimum(lengths, S) // CHUNK) - first)
    scalars = jnp.concatenate([jnp.stack([lengths, first, chunks], axis=1), pages], axis=1).astype(jnp.int32)

    result = jax.ShapeDtypeStruct((B, K, splits, tiles * ROWS), jnp.float32)
    results: Any = (jax.ShapeDtypeStruct((*result.shape, Hv), jnp.float32), result, result)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = {
        "q_smem": plgpu.SMEM((ROWS, H), q.dtype, transforms=swizzled),
        "k_smem": plgpu.SMEM((depth, CHUNK, H), k.dtype, transforms=swizzled if scales is None else ()),
        "v_smem": plgpu.SMEM((depth, CHUNK, Hv), v.dtype, transforms=swizzled if scales is None else ()),
        "low_smem": plgpu.SMEM((ROWS,), jnp.int32),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=depth),
        "q_arrived": plgpu.Barrier(num_arrivals=2),
    }
    if scales is not None:
        fresh = jnp.pad(scales[0], ((0, 0), (0, 0), (0, wider), (0, 0)))
        block += [x.reshape(*x.shape[:2], -1) for x in (fresh, scales[1])]
        scratch["scales_smem"] = plgpu.SMEM((depth, 2 * CHUNK), jnp.float32)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=3, num_barriers=depth)
        scratch["wide_smem"] = plgpu.SMEM((CHUNK, max(H, Hv)), q.dtype, transforms=swizzled)
    if finished:
        results = (jax.ShapeDtypeStruct((B, T, N, Hv), q.dtype),)
        scratch["out_smem"] = plgpu.SMEM((ROWS, Hv), q.dtype)
        if sinks is not None:
            of_head = jnp.tile(sinks.astype(jnp.float32).reshape(K, G), (1, T))
            block.append(jnp.pad(of_head, ((0, 0), (0, more))))
            scratch["sinks_smem"] = plgpu.SMEM((ROWS,), jnp.float32)
            scratch["q_arrived"] = plgpu.Barrier(num_arrivals=3)
    options = {
        "slots": S,
        "page": page,
        "width": width,
        "block_chunks": block_chunks,
        "depth": depth,
        "splits": splits,
        "places": places,
    }
    found = plgpu.kernel(
        partial(_kernel, plgpu, **options, scale=scale, softcap=softcap),
        out_type=results,
        scratch_types=scratch,
        grid=(B, K, tiles, splits),
        grid_names=("b", "k", "tile", "split"),
        num_threads=1,
        thread_name="warpgroup",
    )(scalars, low, mask, cache_k, cache_v, *block)
    if finished:
        return found[0]
    of_head = None if sinks is None else jnp.repeat(sinks.astype(jnp.float32).reshape(K, G), T, axis=1)[None]
    out, total = merged(*(x[:, :, :, :Q] for x in found), sinks=of_head)
    out = (out / total[..., None]).astype(q.dtype)
    return out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


def _kernel(
    plgpu, scalars, low, mask, cache_k, cache_v, q, k, v, *more,
    q_smem, k_smem, v_smem, low_smem, arrived, q_arrived,
    scales_smem=None, wide_smem=None, out_smem=None, sinks_smem=None,
    slots, page, width, block_chunks, depth, splits, places, scale, softcap,
):  # fmt: skip
    """One stretch of a row's cache, for a tile of queries of one key-value head: see the module. With `out_smem` it is
    the only one. With `wide_smem` keys and values are codes, which become numbers there."""
    b, head, tile, split = (jax.lax.axis_index(name) for name in ("b", "k", "tile", "split"))
    length, first, chunks = (scalars[b, i] for i in range(3))
    rows, (C, Hv) = pl.ds(tile * ROWS, ROWS), v_smem.shape[1:]
    share = jax.lax.div(chunks + splits - 1, jnp.int32(splits))
    begin = first + jnp.minimum(split * share, chunks)
    count = first + jnp.minimum((split + 1) * share, chunks) - begin
    end = count + jnp.where(split == splits - 1, block_chunks, 0)  # the last stretch goes on with the block

    codes = scales_smem is not None
    scales, cache_scales, *more = more if codes else (None, None, *more)

    def fetch(i):
        stage = jax.lax.rem(i, jnp.int32(depth))

        def copy_scales(ref, row, first, size):
            if scales_smem is not None and ref is not None:
                there = scales_smem.at[stage, pl.ds(0, 2 * size)]
                plgpu.copy_gmem_to_smem(ref.at[row, head, pl.ds(2 * first, 2 * size)], there, arrived.at[stage])

        def copy(keys, values, size):
            here = pl.ds(0, size)
            plgpu.copy_gmem_to_smem(keys, k_smem.at[stage, here], arrived.at[stage])
            plgpu.copy_gmem_to_smem(values, v_smem.at[stage, here], arrived.at[stage])

        @pl.when(i < count)
        def _():
            which, within = 0, begin + i
            if page < slots:
                which = jax.lax.div(begin + i, jnp.int32(page // C))
                within = begin + i - which * (page // C)
            of_row, at = scalars[b, 3 + which], pl.ds(within * C, C)
            copy_scales(cache_scales, of_row, within * C, C)
            copy(cache_k.at[of_row, head, at], cache_v.at[of_row, head, at], C)

        @pl.when((i >= count) & (i < end))
        def _():
            at = head * places.keys + (i - count) * width
            copy_scales(scales, b, (i - count) * width, width)
            copy(k.at[b, pl.ds(places.first_key + at, width)], v.at[b, pl.ds(places.first_value + at, width)], width)

    plgpu.copy_gmem_to_smem(q.at[b, pl.ds(head * places.queries + tile * ROWS, ROWS)], q_smem, q_arrived)
    plgpu.copy_gmem_to_smem(low.at[b, rows], low_smem, q_arrived)
    if sinks_smem is not None:
        sinks, *more = more
        plgpu.copy_gmem_to_smem(sinks.at[head, rows], sinks_smem, q_arrived)
    for i in range(depth - 1):
        fetch(jnp.int32(i))
    per_row = plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(q_arrived)
    lowest = plgpu.layout_cast(low_smem[...], per_row)
    last = length - 1
    newest = jax.lax.rem(jnp.maximum(last, 0), jnp.int32(slots))

    def held_by(shape, axis, i):
        """What the slots of chunk i hold; negative where nothing was written (see the reference)."""
        slot = (begin + i) * C + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
        return last - newest + slot - jnp.where(slot > newest, slots, 0)

    def clear(stage, nothing):
        """What was never written may hold anything, even NaN, which no weight of zero removes from a product."""
        values = plgpu.layout_cast(v_smem[stage], plgpu.Layout.WGMMA)
        v_smem[stage] = jnp.where(nothing, jnp.zeros_like(values), values)
        plgpu.commit_smem()

    def operand(stored):
        """Of a product; codes are widened, which is exact, after all warps are done with what was there before."""
        if wide_smem is None:
            return stored
        plgpu.commit_smem()
        wide = wide_smem.at[:, pl.ds(0, stored.shape[1])]
        wide[...] = tensor_cores.load(stored, layout=fragments.layout("codes")).astype(wide.dtype)
        plgpu.commit_smem()
        return wide

    def scales_of(stage, which):
        """Of a chunk's keys, or of its values."""
        assert scales_smem is not None
        return fragments.unzipped(tensor_cores.load(scales_smem.at[stage], layout=fragments.layout("two")))[which]

    def of_cache(i, stage):
        if not codes:

            @pl.when(((begin + i + 1) * C > length) & (length <= slots))
            def _():
                clear(stage, held_by((C, Hv), 0, i) < 0)

        def seen():
            held = held_by((ROWS, C), 1, i)
            return (held >= 0) & (held >= jax.lax.broadcast_in_dim(lowest, (ROWS, C), [0]))

        return seen

    def of_block(i, stage):
        if width < C and not codes:
            clear(stage, plgpu.broadcasted_iota(jnp.int32, (C, Hv), 0, layout=plgpu.Layout.WGMMA) >= width)
        own_mask = mask.at[b % mask.shape[0], rows, pl.ds((i - count) * C, C)]
        return lambda: tensor_cores.load(own_mask) > 0

    across = lambda x: jax.lax.broadcast_in_dim(x, (ROWS, C), [1])

    def visit(look, i, carry):
        acc, top, total = carry
        stage = jax.lax.rem(i, jnp.int32(depth))
        plgpu.barrier_wait(arrived.at[stage])
        sees = look(i, stage)
        s = tensor_cores.product(q_smem, operand(k_smem.at[stage]))
        s = s * (across(scales_of(stage, 0) * scale) if codes else scale)
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        seen = sees()
        s = jnp.where(seen, s, MASKED)
        higher = jnp.maximum(top, s.max(axis=1))
        keep = jnp.exp(top - higher)
        p = jnp.where(seen, jnp.exp(s - jax.lax.broadcast_in_dim(higher, (ROWS, C), [0])), 0.0)
        total = total * keep + p.sum(axis=1)
        acc = acc * jax.lax.broadcast_in_dim(keep, (ROWS, Hv), [0])
        if codes:
            p = jnp.where(seen, p * across(scales_of(stage, 1)), 0.0)
        acc = tensor_cores.add_product(acc, p.astype(q_smem.dtype), operand(v_smem.at[stage]))
        fetch(i + depth - 1)  # into the stage of chunk i - 1, whose products are complete
        return acc, higher, total

    sink = jnp.full((ROWS,), MASKED, jnp.float32) if sinks_smem is None else sinks_smem[...]
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, Hv), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(sink, per_row),
        plgpu.layout_cast(jnp.full((ROWS,), 0.0 if sinks_smem is None else 1.0, jnp.float32), per_row),
    )
    carry = jax.lax.fori_loop(0, count, partial(visit, of_cache), carry)
    acc, top, total = jax.lax.fori_loop(count, end, partial(visit, of_block), carry)
    if out_smem is not None:
        (out,) = more
        out_smem[...] = (acc / jax.lax.broadcast_in_dim(total, (ROWS, Hv), [0])).astype(out_smem.dtype)
        plgpu.commit_smem()
        group = out.shape[2] // cache_k.shape[1]
        whole = ROWS // group  # positions of a tile

        @pl.loop(0, jnp.minimum(out.shape[1] - tile * whole, whole))
        def _(i):
            heads = out.at[b, tile * whole + i, pl.ds(head * group, group)]
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(i * group, group)], heads)

        plgpu.wait_smem_to_gmem(0)
        return
    out, out_exponent, out_total = more
    factor, exponent = scaled(top)
    out[b, head, split, rows] = acc * jax.lax.broadcast_in_dim(factor, (ROWS, Hv), [0])
    out_exponent[b, head, split, rows] = exponent
    out_total[b, head, split, rows] = total * factor
