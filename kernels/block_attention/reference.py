"""XLA implementation: every platform, and the oracle of the other implementations."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8, Num

from ..dispatch import platform
from ..products import product

# Slots read per iteration: a loop over chunks costs the longest row, not the allocation.
CHUNK = 128
# Bytes that an iteration reads at least on an accelerator. A GPU asks the host before every one and starts several
# kernels in each, which takes tens of microseconds; a TPU takes a few of them to begin.
BYTES = {"gpu": 32 << 20, "tpu": 4 << 20}
MOST = 8192  # slots that it reads
MOST_SCORES = 1 << 27  # held at once
_whole = jax.make_user_context(False)  # a part of every jit cache key
MASKED = -1e30  # finite: infinities would turn into NaN where a query sees nothing of a chunk


def attend(
    q: Float[Array, "B T N H"],
    k: Num[Array, "B K F H"],
    v: Num[Array, "B K F Hv"],
    cache_k: Num[Array, "R _ S _"],
    cache_v: Num[Array, "R K S Hv"] | None,
    lengths: Int[Array, " B"],
    low: Int[Array, "B T"] | None,
    mask: Bool[Array, "#B T F"],
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None = None,
    up: Float[Array, "N U C"] | None = None,
    scales: tuple[Float[Array, "B K F 2"], Float[Array, "R K S 2"]] | None = None,
) -> Float[Array, "B T N Hv"]:
    """See `api.attend`; `low` is the first position a query sees, `mask` what it sees of the block, `scales` those of
    fresh and of cached keys and values that are codes.

    Online softmax: block and first chunk of the cache together, then chunk by chunk.
    """
    B, T, N, H = q.shape
    K, (F, Hv), page = k.shape[1], v.shape[2:], cache_k.shape[2]
    if scales is not None:
        k, v = widened(k, v, scales[0], q.dtype)
    S = page if pages is None else page * pages.shape[1]
    if S == 0 and K > 1 and B * N * T * F > MOST_SCORES:  # a long block alone, as in training: a head at a time
        by_head = lambda x: jnp.moveaxis(x, 1, 0)[:, :, None]
        queries = jnp.moveaxis(q.reshape(B, T, K, N // K, H), 2, 0)
        parts = queries, by_head(k), by_head(v), by_head(cache_k), by_head(cache_v)
        sink = None if sinks is None else sinks.reshape(K, -1)

        def one(head: tuple[tuple[Array, Array, Array, Array, Array], Array | None]) -> Array:
            (q, k, v, cache_k, cache_v), sink = head
            return attend(q, k, v, cache_k, cache_v, lengths, low, mask, scale, softcap, sink, rows)

        return jnp.moveaxis(jax.lax.map(one, (parts, sink)), 0, 2).reshape(B, T, N, Hv)
    width = H if cache_v is None and up is None else H + Hv  # of a slot, for each head
    chunk = min(S, slots_at_once(B * K * width * cache_k.dtype.itemsize, B * N * T))
    if pages is not None:
        chunk = max(1, chunk // page) * page
    queries = N // K * T  # of one key-value head, group by group
    q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, queries, H)

    def read(i: Int[Array, ""] | int) -> tuple[Array, Array, Array]:
        """Keys, values and visibility [B, T, chunk] of the i-th chunk of slots."""
        # The last chunk of a cache that is no multiple of the chunk starts early; its repeats are masked.
        start = jnp.minimum(i * chunk, S - chunk)
        slots = start + jnp.arange(chunk)
        held = slot_positions(slots, lengths, S)
        valid = (held >= 0) & (slots >= i * chunk)[None]
        seen = jnp.broadcast_to(valid[:, None, :], (B, T, chunk))
        if low is not None:
            seen = seen & (held[:, None, :] >= low[:, :, None])
        keys = _slots(cache_k, rows, pages, start, chunk)
        if up is not None:
            keys, values = expand(keys, up, H)
        else:
            values = keys[..., :Hv] if cache_v is None else _slots(cache_v, rows, pages, start, chunk)
        if scales is not None:
            keys, values = widened(keys, values, _slots(scales[1], rows, pages, start, chunk), q.dtype)
        values = jnp.where(valid[:, None, :, None], values, 0)  # unwritten slots may hold anything, even NaN
        return keys, values, seen

    def scores(keys: Float[Array, "B K C H"], seen: Bool[Array, "B T C"]) -> Float[Array, "B K Q C"]:
        s = product("bkrh,bkch->bkrc", q, keys) * scale  # of float32 scores: a scaled query would be rounded again
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        return jnp.where(jnp.tile(seen, (1, N // K, 1))[:, None], s, MASKED)

    def weigh(p: Float[Array, "B K Q C"], values: Float[Array, "B K C Hv"]) -> Float[Array, "B K Q Hv"]:
        return product("bkrc,bkch->bkrh", p.astype(q.dtype), values)

    keys, values, seen = read(0)
    mask = jnp.broadcast_to(mask, (B, T, F))
    s = scores(jnp.concatenate([k, keys], axis=2), jnp.concatenate([mask, seen], axis=2))
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - top)  # 0 where masked: every query sees some fresh key
    total, out = jnp.sum(p, axis=-1, keepdims=True), weigh(p, jnp.concatenate([v, values], axis=2))

    def one_chunk(i, carry):
        top, total, out = carry
        keys, values, seen = read(i)
        s = scores(keys, seen)
        higher = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
        p, keep = jnp.exp(s - higher), jnp.exp(top - higher)
        return higher, keep * total + jnp.sum(p, axis=-1, keepdims=True), keep * out + weigh(p, values)

    if chunk < S:  # without further chunks there is no loop, and the pass is differentiable
        used = jnp.minimum(jnp.max(lengths), S)
        first = jnp.int32(1)
        if low is not None:  # skip what no query sees, unless a ring has wrapped and slots are no positions
            first = jnp.where(jnp.max(lengths) > S, 1, jnp.maximum(1, jnp.min(low) // chunk))
        top, total, out = jax.lax.fori_loop(first, (used + chunk - 1) // chunk, one_chunk, (top, total, out))
    if sinks is not None:
        sink = jnp.repeat(sinks.astype(jnp.float32).reshape(K, N // K), T, axis=1)[None, :, :, None]
        higher = jnp.maximum(top, sink)
        total, out = total * jnp.exp(top - higher) + jnp.exp(sink - higher), out * jnp.exp(top - higher)
    out = (out / total).astype(q.dtype)
    return out.reshape(B, K, N // K, T, Hv).transpose(0, 3, 1, 2, 4).reshape(B, T, N, Hv)


def expand(
    latents: Float[Array, "B 1 S L"], up: Float[Array, "N U C"], head_dim: int
) -> tuple[Float[Array, "B N S H"], Float[Array, "B N S Hv"]]:
    """Keys and values of every head from latents (arXiv 2405.04434, section 2.1).

    Args:
        latents: C normed entries, and the rotated ones that the keys of all heads share.
        up: of each head, what makes the rest of its keys, then what makes its values.
        head_dim: H of the keys.
    """
    normed, rotated = jnp.split(latents[:, 0], [up.shape[2]], axis=-1)
    both = product("bsc,nuc->bnsu", normed, up).astype(latents.dtype)
    keys, values = jnp.split(both, [head_dim - rotated.shape[-1]], axis=-1)
    shared = jnp.broadcast_to(rotated[:, None], (*keys.shape[:3], rotated.shape[-1]))
    return jnp.concatenate([keys, shared], axis=-1), values


def widened(
    k: Int8[Array, "B K S H"], v: Int8[Array, "B K S Hv"], scales: Float[Array, "B K S 2"], dtype: DTypeLike
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
    """What codes of keys and values stand for."""
    of_keys, of_values = jnp.split(scales, 2, axis=-1)
    one = lambda codes, scales: (codes.astype(jnp.float32) * scales).astype(dtype)
    return one(k, of_keys), one(v, of_values)


@contextlib.contextmanager
def whole_caches() -> Iterator[None]:
    """What is traced inside reads a cache in one piece, however long it is; for counting what that costs."""
    with _whole(True):
        yield


def slots_at_once(slot_bytes: int, queries: int) -> int:
    """How many slots of the cache an iteration reads.

    Args:
        slot_bytes: of a slot of all rows, keys and values.
        queries: of all rows and heads, each of which has a score for every slot.
    """
    if _whole.value:
        return 1 << 30
    if platform() not in BYTES:
        return CHUNK
    most = min(BYTES[platform()] // slot_bytes, MOST_SCORES // (4 * queries), MOST)
    return max(CHUNK, 1 << max(0, most.bit_length() - 1))


def _slots(
    cache: Num[Array, "R K S H"],
    rows: Int[Array, " B"] | None,
    pages: Int[Array, "B M"] | None,
    start: Int[Array, ""],
    count: int,
) -> Num[Array, "B K C H"]:
    """So many slots of these rows, or of the pages of rows, from `start` on."""
    _, K, size, H = cache.shape
    if pages is not None:
        of_chunk = jax.lax.dynamic_slice_in_dim(pages, start // size, count // size, axis=1)
        return cache[of_chunk].swapaxes(1, 2).reshape(-1, K, count, H)
    if rows is None:
        return jax.lax.dynamic_slice_in_dim(cache, start, count, axis=2)
    one = lambda row: jax.lax.dynamic_slice(cache, (row, 0, start, 0), (1, K, count, H))
    return jnp.concatenate([one(rows[b]) for b in range(rows.shape[0])])


def slot_positions(slots: Int[Array, " C"], lengths: Int[Array, " B"], S: int) -> Int[Array, "B C"]:
    """Absolute position held by each cache slot, negative where nothing was written yet."""
    last = lengths[:, None] - 1
    return last - (last - slots[None]) % S
