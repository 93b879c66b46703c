"""The attention of training.

Shapes: B rows, A blocks, T queries and F >= T keys of a block, S context slots, N query heads, K key-value heads, H
head dim.
"""

from typing import Literal

from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dflash_jax.mesh import HEADS, ROWS, on_each_device

from ..dispatch import Name, choose
from ..interval_attention import mosaic_gpu, pallas_tpu
from . import blocks, reference
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": mosaic_gpu}


def attend_anchored(
    q: Float[Array, "B A T N H"],
    k: Float[Array, "B A K F H"],
    v: Float[Array, "B A K F H"],
    context_k: Float[Array, "B K S H"],
    context_v: Float[Array, "B K S H"],
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B A"],
    *,
    visible: Literal["causal", "full"],
    window: int | None = None,
    scale: float | None = None,
    implementation: Name | None = None,
) -> Float[Array, "B A T N H"]:
    """Many blocks of one sequence at once, differentiable in all arrays but the bounds.

    The keys of block a of row b stand at positions `anchors[b, a] + 0..F-1`, its queries at the last T of them. A block
    sees context positions `starts[b, a]..anchors[b, a] - 1`, strictly before its anchor, and itself; never another
    block. Each gets what `block_attention.attend` gives it alone with `lengths = anchors`. Memory does not grow with
    A x S, and where anchors are sorted, stretches of the context that nobody sees cost nothing.

    Args:
        q, k, v: rotated queries, keys and values of the blocks.
        context_k, context_v: context of each row, position p in slot p; no ring.
        anchors, starts: the interval each block sees; empty where they are equal.
        visible: which positions of its own block a query sees.
        window: a query at p sees keys with |p - key position| < window only; None is unbounded.
        scale: of the scores, `H ** -0.5` by default.
        implementation: "xla", "tpu" (Pallas) or "gpu" (Pallas on Hopper); see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    how = {"causal": visible == "causal", "window": window, "scale": factor}

    def local(q, k, v, context_k, *rest):
        trial = Trial.of(q, k, context_k, visible=visible, window=window, scale=factor)
        asked = {"implementation": implementation, "trial": trial, "call": attend_anchored}
        chosen = choose(IMPLEMENTATIONS, q, k, context_k, **asked)
        arrays = q, k, v, context_k, *rest
        return reference.attend(*arrays, **how) if chosen is reference else blocks.attend(chosen, *arrays, **how)

    queries, keys = P(ROWS, None, None, HEADS), P(ROWS, None, HEADS)
    context = P(ROWS, HEADS)
    run = on_each_device(local, (queries, keys, keys, context, context, P(ROWS), P(ROWS)), queries)
    return run(q, k, v, context_k, context_v, anchors, starts)
