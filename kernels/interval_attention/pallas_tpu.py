"""Implementation for TPU (Pallas), forward and backward: queries with two intervals of keys each.

Scores lie with the keys along the sublanes and the queries along the lanes. So what there is one of for each query,
where its intervals begin and end, its log-sum-exp and the highest score so far, is a row, and sums over the keys need
no exchange between lanes. A grid step takes one tile of queries and one chunk of keys; of chunks that a tile does not
see, none are copied. Keys are differentiated for all query heads of theirs at once, so no sum is left to another call.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from ..products import precision
from .api import MASKED, seeing_tiles, seen_chunks

LANES = 128
HEAD_DIMS = (64, 128, 256)
ROWS = 1024, 512, 256, LANES  # queries of a tile; the first that fits
CHUNKS = 512, 256, LANES  # keys at once


def declines(q: Float[Array, "... H"], *keys: Float[Array, "... H"]) -> str | None:
    """Why these shapes are not served, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or any(x.dtype != q.dtype for x in keys):
        return f"queries in {q.dtype}, keys in {keys[0].dtype}; it supports float32 and bfloat16"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]}; it supports {', '.join(map(str, HEAD_DIMS))}"
    return None


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
    (B, R, N, H), tile = q.shape, _tile(q)
    row = pltpu.VMEM((1, tile), jnp.float32)
    out, lse = _by_queries(
        partial(_forward, scale=scale),
        [_heads_first(q)],
        [k, v],
        [],
        bounds,
        context,
        out=[jax.ShapeDtypeStruct((B, N, R, H), q.dtype), jax.ShapeDtypeStruct((B, N, 1, R), jnp.float32)],
        scratch=[row, row, pltpu.VMEM((H, tile), jnp.float32)],
    )
    return _heads_first(out), lse[:, :, 0]


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
    """See `api.Kernel`; a call for the gradient of queries, and one or two for those of keys."""
    matrices, rows = [_heads_first(q), _heads_first(d_out)], [lse[:, :, None], delta[:, :, None]]
    scratch = [pltpu.VMEM((q.shape[-1], _tile(q)), jnp.float32)]
    out = [jax.ShapeDtypeStruct(matrices[0].shape, q.dtype)]
    (d_q,) = _by_queries(
        partial(_of_queries, scale=scale), matrices, [k, v], rows, bounds, context, out=out, scratch=scratch
    )
    keys, S = partial(_by_keys, matrices, rows, k, v, bounds, scale=scale), k.shape[2]
    parts = [keys(0, 0, context), *([keys(1, context, S)] if context < S else [])]
    d_k, d_v = (jnp.concatenate(part, axis=2) for part in zip(*parts, strict=True))
    return _heads_first(d_q), d_k, d_v


def _heads_first(x: Float[Array, "B X Y H"]) -> Float[Array, "B Y X H"]:
    return x.swapaxes(1, 2)


def _tile(q: Float[Array, "B R N H"]) -> int:
    return next(size for size in ROWS if q.shape[1] % size == 0)


def _chunk(context: int, keys: int) -> int:
    return next(size for size in CHUNKS if context % size == 0 == keys % size)


def _by_queries(kernel, matrices, keys, rows, bounds, context, *, out, scratch):
    """A call whose steps go over the chunks of keys that a tile of queries of one head sees.

    Args:
        matrices: [B, N, R, H].
        keys: [B, K, S, H].
        rows: [B, N, 1, R].
        out: shapes of matrices and of rows.
    """
    B, N, R, H = matrices[0].shape
    K, S = keys[0].shape[1:3]
    tile, chunk = next(size for size in ROWS if R % size == 0), _chunk(context, S)
    seen = seen_chunks(bounds, tile, chunk).swapaxes(1, 2)  # [B, tiles, 2, 2]
    steps = jnp.maximum(jnp.max(jnp.sum(seen[..., 1], axis=2)), 1)

    def of_keys(b, h, r, i, seen):
        return b, jax.lax.div(h, N // K), _visited(seen, b * (R // tile) + r, i)[1], 0

    matrix = pl.BlockSpec((None, None, tile, H), lambda b, h, r, i, seen: (b, h, r, 0))
    row = pl.BlockSpec((None, None, 1, tile), lambda b, h, r, i, seen: (b, h, 0, r))
    key = pl.BlockSpec((None, None, chunk, H), of_keys)
    bound = pl.BlockSpec((None, 4, tile), lambda b, h, r, i, seen: (b, 0, r))
    return pl.pallas_call(
        partial(kernel, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, N, R // tile, steps),
            in_specs=[bound, *[matrix] * len(matrices), *[row] * len(rows), *[key] * len(keys)],
            out_specs=[row if x.shape[2] == 1 else matrix for x in out],
            scratch_shapes=scratch,
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
        name=f"interval_attention{kernel.func.__name__}",
    )(seen.reshape(-1), bounds.reshape(B, 4, R), *matrices, *rows, *keys)


def _visited(seen, tile, i):
    """Whether a tile of queries sees an i-th chunk, which that is (else the last), and whether it is of a block."""
    first, count, second, more = (seen[4 * tile + j] for j in range(4))
    at = jnp.clip(i, 0, jnp.maximum(count + more - 1, 0))
    own = at >= count
    return i < count + more, jnp.where(own, second + at - count, first + at), own


def _here(seen, bounds, chunk):
    """This step's visit: whether there is one, and which keys of the chunk each query sees, [chunk, tile]."""
    b, r, i = (pl.program_id(axis) for axis in (0, 2, 3))
    there, at, own = _visited(seen, b * pl.num_programs(2) + r, i)

    def sees():
        low, end = (jnp.where(own, bounds[2 + j : 3 + j], bounds[j : 1 + j]) for j in range(2))
        return _sees(at * chunk, low, end, chunk)

    return there, sees


def _sees(begin, low, end, chunk):
    key = begin + jax.lax.broadcasted_iota(jnp.int32, (chunk, low.shape[1]), 0)
    return (key >= low) & (key < end)


def _dot(a, b, axes: tuple[int, int]):
    """The product of two matrices over these axes of theirs."""
    dims = ((axes[0],), (axes[1],)), ((), ())
    return jax.lax.dot_general(a, b, dims, precision=precision(a), preferred_element_type=jnp.float32)


def _forward(seen, bounds, q, k, v, out, lse, top, total, acc, *, chunk, scale):
    there, sees = _here(seen, bounds, chunk)

    @pl.when(pl.program_id(3) == 0)
    def _():
        top[...], total[...] = jnp.full_like(top, MASKED), jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(there)
    def _():
        seen = sees()
        s = jnp.where(seen, _dot(k[...], q[...], (1, 1)) * scale, MASKED)
        higher = jnp.maximum(top[...], jnp.max(s, axis=0, keepdims=True))
        p, keep = jnp.where(seen, jnp.exp(s - higher), 0.0), jnp.exp(top[...] - higher)
        total[...] = keep * total[...] + jnp.sum(p, axis=0, keepdims=True)
        acc[...] = keep * acc[...] + _dot(v[...], p.astype(v.dtype), (0, 0))
        top[...] = higher

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        sums = jnp.where(total[...] > 0, total[...], 1.0)  # of a query that sees nothing
        out[...] = (acc[...] / sums).T.astype(out.dtype)
        lse[...] = top[...] + jnp.log(sums)


def _of_queries(seen, bounds, q, d_out, lse, delta, k, v, d_q, acc, *, chunk, scale):
    there, sees = _here(seen, bounds, chunk)

    @pl.when(pl.program_id(3) == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(there)
    def _():
        p = jnp.where(sees(), jnp.exp(_dot(k[...], q[...], (1, 1)) * scale - lse[...]), 0.0)
        d_s = p * (_dot(v[...], d_out[...], (1, 1)) - delta[...]) * scale
        acc[...] += _dot(k[...], d_s.astype(k.dtype), (0, 0))

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _():
        d_q[...] = acc[...].T.astype(d_q.dtype)


def _by_keys(matrices, rows, k, v, bounds, which, begin, end, *, scale):
    """The gradients of the keys and values `begin..end - 1`, which queries see in this interval of theirs.

    The steps go over the tiles of queries that see a chunk, for every query head that shares it.
    """
    (B, N, R, H), (K, S) = matrices[0].shape, k.shape[1:3]
    tile, chunk, group = next(size for size in ROWS if R % size == 0), _chunk(begin, end), N // K
    seeing = seeing_tiles(bounds, tile, chunk, begin if which else end, S)[:, begin // chunk : end // chunk]
    steps, chunks = jnp.maximum(jnp.max(seeing[..., 1]), 1), (end - begin) // chunk

    def tile_of(b, c, i, seeing):
        first, count = (seeing[2 * (b * chunks + c) + j] for j in range(2))
        return first + jnp.clip(i, 0, jnp.maximum(count - 1, 0))

    at = lambda b, h, c, g, i, seeing: (b, h * group + g, tile_of(b, c, i, seeing))
    matrix = pl.BlockSpec((None, None, tile, H), lambda *x: (*at(*x), 0))
    row = pl.BlockSpec((None, None, 1, tile), lambda *x: (*at(*x)[:2], 0, at(*x)[2]))
    bound = pl.BlockSpec((None, None, 2, tile), lambda *x: (x[0], which, 0, at(*x)[2]))
    key = pl.BlockSpec((None, None, chunk, H), lambda b, h, c, g, i, seeing: (b, h, begin // chunk + c, 0))
    result = pl.BlockSpec((None, None, chunk, H), lambda b, h, c, g, i, seeing: (b, h, c, 0))
    out = jax.ShapeDtypeStruct((B, K, end - begin, H), k.dtype)
    return pl.pallas_call(
        partial(_of_keys, begin=begin, chunk=chunk, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, chunks, group, steps),
            in_specs=[bound, *[matrix] * len(matrices), *[row] * len(rows), key, key],
            out_specs=[result, result],
            scratch_shapes=[pltpu.VMEM((chunk, H), jnp.float32)] * 2,
        ),
        out_shape=[out, out],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",) * 2),
        name="interval_attention_of_keys",
    )(seeing.reshape(-1), bounds, *matrices, *rows, k, v)


def _of_keys(seeing, bounds, q, d_out, lse, delta, k, v, d_k, d_v, of_keys, of_values, *, begin, chunk, scale):
    b, c, g, i = (pl.program_id(axis) for axis in (0, 2, 3, 4))

    @pl.when((g == 0) & (i == 0))
    def _():
        of_keys[...], of_values[...] = jnp.zeros_like(of_keys), jnp.zeros_like(of_values)

    @pl.when(i < seeing[2 * (b * pl.num_programs(2) + c) + 1])
    def _():
        seen = _sees(begin + c * chunk, bounds[0:1], bounds[1:2], chunk)
        p = jnp.where(seen, jnp.exp(_dot(k[...], q[...], (1, 1)) * scale - lse[...]), 0.0)
        of_values[...] += _dot(p.astype(v.dtype), d_out[...], (1, 0))
        d_s = p * (_dot(v[...], d_out[...], (1, 1)) - delta[...]) * scale
        of_keys[...] += _dot(d_s.astype(k.dtype), q[...], (1, 0))

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        d_k[...], d_v[...] = of_keys[...].astype(d_k.dtype), of_values[...].astype(d_v.dtype)
