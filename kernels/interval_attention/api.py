"""Attention of many queries to few keys each, forward and backward: every query sees two intervals of the keys.

The attention of training and that of a row alone are both of this form, and the kernels of this folder compute it. They
need know neither blocks nor documents nor windows: where a query's intervals begin and end says all.

Shapes: B rows, R queries of a row, N query heads, K key-value heads, S keys, H head dim.
"""

from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ROUNDED = 128  # queries and keys are filled up to multiples of it
MASKED = -1e30  # the score of a key that is not seen, and what is left of no score


class Kernel(Protocol):
    """What a kernel computes. Arguments are as in `attend`; numbers of queries and keys are multiples of `ROUNDED`."""

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
        """The gradients of queries, keys and values.

        `delta` is each query's output times its gradient, summed; `lse` is beyond any score where a query sees nothing.
        """
        ...


class Options(NamedTuple):
    """What of a call is no array; see `attend`."""

    kernel: Kernel
    context: int
    scale: float


def attend(
    kernel: ModuleType,
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    bounds: Int[Array, "B 2 2 R"],
    *,
    context: int,
    scale: float,
) -> tuple[Float[Array, "B R N H"], Float[Array, "B N R"]]:
    """Attention of queries to their intervals, differentiable in queries, keys and values.

    Args:
        kernel: a module that is a `Kernel`.
        bounds: first and end of each query's interval among the first `context` keys, then of that among the others.
            Where the end is not beyond the first, the interval is empty.
        context: a multiple of `ROUNDED`.
        scale: of the scores.

    Returns:
        The attended values, zeros where a query sees nothing, and the float32 log-sum-exp of its scores.
    """
    R, S = q.shape[1], k.shape[2]
    more, short = -R % ROUNDED, -S % ROUNDED
    if more:
        q = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
        bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, 0), (0, more)))
    if short:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (k, v))
    options = Options(cast(Kernel, kernel), context, scale)
    out, lse = cast(tuple[Array, Array], _attend(options, q, k, v, bounds))
    return out[:, :R], lse[:, :, :R]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: Options,
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    bounds: Int[Array, "B 2 2 R"],
) -> tuple[Float[Array, "B R N H"], Float[Array, "B N R"]]:
    return options.kernel.forward(q, k, v, bounds, context=options.context, scale=options.scale)


def _forward(options, q, k, v, bounds):
    out, lse = options.kernel.forward(q, k, v, bounds, context=options.context, scale=options.scale)
    return (out, lse), (q, k, v, bounds, out, lse)


def _backward(options, kept, gradients):
    *arrays, out, lse = kept
    d_out, d_lse = gradients
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - d_lse
    where = {"context": options.context, "scale": options.scale}
    lse = jnp.where(lse > MASKED / 2, lse, -MASKED)
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
