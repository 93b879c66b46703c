"""One verification budget for a batch: which of the proposed nodes of all rows are verified.

A node is worth verifying if it is likely to be reached: to be right, as all its ancestors are. So the likeliest nodes
of all rows are verified, and a row whose drafter is sure of itself gets more positions than another. Every busy row
keeps its anchor, so that each step commits a token of it. What is verified never changes what is committed, only how
much a step commits.

A row's nodes stand best first, so what is verified are the first positions of its block, ancestors among them. On a
mesh, each part of the rows has a budget of its own.
Shapes: B rows, P proposed nodes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.proposal import Block
from dflash_jax.mesh import row_parts
from dflash_jax.packing import Packing


def within_budget(block: Block, remaining: Int[Array, " B"], each: int) -> Packing:
    """The positions to verify: the anchors of all rows that may go on, and the likeliest nodes of all rows.

    Args:
        remaining: tokens that each row may still commit; 0 is an idle row.
        each: positions for each row, on average.

    Raises:
        ValueError: the drafter does not say how likely its nodes are.
    """
    likely, parts, busy = reached(block, remaining), row_parts(), remaining > 0
    B, P = likely.shape
    positions = each * B // parts
    scores, nodes = jax.lax.top_k(likely.reshape(parts, -1), min(positions, B * P // parts))  # of equals the first
    room = positions - jnp.sum(busy.reshape(parts, -1), axis=1, dtype=jnp.int32)
    chosen = (scores > -jnp.inf) & (jnp.arange(scores.shape[1])[None] < room[:, None])
    row = jnp.where(chosen, nodes // P, -1)
    counts = jnp.sum(row[:, None, :] == jnp.arange(B // parts)[None, :, None], axis=-1, dtype=jnp.int32)
    return Packing.of(counts.reshape(B) + busy.astype(jnp.int32), P + 1, each)


def reached(block: Block, remaining: Int[Array, " B"]) -> Float[Array, "B P"]:
    """Log-probability of each node to be reached; minus infinity of what is of no use, or is no log-probability."""
    proposal, P = block.proposal, block.proposal.tokens.shape[1]
    if proposal.scores is None:
        raise ValueError("a budget needs `Proposal.scores`, which this drafter does not give")
    scores = jnp.where(proposal.scores <= 0, proposal.scores, -jnp.inf)
    if proposal.parents is None:  # beyond the end of an answer nothing is committed
        scores = jnp.where(jnp.arange(1, P + 1)[None] < remaining[:, None], jnp.cumsum(scores, axis=1), -jnp.inf)
    return jnp.where(remaining[:, None] > 0, scores, -jnp.inf)
