"""Implementation for Hopper for a block that stands alone: every query sees one interval of the block's keys.

So are packed rows attended where a training pass takes them whole.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import interval_attention
from ..interval_attention import mosaic_gpu


def declines(
    q: Float[Array, "B T N H"],
    v: Float[Array, "B K F Hv"],
    cache_k: Float[Array, "R K 0 H"],
    cache_v: Float[Array, "R K 0 Hv"] | None,
) -> str | None:
    """Why these shapes are not served, or None."""
    if q.shape[-1] != v.shape[-1]:
        return f"keys of {q.shape[-1]} entries and values of {v.shape[-1]}; it supports as many of one as of the other"
    if q.shape[1] != v.shape[2]:
        return f"{q.shape[1]} queries and {v.shape[2]} keys; it supports as many of one as of the other"
    return mosaic_gpu.declines(q, v)


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    starts: Int[Array, "B T"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: None,
) -> Float[Array, "B T N H"]:
    """Causal attention of consecutive positions to each other; see `splash.attend`."""
    B, T, at = *q.shape[:2], jnp.arange(q.shape[1])[None]
    low = jnp.zeros((B, T), jnp.int32) if starts is None else starts
    if window is not None:
        low = jnp.maximum(low, at - window + 1)
    interval, none = jnp.stack([low, jnp.broadcast_to(at + 1, (B, T))], axis=1), jnp.zeros((B, 2, T), jnp.int32)
    bounds = jnp.stack([interval, none], axis=1).astype(jnp.int32)
    keys = T + -T % interval_attention.ROUNDED
    out, lse = interval_attention.attend(mosaic_gpu, q, k, v, bounds, context=keys, scale=scale)
    if sinks is None:
        return out
    kept = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, :, None])  # of the sum of exponentials with the sink
    return (out.astype(jnp.float32) * kept.swapaxes(1, 2)[..., None]).astype(q.dtype)
