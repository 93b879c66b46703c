"""One verification budget for a batch: which of the proposed nodes of all rows are verified.

A node is worth verifying if it is likely to be reached: to be right, as all its ancestors are. So the likeliest nodes
of all rows are verified, and a row whose drafter is sure of itself gets more positions than another. Every busy row
keeps its anchor, so that each step commits a token of it. What is verified never changes what is committed, only how
much a step commits.

A row's nodes stand best first, so what is verified are the first positions of its block, ancestors among them.
Shapes: B rows, T block positions, p parts of a mesh, each of which has a budget for its own rows.
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
    B, T = block.tokens.shape
    likely, parts = reached(block, remaining), row_parts()
    scores, places = jax.lax.top_k(likely.reshape(parts, -1), each * B // parts)  # of equals the first
    row = jnp.where(scores > -jnp.inf, places // T, -1)
    counts = jnp.sum(row[:, None, :] == jnp.arange(B // parts)[None, :, None], axis=-1, dtype=jnp.int32)
    return Packing.of(counts.reshape(B), T, each)


def reached(block: Block, remaining: Int[Array, " B"]) -> Float[Array, "B T"]:
    """Log-probability of each position to be reached; infinity of an anchor, minus infinity of what is of no use. It
    falls from position to position."""
    proposal, T = block.proposal, block.tokens.shape[1]
    if proposal.scores is None:
        raise ValueError("a budget needs `Proposal.scores`, which this drafter does not give")
    scores = proposal.scores
    if proposal.parents is None:  # beyond the end of an answer nothing is committed
        scores = jnp.where(jnp.arange(1, T)[None] < remaining[:, None], jnp.cumsum(scores, axis=1), -jnp.inf)
    scores = jnp.pad(scores, ((0, 0), (1, 0)), constant_values=jnp.inf)
    return jnp.where(remaining[:, None] > 0, scores, -jnp.inf)
