"""TPU implementation for a block that stands alone: jax's splash attention, forward and backward.

So are packed rows attended where a training pass takes them whole. A prompt in decoding does not come here: its chunk
shares one softmax with a ragged cache, which `pallas_tpu` reads in the same pass.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..products import precision

LANES = 128
TILES = (512, 256, 128)  # queries and keys of a grid step
BLOCKS = """
    block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq
""".split()


def declines(
    q: Float[Array, "B T N H"],
    v: Float[Array, "B K F Hv"],
    cache_k: Float[Array, "R K 0 H"],
    cache_v: Float[Array, "R K 0 Hv"] | None,
) -> str | None:
    """Why these shapes are not served, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16) or q.dtype != v.dtype:
        return f"queries in {q.dtype}, values in {v.dtype}; it supports float32 and bfloat16"
    if q.shape[1] != v.shape[2]:
        return f"{q.shape[1]} queries and {v.shape[2]} keys; it supports as many of one as of the other"
    if q.shape[1] % LANES:
        return f"{q.shape[1]} positions; it supports multiples of {LANES}"
    if q.shape[-1] % LANES or v.shape[-1] % LANES:
        return f"head dims {q.shape[-1]} and {v.shape[-1]}; it supports multiples of {LANES}"
    return None


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"],
    starts: Int[Array, "B T"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T N Hv"]:
    """Causal attention of consecutive positions to each other; arguments as in `api.attend`, but that `starts` are
    places in the block."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N = q.shape[1:3]
    tile = next(size for size in TILES if T % size == 0)
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(**dict.fromkeys(BLOCKS, tile)),  # pyright: ignore[reportArgumentType]
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
    )

    def one(sinks: Array | None, row: tuple[Array, Array, Array, Array | None]) -> Array:
        q, k, v, starts = row
        # Where a document starts tells it from all others of the row.
        segments = None if starts is None else splash.SegmentIds(starts, starts)
        return jnp.asarray(kernel(q, k, v, segments, sinks))  # the output alone: no residuals are asked for

    def rows(q: Array, k: Array, v: Array, starts: Array | None, sinks: Array | None) -> Array:
        # It knows no scale: of narrow queries the scaled ones are rounded once more, unless by a power of two.
        scaled = (q * scale).astype(q.dtype).swapaxes(1, 2)
        return jax.lax.map(partial(one, sinks), (scaled, k, v, starts)).swapaxes(1, 2)

    return (_exact(rows) if precision(q) else rows)(q, k, v, starts, sinks)


def _exact(function: Callable) -> Callable:
    """`function` with products exact to float32, also in its gradient. Splash names no precision, and so takes what is
    set where its passes are traced; the backward one is traced much later than the call."""
    exact = partial(jax.default_matmul_precision, "highest")

    @jax.custom_vjp
    def call(*arrays):
        with exact():
            return function(*arrays)

    def forward(*arrays):
        with exact():
            return jax.vjp(function, *arrays)

    def backward(pull, gradient):
        with exact():
            return pull(gradient)

    call.defvjp(forward, backward)
    return call
