"""The one attention of the project: drafting, verifying, autoregressive decoding and prefill.

Shapes: B rows, T queries, F fresh keys of the block, S cache slots, M pages of a row, N query heads, K key-value heads,
H head dim of queries and keys, Hv head dim of values, G queries that share a key-value head (N // K heads at T
positions). A block that attends to itself has T = F.
"""

from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from dflash_jax.mesh import (
    HEADS,
    constrain,
    current_mesh,
    from_owner,
    local_pages,
    local_rows,
    on_each_device,
    split_cache,
    split_evenly,
    split_rows,
)

from ..dispatch import Name, choose, prefers
from . import alone_gpu, mosaic_gpu, pallas_tpu, reference, splash
from .trial import Trial

Visibility = Bool[Array, "T F"] | Bool[Array, "B T F"]  # row i sees column j: token trees

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": mosaic_gpu}
# Of a causal block without a cache; the kernels are called in a way of their own.
ALONE = IMPLEMENTATIONS | {"tpu": splash, "gpu": alone_gpu}
ALONE_CAPPED = ALONE | {"gpu": mosaic_gpu}  # with a softcap
EXPANDING = {"xla": reference}  # of latents that become keys and values
JOINED = 1024  # positions of a block that is made as one array, at most


@runtime_checkable
class KeysAndValues(Protocol):
    """Committed keys and values of one layer; or latents in the place of keys, and no values (see `attend`). Beside
    codes of 8 bits there are `scales` [R, K, S, 2], those of the keys and of the values."""

    @property
    def k(self) -> Num[Array, "R K S H"]: ...
    @property
    def v(self) -> Num[Array, "R K S Hv"] | None: ...


def attend(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    k: Num[Array, "B K F H"],
    v: Num[Array, "B K F Hv"],
    cache: KeysAndValues,
    lengths: Int[Array, " B"],
    *,
    visible: Literal["causal", "full"] | Visibility,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    rows: Int[Array, " B"] | None = None,
    pages: Int[Array, "B M"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    key_positions: Int[Array, "B F"] | None = None,
    up: Float[Array, "N U C"] | None = None,
    scales: Float[Array, "B K F 2"] | None = None,
    joined: mosaic_gpu.Joined | None = None,
    implementation: Name | None = None,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention over committed positions `0..lengths-1` and the block's own keys and values.

    Cache slot s of a row holds the last committed position congruent to s modulo S, so a ring buffer
    of a sliding window and a plain cache are read the same way. Slots never written are never read
    into the result, whatever they hold.

    There may be fewer queries than fresh keys. A drafter that runs several passes over one token each has them: every
    pass sees the fresh keys of the passes before it.

    A cache may have no values. Then these are the first Hv entries of its keys (latent attention, absorbed). With
    `up` it has latents, which become keys and values chunk by chunk (expanded; see `expand`).

    Args:
        q: rotated queries.
        positions: absolute positions of the queries, consecutive in a causal block without a cache.
        k, v: fresh keys and values of the block; `v` may alias `k`.
        cache: committed entry; its row axis R may be larger than B.
        lengths: committed length per row, 0 for an empty row.
        visible: which fresh keys a query sees, always one at least. "causal": the queries stand at the last T of the
            F fresh keys, and each sees the keys up to its own. "full": each sees all.
        window: a query at p sees keys with |p - key position| < window only; None is unbounded.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma); None leaves them.
        sinks: per query head, the score of a key that has no value (gpt-oss).
        scale: of the scores, `H ** -0.5` by default.
        rows: cache row of each row of the block, all different; None if the block has every row, in order. Where a mesh
            splits the cache into parts and B is a multiple of them, so is the block: each part has rows of its own.
        pages: of a cache in pages, in the place of `rows`: which of the cache's rows hold the first S positions of each
            row of the block, the next S, and so on. Pages beyond the row's length may be any.
        starts: a query sees no position before this one, the first of its document (packed documents, to which
            each position of the block belongs likewise); None is 0.
        key_positions: absolute positions of the fresh keys; None where they are those of the queries. Only a window and
            `starts` ask for them.
        up: what makes keys and values of every query head from what the cache holds; fresh ones are made already.
        scales: of fresh keys and values that are codes, as those of the cache are.
        joined: the same queries, keys and values `together`, if there is such a thing.
        implementation: "xla", "tpu" (Pallas) or "gpu" (Pallas on Hopper); see `dispatch`.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why. Or there are more
            queries than fresh keys, or fewer and `key_positions` is missing; or codes have no `scales`.
    """
    if q.shape[1] > k.shape[2]:
        raise ValueError(f"there must be at least as many fresh keys as queries, got {k.shape[2]} for {q.shape[1]}")
    at = positions if key_positions is None else key_positions
    if at.shape[1] != k.shape[2] and not (window is None and starts is None):
        raise ValueError("with fewer queries than fresh keys, a window and `starts` need `key_positions`")
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    cache_k, cache_v, cache_scales = cache.k, cache.v, getattr(cache, "scales", None)
    if (scales is None) != (cache_scales is None):
        raise ValueError("int8 keys and values need scales: `scales` for fresh ones, and a cache that has `scales`")
    if up is not None and cache_k.shape[2] == 0:  # nothing to expand
        cache_k, cache_v = (jnp.zeros((*cache_k.shape[:1], *x.shape[1:2], 0, x.shape[3]), x.dtype) for x in (k, v))
        up = None
    if up is not None and pages is None:  # pages are not split over heads (`cache.init_cache`)
        cache_k, rows = _on_all_heads(cache_k, rows, q.shape[0])
    whole = rows is None and pages is None
    cache_rows, block_rows, cache_heads, heads = _axes(cache_k, q.shape[0], whole=whole, latent=up is not None)
    queries, keys = P(block_rows, None, heads), P(block_rows, heads and split_evenly(k.shape[1], heads))
    by_row, by_head = P(block_rows), P(heads)
    kind = visible if isinstance(visible, str) else "one for each row" if visible.ndim == 3 else "one for all rows"
    options = {"visible": kind, "window": window, "softcap": softcap, "scale": factor, "apart": cache_v is not None}
    given = {name: x is not None for name, x in (("sinks", sinks), ("starts", starts), ("joined", joined))}
    given["codes"] = scales is not None
    trial = partial(Trial.of, pages=None if pages is None else pages.shape[1], **given, **options)
    chosen_for = partial(choose, implementation=implementation, call=attend)
    alone = isinstance(visible, str) and visible == "causal" and cache_k.shape[2] == 0 and key_positions is None
    among = ALONE if softcap is None else ALONE_CAPPED
    if alone and (chosen := chosen_for(among, q, v, cache_k, cache_v, trial=trial(q, v, cache_k))) in (
        splash,
        alone_gpu,
    ):
        begins = None if starts is None else jnp.maximum(starts - positions[:, :1], 0)  # of documents in the block
        by_kernel = partial(chosen.attend, window=window, scale=factor, softcap=softcap)
        return on_each_device(by_kernel, (queries, keys, keys, by_row, by_head), queries)(q, k, v, begins, sinks)
    mask = block_mask(visible, k.shape[2], positions, at, window)
    low = starts
    if starts is not None:
        mask = mask & (at[:, None, :] >= starts[:, :, None])
    if window is not None:
        low = jnp.maximum(0 if low is None else low, positions - window + 1)
    serving = IMPLEMENTATIONS if up is None else EXPANDING

    def local(q, k, v, cache_k, cache_v, scales, cache_scales, up, lengths, low, mask, sinks, rows, pages):
        arrays = q, v, cache_k, cache_v
        chosen = chosen_for(serving, *arrays, trial=trial(*arrays[:3]))
        rows, here = local_rows(rows, cache_k.shape[0], cache_rows)
        if pages is not None:
            pages, here = local_pages(pages, cache_k.shape[0], cache_rows)
        lengths = jnp.where(here, lengths, 0)
        more: dict[str, Any] = {} if scales is None else {"scales": (scales, cache_scales)}
        if up is not None:
            more["up"] = up
        if chosen is mosaic_gpu:
            more["joined"] = joined
        out = chosen.attend(q, k, v, cache_k, cache_v, lengths, low, mask, factor, softcap, sinks, rows, pages, **more)
        return from_owner(out, here, _without(cache_rows, block_rows))

    masks, caches = P(block_rows if mask.shape[0] > 1 else None), P(cache_rows, cache_heads)
    block, cached = (queries, keys, keys), (caches, caches)
    specs = (*block, *cached, keys, caches, by_head, by_row, by_row, masks, by_head, by_row, by_row)
    run = on_each_device(local, specs, queries)
    return run(q, k, v, cache_k, cache_v, scales, cache_scales, up, lengths, low, mask, sinks, rows, pages)


def together(
    q: Float[Array, "B T N H"], k: Float[Array, "B K F H"], v: Float[Array, "B K F Hv"], cache: KeysAndValues
) -> mosaic_gpu.Joined | None:
    """A block after this cache as the kernel for GPUs reads it at once. None where that does not run, or reads the
    block in parts; and of a long prompt, whose queries would be kept with its keys and values."""
    if not prefers("gpu") or current_mesh() is not None or mosaic_gpu.declines(q, v, cache.k, cache.v):
        return None
    if q.shape[0] * q.shape[1] > JOINED or (joined := mosaic_gpu.join(q, k, v)) is None:
        return None
    return jax.lax.optimization_barrier(joined)


_Axes = tuple[str, ...] | None  # of a mesh, over which something is split


def _axes(
    cache_k: Num[Array, "R _ S _"], count: int, *, whole: bool, latent: bool
) -> tuple[_Axes, _Axes, _Axes, _Axes]:
    """The mesh axes of the cache's rows, the block's rows, the cache's heads and the queries' heads.

    Args:
        count: rows of the block.
        whole: whether they are those of the cache, in order.
        latent: whether the cache holds latents that each device makes keys and values of its own heads from.
    """
    cache_rows, cache_heads = (split_rows(cache_k.shape[0]), None) if latent else split_cache(*cache_k.shape[:2])
    block_rows = cache_rows if whole else split_rows(count) if cache_rows else None
    return cache_rows, block_rows, cache_heads, _without(HEADS, cache_rows) or None


def _on_all_heads(
    latents: Float[Array, "R 1 S L"], rows: Int[Array, " B"] | None, count: int
) -> tuple[Float[Array, "_ 1 S L"], Int[Array, " B"] | None]:
    """Latents where every device of the axes that split heads has them, and which of them belong to the block's rows.

    If the mesh splits the cache's rows over these axes, too, they are those of the `count` rows alone.
    """
    (cache_rows, _), block_rows = split_cache(*latents.shape[:2]), split_rows(count)
    if not set(HEADS) & set(cache_rows or ()):
        return latents, rows
    if rows is None:
        return constrain(latents, P(block_rows)), None

    def local(latents, rows):
        at, here = local_rows(rows, latents.shape[0], cache_rows)
        return from_owner(latents[at], here, _without(cache_rows, block_rows))

    return on_each_device(local, (P(cache_rows), P(block_rows)), P(block_rows))(latents, rows), None


def _without(axes: _Axes, others: _Axes) -> tuple[str, ...]:
    return tuple(axis for axis in axes or () if axis not in (others or ()))


def block_mask(
    visible: Literal["causal", "full"] | Visibility,
    fresh: int,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B _"],
    window: int | None,
) -> Bool[Array, "#B T F"]:
    """Which of the `fresh` keys each query sees, under the window; only that looks at `key_positions`."""
    T = positions.shape[1]
    if isinstance(visible, str):
        seen = jnp.ones((1, T, fresh), bool)
        mask = seen if visible == "full" else jnp.tril(seen, fresh - T)
    else:
        mask = jnp.broadcast_to(visible, (*((1,) if visible.ndim == 2 else visible.shape[:1]), T, fresh))
    if window is not None:
        mask = mask & (jnp.abs(positions[:, :, None] - key_positions[:, None, :]) < window)
    return mask
