"""The attention of training as kernels compute it: what a query sees of its context and of its block are intervals.

The keys are a row's context and then those of all its blocks, in one array. Shapes as in `api`.
"""

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import interval_attention
from ..interval_attention import ROUNDED


def attend(
    kernel: ModuleType,
    q: Float[Array, "B A T N H"],
    k: Float[Array, "B A K F H"],
    v: Float[Array, "B A K F H"],
    context_k: Float[Array, "B K S H"],
    context_v: Float[Array, "B K S H"],
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B A"],
    causal: bool,
    window: int | None,
    scale: float,
) -> Float[Array, "B A T N H"]:
    """See `api.attend_anchored`."""
    B, A, T, N, H = q.shape
    F, S = k.shape[3], context_k.shape[2]
    filled = S + -S % ROUNDED

    def together(context: Array, blocks: Array) -> Array:
        own = blocks.swapaxes(1, 2).reshape(B, -1, A * F, H)
        zeros = jnp.zeros((*own.shape[:2], filled - S, H), own.dtype)
        return jnp.concatenate([context, zeros, own], axis=2)

    arrays = q.reshape(B, A * T, N, H), together(context_k, k), together(context_v, v)
    bounds = intervals(anchors, starts, T, F, S, causal, window)
    out, _ = interval_attention.attend(kernel, *arrays, bounds, context=filled, scale=scale)
    return out.reshape(q.shape)


def intervals(
    anchors: Int[Array, "B A"], starts: Int[Array, "B A"], T: int, F: int, S: int, causal: bool, window: int | None
) -> Int[Array, "B 2 2 _"]:
    """What every query sees: of the context, and of the blocks, which begin at the next multiple of `ROUNDED`.

    Args:
        T, F, S: queries and keys of a block, keys of context.
    """
    (B, A), at = anchors.shape, (F - T + jnp.arange(T))[None, None]  # of the queries among the keys of their block
    anchors, starts, own = anchors[:, :, None], starts[:, :, None], (F * jnp.arange(A))[None, :, None]
    first, end = jnp.zeros_like(at), at + 1 if causal else jnp.full_like(at, F)
    if window is not None:
        first, end = jnp.maximum(first, at - window + 1), jnp.minimum(end, at + window)
        starts = jnp.maximum(starts, anchors + at - window + 1)
    before = S + -S % ROUNDED
    of_block = before + own + first, before + own + end
    ends = [jnp.broadcast_to(x, (B, A, T)) for x in (starts, jnp.minimum(anchors, S), *of_block)]
    return jnp.stack(ends, axis=1).reshape(B, 2, 2, A * T).astype(jnp.int32)
