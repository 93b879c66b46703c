"""Implementation for Hopper (Pallas, Mosaic GPU), forward and backward: queries with two intervals of keys each.

A thread block has two warpgroups. Each takes 64 queries of a head, or 64 keys where these are differentiated. Both
share what the first one copies to shared memory a few chunks ahead (TMA); a third one for that would leave them too few
registers. They multiply on the tensor cores (WGMMA) and keep sums and the online softmax in registers. Chunks that
nobody in the thread block sees are not visited. Keys are differentiated for all query heads of theirs at once, so no
sum is left to another launch.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import stages, tensor_cores
from .api import MASKED, seeing_tiles, seen_chunks

HEAD_DIMS = (64, 128)
ROWS = 64  # queries or keys of a warpgroup: the rows of one WGMMA
GROUPS = 2  # warpgroups
TILE = GROUPS * ROWS  # queries or keys of a thread block
CHUNK = 64  # keys or queries that are copied at once
DEPTH = 5, 4, 4  # chunks that shared memory holds: forward, backward by queries and by keys
LOG2E = math.log2(math.e)


def declines(q: Float[Array, "... H"], *keys: Float[Array, "... H"]) -> str | None:
    """Why these shapes are not served, or None."""
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]}; it supports {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or any(x.dtype != q.dtype for x in keys):
        return f"queries in {q.dtype}, keys in {keys[0].dtype}; it supports bfloat16 and float16"
    return tensor_cores.missing()


def forward(
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    bounds: Int[Array, "B 2 2 R"],
    *,
    context: int,
    scale: float,
) -> tuple[Float[Array, "B R N H"], Float[Array, "B N R"]]:
    """See `api.Kernel`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (B, R, N, H), depth = q.shape, DEPTH[0]
    scratch = {
        "q_smem": _matrix((GROUPS, ROWS, H), q.dtype),
        "k_smem": _matrix((depth, CHUNK, H), q.dtype),
        "v_smem": _matrix((depth, CHUNK, H), q.dtype),
        "bounds_smem": plgpu.SMEM((GROUPS, 2, 2, ROWS), jnp.int32),
        "lse_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=5, num_barriers=GROUPS),
        **stages.pipeline(depth, 2, GROUPS),
    }
    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, R), jnp.float32)
    run = _launched(partial(_forward, scale=scale), out, scratch, (R // TILE, B, N))
    return run(seen_chunks(bounds, TILE, CHUNK), bounds, q, k, v)


def backward(
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    bounds: Int[Array, "B 2 2 R"],
    lse: Float[Array, "B N R"],
    delta: Float[Array, "B N R"],
    d_out: Float[Array, "B R N H"],
    *,
    context: int,
    scale: float,
) -> tuple[Float[Array, "B R N H"], Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """See `api.Kernel`; one launch for the gradient of queries, and one for those of keys and values."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (B, R, N, H), (K, S), depth = q.shape, k.shape[1:3], DEPTH[1]
    scratch = {
        "q_smem": _matrix((GROUPS, ROWS, H), q.dtype),
        "d_smem": _matrix((GROUPS, ROWS, H), q.dtype),
        "k_smem": _matrix((depth, CHUNK, H), q.dtype),
        "v_smem": _matrix((depth, CHUNK, H), q.dtype),
        "bounds_smem": plgpu.SMEM((GROUPS, 2, 2, ROWS), jnp.int32),
        "lse_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "delta_smem": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=8, num_barriers=GROUPS),
        **stages.pipeline(depth, 2, GROUPS),
    }
    run = _launched(
        partial(_of_queries, scale=scale), jax.ShapeDtypeStruct(q.shape, q.dtype), scratch, (R // TILE, B, N)
    )
    d_q = run(seen_chunks(bounds, TILE, CHUNK), bounds, q, d_out, lse, delta, k, v)

    depth = DEPTH[2]
    scratch = {
        "k_smem": _matrix((GROUPS, ROWS, H), q.dtype),
        "v_smem": _matrix((GROUPS, ROWS, H), q.dtype),
        "q_smem": _matrix((depth, CHUNK, H), q.dtype),
        "d_smem": _matrix((depth, CHUNK, H), q.dtype),
        "lse_smem": plgpu.SMEM((depth, CHUNK), jnp.float32),
        "delta_smem": plgpu.SMEM((depth, CHUNK), jnp.float32),
        "low_smem": plgpu.SMEM((depth, CHUNK), jnp.int32),
        "end_smem": plgpu.SMEM((depth, CHUNK), jnp.int32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
        **stages.pipeline(depth, 6, GROUPS),
    }
    out = (jax.ShapeDtypeStruct(k.shape, k.dtype),) * 2
    run = _launched(partial(_of_keys, context=context, scale=scale), out, scratch, (S // TILE, B, K))
    return d_q, *run(seeing_tiles(bounds, CHUNK, TILE, context, S), bounds, q, d_out, lse, delta, k, v)


def _matrix(shape, dtype):
    """Rows in shared memory, laid out as the tensor cores read them."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _launched(kernel, out, scratch, grid: tuple[int, int, int]):
    """The kernel, on a grid whose first axis is the slowest."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(
        partial(kernel, plgpu),
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("tile", "b", "head"),
        num_threads=GROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _place():
    """Tile, row of the batch and head of a thread block, and which of its warpgroups this is."""
    return tuple(jax.lax.axis_index(name) for name in ("tile", "b", "head", "warpgroup"))


def _masked(plgpu, s, begin, low, end, keys: int):
    """Scores, `MASKED` where a query does not see the key; keys lie along this axis of theirs, from `begin` on."""
    key = begin + plgpu.broadcasted_iota(jnp.int32, s.shape, keys, layout=plgpu.Layout.WGMMA)
    s = jnp.where(key >= jax.lax.broadcast_in_dim(low, s.shape, [1 - keys]), s, MASKED)
    return jnp.where(key < jax.lax.broadcast_in_dim(end, s.shape, [1 - keys]), s, MASKED)


def _forward(
    plgpu, chunks, bounds, q, k, v, out, lse,
    *, q_smem, k_smem, v_smem, bounds_smem, lse_smem, ready, arrived, consumed, scale,
):  # fmt: skip
    """A tile of queries of one head, the last tiles first: they mostly see most."""
    at, b, head, mine = _place()
    tile, (depth, C, H) = chunks.shape[2] - 1 - at, k_smem.shape
    spans = [(chunks[b, i, tile, 0], chunks[b, i, tile, 1]) for i in range(2)]
    count = spans[0][1] + spans[1][1]
    rows = pl.ds(tile * TILE + mine * ROWS, ROWS)

    fetch = _fetching(plgpu, spans, k, v, q.shape[2], k_smem, v_smem, arrived)
    stages.begin(fetch, count, depth)
    smem = q_smem.at[mine]
    plgpu.copy_gmem_to_smem(q.at[b, rows, head], smem, ready.at[mine])
    _copy_bounds(plgpu, bounds, b, rows, bounds_smem.at[mine], ready.at[mine])
    plgpu.barrier_wait(ready.at[mine])

    def visit(which, carry):
        low, end = (tensor_cores.load(bounds_smem.at[mine, which, i], axis=1) for i in range(2))

        def body(i, carry):
            acc, top, total = carry
            stage = stages.wait(fetch, i, count, depth, arrived, consumed)
            s = tensor_cores.product(smem, k_smem.at[stage]) * (scale * LOG2E)
            s = _masked(plgpu, s, _chunk_at(spans, i) * C, low, end, keys=1)
            higher = jnp.maximum(top, s.max(axis=1))
            least = jnp.where(higher > MASKED, higher, 0.0)  # of a query that has seen nothing yet
            keep = jnp.exp2(top - least)
            p = jnp.exp2(s - jax.lax.broadcast_in_dim(least, s.shape, [0]))
            acc = acc * jax.lax.broadcast_in_dim(keep, acc.shape, [0])
            total = total * keep + p.sum(axis=1)
            acc = tensor_cores.add_product(acc, p.astype(v.dtype), v_smem.at[stage])
            plgpu.barrier_arrive(consumed.at[stage])
            return acc, higher, total

        begin = 0 if which == 0 else spans[0][1]
        return jax.lax.fori_loop(begin, begin + spans[which][1], body, carry)

    full = tensor_cores.full
    carry = full((ROWS, H), 0.0), full((ROWS,), MASKED, axis=1), full((ROWS,), 0.0, axis=1)
    acc, top, sums = visit(1, visit(0, carry))
    sums = jnp.where(sums > 0.0, sums, 1.0)  # of a query that sees nothing
    smem[...] = (acc / jax.lax.broadcast_in_dim(sums, acc.shape, [0])).astype(out.dtype)
    lse_smem[mine] = top / LOG2E + jnp.log(sums)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, out.at[b, rows, head])
    plgpu.copy_smem_to_gmem(lse_smem.at[mine], lse.at[b, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _of_queries(
    plgpu, chunks, bounds, q, d_out, lse, delta, k, v, d_q,
    *, q_smem, d_smem, k_smem, v_smem, bounds_smem, lse_smem, delta_smem, ready, arrived, consumed, scale,
):  # fmt: skip
    """The gradient of a tile of queries of one head."""
    at, b, head, mine = _place()
    tile, (depth, C, H) = chunks.shape[2] - 1 - at, k_smem.shape
    spans = [(chunks[b, i, tile, 0], chunks[b, i, tile, 1]) for i in range(2)]
    count = spans[0][1] + spans[1][1]
    rows = pl.ds(tile * TILE + mine * ROWS, ROWS)

    fetch = _fetching(plgpu, spans, k, v, q.shape[2], k_smem, v_smem, arrived)
    stages.begin(fetch, count, depth)
    plgpu.copy_gmem_to_smem(q.at[b, rows, head], q_smem.at[mine], ready.at[mine])
    plgpu.copy_gmem_to_smem(d_out.at[b, rows, head], d_smem.at[mine], ready.at[mine])
    plgpu.copy_gmem_to_smem(lse.at[b, head, rows], lse_smem.at[mine], ready.at[mine])
    plgpu.copy_gmem_to_smem(delta.at[b, head, rows], delta_smem.at[mine], ready.at[mine])
    _copy_bounds(plgpu, bounds, b, rows, bounds_smem.at[mine], ready.at[mine])
    plgpu.barrier_wait(ready.at[mine])
    top = tensor_cores.load(lse_smem.at[mine], axis=1) * LOG2E
    less = tensor_cores.load(delta_smem.at[mine], axis=1)

    def visit(which, acc):
        low, end = (tensor_cores.load(bounds_smem.at[mine, which, i], axis=1) for i in range(2))

        def body(i, acc):
            stage = stages.wait(fetch, i, count, depth, arrived, consumed)
            s = tensor_cores.product(q_smem.at[mine], k_smem.at[stage]) * (scale * LOG2E)
            s = _masked(plgpu, s, _chunk_at(spans, i) * C, low, end, keys=1)
            p = jnp.exp2(s - jax.lax.broadcast_in_dim(top, s.shape, [0]))
            d_p = tensor_cores.product(d_smem.at[mine], v_smem.at[stage])
            d_s = p * (d_p - jax.lax.broadcast_in_dim(less, s.shape, [0])) * scale
            acc = tensor_cores.add_product(acc, d_s.astype(k.dtype), k_smem.at[stage])
            plgpu.barrier_arrive(consumed.at[stage])
            return acc

        begin = 0 if which == 0 else spans[0][1]
        return jax.lax.fori_loop(begin, begin + spans[which][1], body, acc)

    acc = visit(1, visit(0, tensor_cores.full((ROWS, H), 0.0)))
    q_smem[mine] = acc.astype(d_q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[mine], d_q.at[b, rows, head])
    plgpu.wait_smem_to_gmem(0)


def _copy_bounds(plgpu, bounds, b, rows, smem, barrier) -> None:
    """Four vectors: first and end of both intervals."""
    for which in range(2):
        for i in range(2):
            plgpu.copy_gmem_to_smem(bounds.at[b, which, i, rows], smem.at[which, i], barrier)


def _chunk_at(spans, i):
    """Which chunk of keys is visited as the i-th."""
    (first, count), (second, _) = spans
    return jnp.where(i < count, first + i, second + i - count)


def _fetching(plgpu, spans, k, v, heads: int, k_smem, v_smem, arrived):
    """What starts the copies of a chunk of keys and values, for one of so many query heads."""
    _, b, head, _ = _place()
    own, C = jax.lax.div(head, jnp.int32(heads // k.shape[1])), k_smem.shape[1]

    def fetch(i, stage):
        at = pl.ds(_chunk_at(spans, i) * C, C)
        plgpu.copy_gmem_to_smem(k.at[b, own, at], k_smem.at[stage], arrived.at[stage])
        plgpu.copy_gmem_to_smem(v.at[b, own, at], v_smem.at[stage], arrived.at[stage])

    return fetch


def _of_keys(
    plgpu, tiles, bounds, q, d_out, lse, delta, k, v, d_k, d_v,
    *, k_smem, v_smem, q_smem, d_smem, lse_smem, delta_smem, low_smem, end_smem, ready, arrived, consumed,
    context, scale,
):  # fmt: skip
    """The gradients of a tile of keys and values of one head, the first tiles first: they are mostly seen most."""
    tile, b, head, mine = _place()
    (depth, C, H), group = q_smem.shape, q.shape[2] // k.shape[1]
    first, count = tiles[b, tile, 0], tiles[b, tile, 1]
    begin = tile * TILE + mine * ROWS
    which = jnp.where(tile * TILE >= context, 1, 0)  # the interval of these keys

    def fetch(i, stage):
        other = head * group + jax.lax.div(i, jnp.maximum(count, 1))  # of the query heads
        rows = pl.ds((first + jax.lax.rem(i, jnp.maximum(count, 1))) * C, C)
        copies = (
            (q.at[b, rows, other], q_smem),
            (d_out.at[b, rows, other], d_smem),
            (lse.at[b, other, rows], lse_smem),
            (delta.at[b, other, rows], delta_smem),
            (bounds.at[b, which, 0, rows], low_smem),
            (bounds.at[b, which, 1, rows], end_smem),
        )
        for source, smem in copies:
            plgpu.copy_gmem_to_smem(source, smem.at[stage], arrived.at[stage])

    stages.begin(fetch, group * count, depth)
    plgpu.copy_gmem_to_smem(k.at[b, head, pl.ds(begin, ROWS)], k_smem.at[mine], ready.at[mine])
    plgpu.copy_gmem_to_smem(v.at[b, head, pl.ds(begin, ROWS)], v_smem.at[mine], ready.at[mine])
    plgpu.barrier_wait(ready.at[mine])

    def body(i, carry):
        of_keys, of_values = carry
        stage = stages.wait(fetch, i, group * count, depth, arrived, consumed)
        s = tensor_cores.product(k_smem.at[mine], q_smem.at[stage]) * (scale * LOG2E)
        low, end = (tensor_cores.load(x.at[stage], axis=0) for x in (low_smem, end_smem))
        s = _masked(plgpu, s, begin, low, end, keys=0)
        top = tensor_cores.load(lse_smem.at[stage], axis=0) * LOG2E
        p = jnp.exp2(s - jax.lax.broadcast_in_dim(top, s.shape, [1]))
        of_values = tensor_cores.add_product(of_values, p.astype(d_out.dtype), d_smem.at[stage])
        d_p = tensor_cores.product(v_smem.at[mine], d_smem.at[stage])
        less = tensor_cores.load(delta_smem.at[stage], axis=0)
        d_s = p * (d_p - jax.lax.broadcast_in_dim(less, s.shape, [1])) * scale
        of_keys = tensor_cores.add_product(of_keys, d_s.astype(q.dtype), q_smem.at[stage])
        plgpu.barrier_arrive(consumed.at[stage])
        return of_keys, of_values

    zeros = tensor_cores.full((ROWS, H), 0.0)
    of_keys, of_values = jax.lax.fori_loop(0, group * count, body, (zeros, zeros))
    k_smem[mine] = of_keys.astype(d_k.dtype)
    v_smem[mine] = of_values.astype(d_v.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k_smem.at[mine], d_k.at[b, head, pl.ds(begin, ROWS)])
    plgpu.copy_smem_to_gmem(v_smem.at[mine], d_v.at[b, head, pl.ds(begin, ROWS)])
    plgpu.wait_smem_to_gmem(0)
