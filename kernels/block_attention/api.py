"""The one attention of the project: drafting, verifying, plain decoding and prefill.

Shapes: B rows, T queries, F fresh keys of the block, S cache slots, N query heads, K key-value heads, H head dim of
queries and keys, Hv head dim of values, G queries that share a key-value head (N // K heads at T positions). A block
that attends to itself has T = F.
"""

from functools import partial
from typing import Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.mesh import HEADS, from_owner, local_rows, on_each_device, split_rows

from ..dispatch import Name, choose
from . import mosaic_gpu, pallas_tpu, reference, splash
from .trial import Trial

Visibility = Bool[Array, "T F"] | Bool[Array, "B T F"]  # row i sees column j: token trees

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": mosaic_gpu}
ALONE = IMPLEMENTATIONS | {"tpu": splash}  # of a causal block without a cache; splash is called in a way of its own


@runtime_checkable
class KeysAndValues(Protocol):
    """Committed keys and values of one layer."""

    @property
    def k(self) -> Float[Array, "R K S H"]: ...
    @property
    def v(self) -> Float[Array, "R K S Hv"]: ...


def attend(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    k: Float[Array, "B K F H"],
    v: Float[Array, "B K F Hv"],
    cache: KeysAndValues,
    lengths: Int[Array, " B"],
    *,
    visible: Literal["causal", "full"] | Visibility,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    rows: Int[Array, " B"] | None = None,
    starts: Int[Array, "B T"] | None = None,
    key_positions: Int[Array, "B F"] | None = None,
    implementation: Name | None = None,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention over committed positions `0..lengths-1` and the block's own keys and values.

    Cache slot s of a row holds the last committed position congruent to s modulo S, so a ring buffer
    of a sliding window and a plain cache are read the same way. Slots never written are never read
    into the result, whatever they hold.

    There may be fewer queries than fresh keys. A drafter that runs several passes over one token each has them: every
    pass sees the fresh keys of the passes before it.

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
        starts: a query sees no position before this one, the first of its document (packed documents, to which
            each position of the block belongs likewise); None is 0.
        key_positions: absolute positions of the fresh keys; None where they are those of the queries. Only a window and
            `starts` ask for them.
        implementation: "xla", "tpu" (Pallas) or "gpu" (Pallas on Hopper); see `dispatch`.

    Returns:
        The attended values in the dtype of `q`.

    Raises:
        ValueError: the named implementation does not serve this case; the message says why. Or there are more
            queries than fresh keys, or fewer and `key_positions` is missing.
    """
    if q.shape[1] > k.shape[2]:
        raise ValueError(f"there must be at least as many fresh keys as queries, got {k.shape[2]} for {q.shape[1]}")
    at = positions if key_positions is None else key_positions
    if at.shape[1] != k.shape[2] and not (window is None and starts is None):
        raise ValueError("with fewer queries than fresh keys, a window and `starts` need `key_positions`")
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    held, split = split_rows(cache.k.shape[0]), split_rows(q.shape[0])
    split = split if held else None
    queries, keys = P(split, None, HEADS), P(split, HEADS)
    kind = visible if isinstance(visible, str) else "one for each row" if visible.ndim == 3 else "one for all rows"
    options = {"visible": kind, "window": window, "softcap": softcap, "scale": factor}
    trial = partial(Trial.of, sinks=sinks is not None, starts=starts is not None, **options)
    if (
        isinstance(visible, str)
        and visible == "causal"
        and cache.k.shape[2] == 0
        and key_positions is None
        and choose(ALONE, q, v, cache.k, implementation=implementation, trial=trial(q, v, cache.k)) is splash
    ):
        alone = partial(splash.attend, window=window, scale=factor, softcap=softcap)
        return on_each_device(alone, (queries, keys, keys, P(split), P(HEADS)), queries)(q, k, v, starts, sinks)
    mask = block_mask(visible, k.shape[2], positions, at, window)
    low = starts
    if starts is not None:
        mask = mask & (at[:, None, :] >= starts[:, :, None])
    if window is not None:
        low = jnp.maximum(0 if low is None else low, positions - window + 1)

    def local(q, k, v, cache_k, cache_v, lengths, low, mask, sinks, rows):
        chosen = choose(IMPLEMENTATIONS, q, v, cache_k, implementation=implementation, trial=trial(q, v, cache_k))
        rows, here = local_rows(rows, cache_k.shape[0], held)
        lengths = jnp.where(here, lengths, 0)
        out = chosen.attend(q, k, v, cache_k, cache_v, lengths, low, mask, factor, softcap, sinks, rows)
        return from_owner(out, here) if held and not split else out

    masks = P(split if mask.shape[0] > 1 else None)
    specs = (queries, keys, keys, P(held, HEADS), P(held, HEADS), P(split), P(split), masks, P(HEADS), P(split))
    run = on_each_device(local, specs, queries)
    return run(q, k, v, cache.k, cache.v, lengths, low, mask, sinks, rows)


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
