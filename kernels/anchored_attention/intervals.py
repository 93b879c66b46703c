"""The attention of training as kernels compute it: every query sees two intervals of one array of keys.

The array holds a row's context and then the keys of all its blocks. What a query sees of the context is an interval,
and so is what it sees of its own block, causal or not and under a window. A kernel therefore need know neither blocks
nor documents nor windows: where a query's intervals begin and end says all.

Shapes: B rows, R queries of a row (A blocks of T, and more at the end), N query heads, K key-value heads, S keys, H
head dim.
"""

from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ROUNDED = 128  # queries and keys are filled up to multiples of it


class Kernel(Protocol):
    """What a kernel computes. `bounds` [B, 2, 2, R] are first and end of each query's interval of context, then of
    its interval of blocks; an empty one has its end at its first or before. `context` keys are of the first kind."""

    def forward(
        self,
        q: Float[Array, "B R N H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S H"],
        bounds: Int[Array, "B 2 2 R"],
        *,
        context: int,
        scale: float,
    ) -> tuple[Float[Array, "B R N H"], Float[Array, "B N R"]]:
        """The attended values, and the log-sum-exp of the scores in float32; zeros where a query sees nothing."""
        ...

    def backward(
        self,
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
        """The gradients of queries, keys and values. `delta` is each query's output times its gradient, summed."""
        ...


class Options(NamedTuple):
    """What of a call is no array: the kernel, the keys of context, and the scale of the scores."""

    kernel: Kernel
    context: int
    scale: float


def attend(
    kernel: Kernel,
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
    more, short, rest = -(A * T) % ROUNDED, -S % ROUNDED, -(A * F) % ROUNDED

    def together(context: Array, blocks: Array) -> Array:
        """Context and blocks in one array, the blocks from a multiple of `ROUNDED` on."""
        own = blocks.swapaxes(1, 2).reshape(B, -1, A * F, H)
        zeros = lambda count: [jnp.zeros((*own.shape[:2], count, H), own.dtype)] if count else []
        return jnp.concatenate([context, *zeros(short), own, *zeros(rest)], axis=2)

    bounds = jnp.pad(intervals(anchors, starts, T, F, S, causal, window), ((0, 0), (0, 0), (0, 0), (0, more)))
    queries = jnp.pad(q.reshape(B, A * T, N, H), ((0, 0), (0, more), (0, 0), (0, 0)))
    out = _attend(Options(kernel, S + short, scale), queries, together(context_k, k), together(context_v, v), bounds)
    return out[:, : A * T].reshape(q.shape)


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: Options,
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    bounds: Int[Array, "B 2 2 R"],
) -> Float[Array, "B R N H"]:
    return _forward(options, q, k, v, bounds)[0]


def _forward(options, q, k, v, bounds):
    out, lse = options.kernel.forward(q, k, v, bounds, context=options.context, scale=options.scale)
    return out, (q, k, v, bounds, out, lse)


def _backward(options, kept, d_out):
    *arrays, out, lse = kept
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    where = {"context": options.context, "scale": options.scale}
    return *options.kernel.backward(*arrays, lse, delta, d_out, **where), None


_attend.defvjp(_forward, _backward)


def seen_chunks(bounds: Int[Array, "B 2 2 R"], tile: int, chunk: int) -> Int[Array, "B 2 _ 2"]:
    """Of each tile of queries, the first chunk of keys that some query of it sees in each interval, and how many."""
    low, end = _of_tiles(bounds, tile)
    first = jnp.where(low < end, low // chunk, 0)
    return jnp.stack([first, jnp.where(low < end, -(-end // chunk) - first, 0)], axis=-1)


def seeing_tiles(bounds: Int[Array, "B 2 2 R"], tile: int, chunk: int, context: int, keys: int) -> Int[Array, "B _ 2"]:
    """Of each chunk of keys, the first tile of queries some of which sees some of it, and how many up to the last."""
    low, end = (x[:, :, None] for x in _of_tiles(bounds, tile))
    begins = jnp.arange(0, keys, chunk)[None, :, None]
    sees = (low < end) & (low < (begins + chunk)[None]) & (end > begins[None])  # [B, 2, chunks, tiles]
    sees = jnp.where(begins < context, sees[:, 0], sees[:, 1])
    first, last = jnp.argmax(sees, axis=-1), sees.shape[-1] - jnp.argmax(sees[..., ::-1], axis=-1)
    return jnp.stack([first, jnp.where(jnp.any(sees, axis=-1), last - first, 0)], axis=-1).astype(jnp.int32)


def _of_tiles(bounds: Int[Array, "B 2 2 R"], tile: int) -> tuple[Int[Array, "B 2 _"], Int[Array, "B 2 _"]]:
    """Where the intervals of a tile's queries begin and end; what ends before it begins is not seen."""
    low, end = jnp.moveaxis(bounds.reshape(*bounds.shape[:3], -1, tile), 2, 0)
    sees: Bool[Array, "B 2 _ tile"] = low < end
    return jnp.min(jnp.where(sees, low, jnp.iinfo(jnp.int32).max), axis=-1), jnp.max(jnp.where(sees, end, 0), axis=-1)
