"""Attention of many blocks to one sequence, with gradients, in plain XLA.

Blocks are taken in tiles; a tile walks the chunks of the cache that some block of it sees, with an online
softmax, and its backward pass walks them again. Neither pass holds more than tile x chunk scores. On a GPU tiles and
chunks are large and a tile walks all chunks: the host, which starts every kernel there, would otherwise wait for the
device to say how many.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import platform
from ..products import product

TILE = 128  # queries of one head a tile holds at least
CHUNK = 128  # cache slots per iteration
LARGE = 1024  # both on a GPU
MOST_SCORES = 256 << 20  # bytes of them there
MASKED = -1e30


class _Tiles(NamedTuple):
    """Operands in tiles of G blocks: n tiles, B rows, K heads, G*Q queries (Q = T times the group size)."""

    q: Float[Array, "n B K GQ H"]
    k: Float[Array, "n B K G F H"]
    v: Float[Array, "n B K G F H"]
    low: Int[Array, "n B GQ"]
    high: Int[Array, "n B GQ"]


def attend(
    q: Float[Array, "B A T N H"],
    k: Float[Array, "B A K F H"],
    v: Float[Array, "B A K F H"],
    cache_k: Float[Array, "B K S H"],
    cache_v: Float[Array, "B K S H"],
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B A"],
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "B A T N H"]:
    """See `api.attend_anchored`."""
    B, A, T, N, H = q.shape
    K, S = cache_k.shape[1:3]
    group, earlier = N // K, k.shape[3] - T  # keys of the block before its first query
    most, chunk = (LARGE, _large_chunk(B * N)) if platform() == "gpu" else (TILE, CHUNK)
    size, chunk = min(A, max(1, most // T)), min(chunk, S)
    n = -(-A // size)
    more = n * size - A

    def tiled(x: Array) -> Array:
        """[B, A, ...] -> [n, B, G, ...]; added blocks see nothing but themselves."""
        x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, n, size, *x.shape[2:]).swapaxes(0, 1)

    low = jnp.broadcast_to(starts[:, :, None], (B, A, T))
    if window is not None:
        low = jnp.maximum(low, anchors[:, :, None] + earlier + jnp.arange(T)[None, None] - window + 1)
    per_query = lambda x: jnp.repeat(tiled(x).reshape(n, B, -1), group, axis=-1)
    high = jnp.repeat(anchors, T, axis=1).reshape(B, A, T)
    queries = tiled(q.reshape(B, A, T, K, group, H)).transpose(0, 1, 4, 2, 3, 5, 6)
    tiles = _Tiles(
        queries.reshape(n, B, K, size * T * group, H),
        tiled(k).swapaxes(2, 3),
        tiled(v).swapaxes(2, 3),
        per_query(low),
        per_query(high),
    )
    short = -S % chunk
    cache_k, cache_v = (jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (cache_k, cache_v))
    apart = earlier + jnp.arange(T)[:, None] - jnp.arange(k.shape[3])[None]
    mask = (apart >= 0) if causal else jnp.ones(apart.shape, bool)
    if window is not None:
        mask = mask & (jnp.abs(apart) < window)
    out: Any = _attend(chunk, scale, tiles, cache_k, cache_v, jnp.repeat(mask, group, axis=0))
    out = out.reshape(n, B, K, size, T, group, H).transpose(1, 0, 3, 4, 2, 5, 6)
    return out.reshape(B, n * size, T, N, H)[:, :A]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    chunk: int,
    scale: float,
    tiles: _Tiles,
    cache_k: Float[Array, "B K S H"],
    cache_v: Float[Array, "B K S H"],
    mask: Bool[Array, "Q F"],
) -> Float[Array, "n B K GQ H"]:
    return _forward(chunk, scale, tiles, cache_k, cache_v, mask)[0]


def _forward(chunk, scale, tiles, cache_k, cache_v, mask):
    def one(tile: _Tiles) -> tuple[Array, Array]:
        def visit(i, carry):
            top, total, out = carry
            keys, values, seen = _read(i, chunk, tile, cache_k, cache_v)
            s = jnp.where(seen, product("bkrh,bkch->bkrc", tile.q, keys) * scale, MASKED)
            higher = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
            p, keep = jnp.where(seen, jnp.exp(s - higher), 0), jnp.exp(top - higher)
            out = keep * out + product("bkrc,bkch->bkrh", p.astype(values.dtype), values)
            return higher, keep * total + jnp.sum(p, axis=-1, keepdims=True), out

        shape = tile.q.shape[:-1]
        start = jnp.full((*shape, 1), MASKED), jnp.zeros((*shape, 1)), jnp.zeros(tile.q.shape)
        top, total, out = jax.lax.fori_loop(*_span(tile, chunk, cache_k), visit, start)
        s = _own_scores(tile, mask, scale)
        largest = jnp.max(s, axis=-1, keepdims=True).reshape(top.shape)
        higher = jnp.maximum(top, largest)
        p, keep = jnp.exp(s - higher.reshape(*s.shape[:-1], 1)), jnp.exp(top - higher)
        total = keep * total + jnp.sum(p, axis=-1).reshape(top.shape)
        out = keep * out + product("bkgqt,bkgth->bkgqh", p.astype(tile.v.dtype), tile.v).reshape(out.shape)
        return (out / total).astype(tile.q.dtype), higher + jnp.log(total)

    out, lse = jax.lax.map(one, tiles)
    return out, (tiles, cache_k, cache_v, mask, out, lse)


def _backward(chunk, scale, kept, d_out):
    tiles, cache_k, cache_v, mask, out, lse = kept
    dtype = tiles.q.dtype

    def one(carry, xs):
        tile, d, out, lse = xs
        delta = jnp.sum(d.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
        p = jnp.exp(_own_scores(tile, mask, scale) - lse.reshape(*_own(tile.q, tile).shape[:-1], 1))
        d_own, q_own = _own(d, tile), _own(tile.q, tile)
        d_v = product("bkgqt,bkgqh->bkgth", p.astype(dtype), d_own)
        d_s = (p * scale * (product("bkgqh,bkgth->bkgqt", d_own, tile.v) - _own(delta, tile))).astype(dtype)
        d_k = product("bkgqt,bkgqh->bkgth", d_s, q_own)
        d_q = product("bkgqt,bkgth->bkgqh", d_s, tile.k).reshape(tile.q.shape)

        def visit(i, carry):
            d_q, d_cache_k, d_cache_v = carry
            keys, values, seen = _read(i, chunk, tile, cache_k, cache_v)
            p = jnp.where(seen, jnp.exp(product("bkrh,bkch->bkrc", tile.q, keys) * scale - lse), 0)
            d_s = (p * scale * (product("bkrh,bkch->bkrc", d, values) - delta)).astype(dtype)
            d_cache_k = _add(d_cache_k, i * chunk, product("bkrc,bkrh->bkch", d_s, tile.q))
            d_cache_v = _add(d_cache_v, i * chunk, product("bkrc,bkrh->bkch", p.astype(dtype), d))
            return d_q + product("bkrc,bkch->bkrh", d_s, keys), d_cache_k, d_cache_v

        d_q, *carry = jax.lax.fori_loop(*_span(tile, chunk, cache_k), visit, (d_q, *carry))
        return tuple(carry), tuple(x.astype(dtype) for x in (d_q, d_k, d_v))

    zeros = jnp.zeros(cache_k.shape), jnp.zeros(cache_v.shape)
    (d_cache_k, d_cache_v), (d_q, d_k, d_v) = jax.lax.scan(one, zeros, (tiles, d_out, out, lse))
    d_tiles = _Tiles(d_q, d_k, d_v, None, None)  # type: ignore[arg-type]
    return d_tiles, d_cache_k.astype(cache_k.dtype), d_cache_v.astype(cache_v.dtype), None


_attend.defvjp(_forward, _backward)


def _own(x: Float[Array, "B K GQ X"], tile: _Tiles) -> Float[Array, "B K G Q X"]:
    B, K, G = tile.k.shape[:3]
    return x.reshape(B, K, G, -1, x.shape[-1])


def _own_scores(tile: _Tiles, mask: Bool[Array, "Q F"], scale: float) -> Float[Array, "B K G Q F"]:
    """Scores of every block against itself."""
    scores = product("bkgqh,bkgth->bkgqt", _own(tile.q, tile), tile.k) * scale
    return jnp.where(mask[None, None, None], scores, MASKED)


def _large_chunk(heads: int) -> int:
    """Cache slots per iteration on a GPU, for so many heads of all rows: a power of two, at least `CHUNK`."""
    return max(CHUNK, min(LARGE, 1 << (MOST_SCORES // (4 * heads * LARGE) or 1).bit_length() - 1))


def _span(tile: _Tiles, chunk: int, cache_k: Float[Array, "B K S H"]) -> tuple[Array | int, Array | int]:
    """Chunks of the cache that some query of the tile sees, or all."""
    if platform() == "gpu":
        return 0, cache_k.shape[2] // chunk
    sees = tile.low < tile.high
    first = jnp.min(jnp.where(sees, tile.low, jnp.iinfo(jnp.int32).max)) // chunk
    return first, jnp.maximum(first, (jnp.max(jnp.where(sees, tile.high, 0)) + chunk - 1) // chunk)


def _read(i: Array, chunk: int, tile: _Tiles, cache_k: Array, cache_v: Array) -> tuple[Array, Array, Array]:
    """Keys, values [B, K, C, H] and visibility [B, 1, GQ, C] of the i-th chunk."""
    slots = (i * chunk + jnp.arange(chunk))[None, None]
    seen = (slots >= tile.low[..., None]) & (slots < tile.high[..., None])
    keys, values = (jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=2) for x in (cache_k, cache_v))
    return keys, values, seen[:, None]


def _add(total: Array, start: Array, part: Array) -> Array:
    """Adds `part` to the slots of `total` from `start` on."""
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=2)
