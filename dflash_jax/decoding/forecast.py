"""What a step says of others: of other block shapes, and of positions that a budget left out.

Shapes: B rows, P proposed nodes.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.proposal import Accepted, Block, Proposal


class Limited(struct.PyTreeNode):
    """What a verification budget left out of a step.

    Attributes:
        verified: nodes of each row that were verified.
        following: of a chain: probability of the first one that was not to be right, if those before it are.
    """

    verified: Int[Array, " B"]
    following: Float[Array, " B"]


class Forecast(struct.PyTreeNode):
    """What a step with a tree says of other block shapes.

    Attributes:
        chain: of the tokens of a step, how many of the first ones are the drafter's first choices: what a chain of
            its would have got right.
        nodes: of the tree's best nodes, as many as `sizes_within` names, how many are expected to be right.
    """

    chain: Int[Array, " B"]
    nodes: Float[Array, "B G"]


def forecast(proposal: Proposal, accepted: Accepted) -> Forecast | None:
    """What a ranked tree says of other block shapes."""
    lessons, scores = proposal.lessons, proposal.scores
    if proposal.parents is None or lessons is None or lessons.tokens is None or scores is None:
        return None
    along, placed = lessons.along(accepted.path, proposal.depth)
    assert along.tokens is not None
    first = along.tokens[:, :, 0] == accepted.tokens[:, : proposal.depth]
    first &= jnp.arange(proposal.depth)[None] < accepted.count[:, None]
    first = first if placed is None else first & placed
    chain = jnp.sum(jnp.cumprod(first.astype(jnp.int32), axis=1), axis=1)
    expected, nodes = jnp.cumsum(jnp.exp(scores), axis=1), scores.shape[1]
    ends = [size - 1 for size in sizes_within(nodes)]
    return Forecast(chain, jnp.where(accepted.count[:, None] > 0, expected[:, np.asarray(ends)], 0.0))


def limited(block: Block) -> Limited | None:
    """What a budget left out."""
    if block.packing is None:
        return None
    verified, scores = jnp.maximum(block.packing.counts - 1, 0), block.proposal.scores
    assert scores is not None
    following = jnp.take_along_axis(scores, jnp.minimum(verified, scores.shape[1] - 1)[:, None], axis=1)[:, 0]
    return Limited(verified, jnp.exp(following))


def sizes_within(nodes: int) -> tuple[int, ...]:
    """Numbers of nodes that a tree of so many says something of."""
    return (*(size for size in (1, 3, 5, 7, 15, 31, 63) if size < nodes), nodes)
