"""The one attention of the project: drafting, verifying, plain decoding and prefill.

Shapes: B rows, T block positions, S cache slots, N query heads, K key-value heads, H head dim.
"""

from typing import Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import anchored, reference

# "causal" and "full" over the block, or an explicit matrix (row i sees column j) for token trees.
Visible = Literal["causal", "full"] | Bool[Array, "T T"] | Bool[Array, "B T T"]


@runtime_checkable
class Entry(Protocol):
    """Committed keys and values of one layer."""

    k: Float[Array, "R K S H"]
    v: Float[Array, "R K S H"]


def attend(
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    cache: Entry,
    lengths: Int[Array, " B"],
    *,
    visible: Visible,
    window: int | None = None,
    scale: float | None = None,
    row: Int[Array, ""] | int = 0,
    starts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention over committed positions `0..lengths-1` and the block's own keys and values.

    Cache slot s of a row holds the last committed position congruent to s modulo S, so a ring buffer
    of a sliding window and a plain cache are read the same way. Slots never written are never read
    into the result, whatever they hold.

    Args:
        q: rotated queries.
        positions: absolute positions of the block.
        k, v: fresh keys and values of the block.
        cache: committed entry; its row axis R may be larger than B.
        lengths: committed length per row, 0 for an empty row.
        visible: which block keys a block query sees; a query always sees itself.
        window: a query at p sees keys with |p - key position| < window only; None is unbounded.
        scale: of the scores, `H ** -0.5` by default.
        row: first cache row of the block; its B rows are contiguous.
        starts: a query sees no position before this one (packed documents); None is 0.

    Returns:
        The attended values in the dtype of `q`.
    """
    mask = block_mask(visible, positions, window)
    if starts is not None:
        mask = mask & (positions[:, None, :] >= starts[:, :, None])
    return reference.attend(
        q,
        positions,
        k,
        v,
        cache.k,
        cache.v,
        lengths,
        mask,
        window,
        q.shape[-1] ** -0.5 if scale is None else scale,
        row,
        starts,
    )


def attend_anchored(
    q: Float[Array, "B A T N H"],
    k: Float[Array, "B A K T H"],
    v: Float[Array, "B A K T H"],
    cache: Entry,
    anchors: Int[Array, "B A"],
    starts: Int[Array, "B A"],
    *,
    visible: Literal["causal", "full"],
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B A T N H"]:
    """Many blocks of one sequence at once, differentiable: the attention of training.

    Block a of row b stands at positions `anchors[b, a] + 0..T-1` and sees cache positions
    `starts[b, a]..anchors[b, a] - 1`, strictly before its anchor, and itself; never another block. Each block
    gets what `attend` gives it alone with `lengths = anchors`. Memory does not grow with A x S, and where
    anchors are sorted, stretches of the cache that nobody sees cost nothing.

    Args:
        q, k, v: rotated queries, keys and values of the blocks; B rows, A blocks.
        cache: context of each row, position p in slot p; no ring.
        anchors, starts: the interval each block sees; empty where they are equal.
        visible, window, scale: as in `attend`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return anchored.attend(q, k, v, cache.k, cache.v, anchors, starts, visible == "causal", window, scale)


def block_mask(visible: Visible, positions: Int[Array, "B T"], window: int | None) -> Bool[Array, "#B T T"]:
    """The block's own visibility matrix under the window."""
    T = positions.shape[1]
    if isinstance(visible, str):
        mask = jnp.ones((1, T, T), bool) if visible == "full" else jnp.tril(jnp.ones((1, T, T), bool))
    else:
        mask = jnp.broadcast_to(visible, (*((1,) if visible.ndim == 2 else visible.shape[:1]), T, T))
    if window is not None:
        mask = mask & (jnp.abs(positions[:, :, None] - positions[:, None, :]) < window)
    return mask
