"""Implementation for Hopper (Pallas, Mosaic GPU): split-K over the cache, 64 queries to a tensor-core tile.

A thread block takes the queries that share one key-value head, in tiles of 64, and one of several stretches of the
row's cache. One warpgroup copies chunks of slots to shared memory a few chunks ahead (TMA), multiplies them (WGMMA)
and keeps an online softmax in registers. What the row cannot see is not read. The stretches, the block's own keys and
the sink are merged by log-sum-exp in XLA: all of that is small.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

HEAD_DIMS = (64, 128, 256)
ROWS = 64  # queries of a tile: the rows of one WGMMA
CHUNK = 64  # slots copied at once
STAGE_BYTES = 128 << 10  # of shared memory for chunks in flight
BLOCKS = 264  # thread blocks wanted: two for every SM of an H100 or H200
LEAST = 4  # chunks a split must be worth
MASKED = -1e30


def declines(q: Float[Array, "B T N H"], v: Float[Array, "B K T Hv"], cache_k: Float[Array, "R K S H"]) -> str | None:
    """Why these shapes are not served, or None."""
    for size in (q.shape[-1], v.shape[-1]):
        if size not in HEAD_DIMS:
            return f"head dim {size}; it serves {', '.join(map(str, HEAD_DIMS))}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == v.dtype == cache_k.dtype:
        return f"queries in {q.dtype}, values in {v.dtype}, cache in {cache_k.dtype}; it serves bfloat16 and float16"
    if cache_k.shape[2] == 0 or cache_k.shape[2] % CHUNK:
        return f"{cache_k.shape[2]} slots; it serves multiples of {CHUNK}"
    if jax.default_backend() == "gpu" and not (found := jax.devices()[0].compute_capability).startswith("9."):
        return f"compute capability {found}; it serves 9.0, for whose tensor cores it is written"
    return None


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"],
    cache_k: Float[Array, "R K S H"],
    cache_v: Float[Array, "R K S Hv"],
    lengths: Int[Array, " B"],
    low: Int[Array, "B T"] | None,
    mask: Bool[Array, "#B T T"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    row: Int[Array, ""],
) -> Float[Array, "B T N Hv"]:
    """See `api.attend`; `low` is the first position a query sees, `mask` what it sees of the block."""
    B, T, N, H = q.shape
    K, G = k.shape[1], N // k.shape[1]
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    bounds = jnp.zeros((B, T), jnp.int32) if low is None else low
    out, top, total = _prefix(grouped, cache_k, cache_v, lengths, jnp.tile(bounds, (1, G)), scale, softcap, row)
    # The block itself.
    s = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(jnp.tile(jnp.broadcast_to(mask, (B, T, T)), (1, G, 1))[:, None], s, MASKED)
    highest = jnp.maximum(jnp.max(top, axis=-1), jnp.max(s, axis=-1))
    if sinks is not None:
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(K, G), T, axis=1)[None]
        highest = jnp.maximum(highest, sink)
    p, weights = jnp.exp(s - highest[..., None]), jnp.exp(top - highest[..., None])
    own = jnp.einsum("bkqt,bkth->bkqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = own + jnp.einsum("bkqz,bkqzh->bkqh", weights, out)
    total = jnp.sum(p, axis=-1) + jnp.sum(weights * total, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    out = (out / total[..., None]).astype(q.dtype)
    return out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


def _prefix(
    q: Float[Array, "B K Q H"],
    cache_k: Float[Array, "R K S H"],
    cache_v: Float[Array, "R K S Hv"],
    lengths: Int[Array, " B"],
    low: Int[Array, "B Q"],
    scale: float,
    softcap: float | None,
    row: Int[Array, ""],
) -> tuple[Float[Array, "B K Q Z Hv"], Float[Array, "B K Q Z"], Float[Array, "B K Q Z"]]:
    """Attention to the cache in Z parts: unnormalised values, highest scores and sums of exponentials, float32."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    B, K, Q, H = q.shape
    S, Hv = cache_k.shape[2], cache_v.shape[3]
    tiles = -(-Q // ROWS)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles * ROWS - Q), (0, 0)))
    low = jnp.pad(low, ((0, 0), (0, tiles * ROWS - Q)))
    splits = max(1, min(-(-BLOCKS // (B * K * tiles)), S // CHUNK // LEAST))
    depth = max(2, min(6, STAGE_BYTES // (CHUNK * (H + Hv) * q.dtype.itemsize), S // CHUNK))
    first = jnp.where(lengths > S, 0, jnp.minimum(jnp.min(low[:, :Q], axis=1), lengths) // CHUNK)
    chunks = jnp.maximum(0, -(-jnp.minimum(lengths, S) // CHUNK) - first)
    scalars = jnp.stack([lengths, first, chunks, row + jnp.arange(B)], axis=1).astype(jnp.int32)

    shape = jax.ShapeDtypeStruct
    results = (
        shape((B, K, splits, tiles * ROWS, Hv), jnp.float32),
        shape((B, K, splits, tiles * ROWS), jnp.float32),
        shape((B, K, splits, tiles * ROWS), jnp.float32),
    )
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = {
        "q_smem": plgpu.SMEM((ROWS, H), q.dtype, transforms=swizzled),
        "k_smem": plgpu.SMEM((depth, CHUNK, H), q.dtype, transforms=swizzled),
        "v_smem": plgpu.SMEM((depth, CHUNK, Hv), q.dtype, transforms=swizzled),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=depth),
        "low_smem": plgpu.SMEM((ROWS,), jnp.int32),
        "q_arrived": plgpu.Barrier(num_arrivals=2),
    }
    out, top, total = plgpu.kernel(
        partial(_kernel, plgpu, slots=S, depth=depth, splits=splits, scale=scale, softcap=softcap),
        out_type=results,
        scratch_types=scratch,
        grid=(B, K, tiles, splits),
        grid_names=("b", "k", "tile", "split"),
        num_threads=1,
        thread_name="warpgroup",
    )(scalars, q, low, cache_k, cache_v)
    return tuple(jnp.moveaxis(x[:, :, :, :Q], 2, 3) for x in (out, top, total))


def _kernel(
    plgpu, scalars, q, low, cache_k, cache_v, out, out_top, out_total,
    *, q_smem, k_smem, v_smem, low_smem, arrived, q_arrived, slots, depth, splits, scale, softcap,
):  # fmt: skip
    """One stretch of one row's cache, for a tile of queries of one key-value head: see the module."""
    b, head, tile, split = (jax.lax.axis_index(name) for name in ("b", "k", "tile", "split"))
    length, first, chunks, row = (scalars[b, i] for i in range(4))
    rows, (C, Hv) = pl.ds(tile * ROWS, ROWS), v_smem.shape[1:]
    each = jax.lax.div(chunks + splits - 1, jnp.int32(splits))
    begin = first + jnp.minimum(split * each, chunks)
    count = first + jnp.minimum((split + 1) * each, chunks) - begin

    def fetch(i):
        at, stage = pl.ds((begin + i) * C, C), jax.lax.rem(i, jnp.int32(depth))
        plgpu.copy_gmem_to_smem(cache_k.at[row, head, at], k_smem.at[stage], arrived.at[stage])
        plgpu.copy_gmem_to_smem(cache_v.at[row, head, at], v_smem.at[stage], arrived.at[stage])

    plgpu.copy_gmem_to_smem(q.at[b, head, rows], q_smem, q_arrived)
    plgpu.copy_gmem_to_smem(low.at[b, rows], low_smem, q_arrived)
    for i in range(depth - 1):
        pl.when(i < count)(partial(fetch, jnp.int32(i)))
    per_row = plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(q_arrived)
    lowest = plgpu.layout_cast(low_smem[...], per_row)
    last = length - 1
    newest = jax.lax.rem(jnp.maximum(last, 0), jnp.int32(slots))

    def position(shape, axis, i):
        """What the slots of chunk i hold; negative where nothing was written (see the reference)."""
        slot = (begin + i) * C + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
        return last - newest + slot - jnp.where(slot > newest, slots, 0)

    def visit(i, carry):
        acc, top, total = carry
        stage = jax.lax.rem(i, jnp.int32(depth))
        plgpu.barrier_wait(arrived.at[stage])

        s = _product(q_smem, k_smem.at[stage]) * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        held = position((ROWS, C), 1, i)
        seen = (held >= 0) & (held >= jax.lax.broadcast_in_dim(lowest, (ROWS, C), [0]))
        s = jnp.where(seen, s, MASKED)
        higher = jnp.maximum(top, s.max(axis=1))
        keep = jnp.exp(top - higher)
        p = jnp.where(seen, jnp.exp(s - jax.lax.broadcast_in_dim(higher, (ROWS, C), [0])), 0.0)
        total = total * keep + p.sum(axis=1)
        acc = acc * jax.lax.broadcast_in_dim(keep, (ROWS, Hv), [0])

        @pl.when(((begin + i + 1) * C > length) & (length <= slots))
        def _():  # slots never written may hold anything, even NaN, which no weight of zero removes
            written = position((C, Hv), 0, i) >= 0
            values = plgpu.layout_cast(v_smem[stage], plgpu.Layout.WGMMA)
            v_smem[stage] = jnp.where(written, values, jnp.zeros_like(values))
            plgpu.commit_smem()

        acc = _add_product(acc, p.astype(v_smem.dtype), v_smem.at[stage])
        ahead = i + depth - 1  # into the stage of chunk i - 1, whose products are complete
        pl.when(ahead < count)(partial(fetch, ahead))
        return acc, higher, total

    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, Hv), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
    )
    acc, top, total = jax.lax.fori_loop(0, count, visit, start)
    out[b, head, split, rows] = acc
    out_top[b, head, split, rows] = top
    out_total[b, head, split, rows] = total


def _product(a, b):
    """a @ b.T of two arrays in shared memory, in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def multiply(ref):
        plgpu.wgmma(ref, a, b.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def _add_product(acc, a, b):
    """acc + a @ b of `b` in shared memory and the rest in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))
