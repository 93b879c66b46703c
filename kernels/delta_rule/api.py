"""The gated delta rule (arXiv 2412.06464): a state per head that fades, and is corrected by every position.

    u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t)      S_t = exp(g_t) S_{t-1} + k_t u_t'      o_t = S_t' q_t

A correction u depends on a position's ancestors alone, so what is accepted of a block is committed from the block's
keys, corrections and decays, with nothing to undo. Everything is float32: errors of a state stay in it.

What is left at t of something that position i added is exp(g_{i+1} + ... + g_t). That sum is taken over its own
positions. As a difference of two sums from the block's beginning it would keep their rounding errors, which are
large where one position in between forgets nearly everything (g = -1e5, say).
Shapes: B rows, T block positions, J committed positions, K key heads, G value heads that share one, H key dim, Hv value
dim.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.mesh import HEADS, on_each_device, split_rows

from ..dispatch import Name, choose
from . import pallas_tpu, reference
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu}


def read_block(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G Hv"],
    g: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    state: Float[Array, "B K G H Hv"],
    visible: Bool[Array, "#B T T"] | None,
    *,
    implementation: Name | None = None,
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G Hv"]]:
    """A block after a state that it only reads.

    Args:
        q, k: of unit length, q scaled.
        g: logarithm of what is kept of the state, not positive; what is below `reference.FORGOTTEN` is like -inf.
        beta: how far a position corrects the state.
        visible: which positions a position sees: its ancestors and itself, which stand in order; None is causal.
        implementation: "xla" or "tpu" (Pallas); see `dispatch`.

    Returns:
        Outputs, and the corrections, which `advance` needs.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    (rows, heads, states), tree = _specs(q.shape[0]), visible is not None
    if visible is None:
        visible = jnp.tril(jnp.ones((1, q.shape[1], q.shape[1]), bool))

    def local(q: Array, k: Array, v: Array, *rest: Array) -> tuple[Array, Array]:
        trial = Trial.of(k, v, tree)
        chosen = choose(IMPLEMENTATIONS, k, v, implementation=implementation, trial=trial, call=read_block)
        return chosen.read_block(q, k, v, *rest)

    specs = (heads, heads, heads, heads, heads, states, rows if visible.shape[0] > 1 else P())
    return on_each_device(local, specs, (heads, heads))(q, k, v, g, beta, state, visible)


def advance(
    state: Float[Array, "B K G H Hv"],
    k: Float[Array, "B J K H"],
    u: Float[Array, "B J K G Hv"],
    g: Float[Array, "B J K G"],
    kept: Int[Array, " B"],
) -> Float[Array, "B K G H Hv"]:
    """The state after the first `kept` of these positions, which follow one another; what is not kept is arbitrary.

    Args:
        k, u, g: keys, corrections and decays of a block, or of a path of its tree, as in `read_block`.
    """
    rows, heads, states = _specs(k.shape[0])
    return on_each_device(reference.advance, (states, heads, heads, heads, rows), states)(state, k, u, g, kept)


def read_prompt(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G Hv"],
    g: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    state: Float[Array, "B K G H Hv"],
    documents: Int[Array, "B T"] | None = None,
    before: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B K G H Hv"]]:
    """Positions one after the other, all of which are kept; those with `g` and `beta` 0 change nothing.

    Args:
        documents: which document of a packed row each position belongs to: a new one begins with an empty state. None
            is one.
        before: the document that the state is of.

    Returns:
        Outputs, and the state after the last position.
    """
    B, T = q.shape[:2]
    documents = jnp.zeros((B, T), jnp.int32) if documents is None else documents
    before = jnp.zeros(B, jnp.int32) if before is None else before
    rows, heads, states = _specs(B)
    specs = (heads, heads, heads, heads, heads, states, rows, rows)
    run = on_each_device(reference.read_prompt, specs, (heads, states))
    return run(q, k, v, g, beta, state, documents, before)


def _specs(rows: int) -> tuple[P, P, P]:
    """How rows, heads of positions and states lie on the mesh."""
    split = split_rows(rows)
    return P(split), P(split, None, HEADS), P(split, HEADS)
