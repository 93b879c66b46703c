"""What a drafter proposes, and what of it is accepted: a chain or a tree of tokens after the anchor.

Shapes: B rows, P proposed nodes, T = P + 1 block positions (the anchor is position 0), J committed positions.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.calibration import Lessons
from dflash_jax.packing import Packing


class Proposal(struct.PyTreeNode):
    """Tokens proposed for the positions after the anchor; they decide how much is accepted, never what.

    Attributes:
        tokens: of the nodes. Those of a chain follow one another.
        parents: of a tree: the block position of each node's parent, 0 for the anchor and i + 1 for node i. A parent
            stands before its children. None is a chain, which needs no masks and no gathers.
        max_depth: of a tree: the longest path has so many nodes. Not used for a chain.
        scores: of a tree, the best node first: log-probability of each to be right, as its ancestors are. Of a chain:
            that of each to be right if those before it are. None if they are not known.
        lessons: what verification can teach of the drafter (see `calibration`); None is nothing.
    """

    tokens: Int[Array, "B P"]
    parents: Int[Array, "B P"] | None = None
    max_depth: int = struct.field(pytree_node=False, default=0)
    scores: Float[Array, "B P"] | None = None
    lessons: Lessons | None = None

    @property
    def depth(self) -> int:
        """Nodes of the longest path; one more token can be committed."""
        return self.tokens.shape[1] if self.parents is None else self.max_depth


class Tree(NamedTuple):
    """How the block positions of a tree lie to each other.

    Attributes:
        depth: of each position; 0 for the anchor.
        ancestors: whether position j is i itself or lies on the path from the anchor to it.
    """

    depth: Int[Array, "B T"]
    ancestors: Bool[Array, "B T T"]


class Block(NamedTuple):
    """What the target verifies: the anchor and the nodes after it.

    Attributes:
        tokens: of the anchor and the nodes.
        proposal: the nodes.
        tree: None for a chain.
        packing: the positions that are verified, of each row the first ones; None is all.
    """

    tokens: Int[Array, "B T"]
    proposal: Proposal
    tree: Tree | None
    packing: Packing | None = None

    @property
    def depth(self) -> Int[Array, "#B T"]:
        """How many nodes stand before each position on its path."""
        return jnp.arange(self.tokens.shape[1])[None] if self.tree is None else self.tree.depth

    @property
    def verified(self) -> Bool[Array, "B P"] | bool:
        """Which of the nodes are verified."""
        if self.packing is None:
            return True
        return jnp.arange(1, self.tokens.shape[1])[None] < self.packing.counts[:, None]

    def positions(self, lengths: Int[Array, " B"]) -> Int[Array, "B T"]:
        """Absolute positions: the anchor stands at `lengths`, a node as far after it as it is deep."""
        return lengths[:, None] + self.depth


class Accepted(NamedTuple):
    """What a step commits of each row, in order; the first `count` entries.

    Attributes:
        tokens: chosen by the target.
        path: block positions whose keys, values and features are committed; None is 0, 1, 2, ...
        count: 0 for an idle row.
    """

    tokens: Int[Array, "B J"]
    path: Int[Array, "B J"] | None
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride] (a tuple's, which nobody calls)


def make_block(anchor: Int[Array, " B"], proposal: Proposal) -> Block:
    """The block of a proposal; of a tree with the relations of its nodes."""
    tokens = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
    return Block(tokens, proposal, None if proposal.parents is None else make_tree(proposal))


def make_tree(proposal: Proposal) -> Tree:
    """Depths and ancestors from the parents, by squaring the relation."""
    assert proposal.parents is not None
    B, P = proposal.tokens.shape
    parents = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), proposal.parents], axis=1)
    index = jnp.arange(P + 1)
    related = (index[None, None] == parents[:, :, None]) | (index[:, None] == index[None])[None]
    reach = 1
    while reach < P:  # and not only the depth that was promised
        related = jnp.any(related[:, :, :, None] & related[:, None], axis=2)
        reach *= 2
    return Tree(jnp.sum(related, axis=-1, dtype=jnp.int32) - 1, related)


def accept(
    chosen: Int[Array, "B T"],
    block: Block,
    remaining: Int[Array, " B"],
    stop_tokens: Int[Array, "B Q"],
    room: Int[Array, " B"] | None = None,
) -> tuple[Accepted, Int[Array, " B"]]:
    """What each row commits, and how many tokens it may commit afterwards.

    The longest path of proposals that the target itself would have chosen, and one token more, cut after the first
    stop token and at the budget (method 5; paper section 3).

    Args:
        chosen: the target's token after every block position that is verified.
        remaining: tokens each row may still commit.
        stop_tokens: tokens that end a row.
        room: positions that there is memory for; None is no limit.
    """
    if block.tree is None:
        path, tokens = None, chosen
        right = (chosen[:, :-1] == block.proposal.tokens) & block.verified
        count = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1) + 1
    else:
        path, count = _accepted_path(chosen, block)
        tokens = jnp.take_along_axis(chosen, path, axis=1)
        count = jnp.minimum(count, tokens.shape[1])  # of a path that is longer than the tree was said to be
    count = jnp.minimum(count, remaining if room is None else jnp.minimum(remaining, room))
    stops = jnp.any(tokens[:, :, None] == stop_tokens[:, None, :], axis=-1)
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    stopped = until_stop <= count
    count = jnp.minimum(count, until_stop).astype(jnp.int32)
    return Accepted(tokens, path, count), jnp.where(stopped, 0, remaining - count).astype(jnp.int32)


def _accepted_path(chosen: Int[Array, "B T"], block: Block) -> tuple[Int[Array, "B J"], Int[Array, " B"]]:
    """Block positions from the anchor to the deepest node that is right as all its ancestors are, and their number."""
    tree, parents = block.tree, block.proposal.parents
    assert tree is not None
    assert parents is not None
    right = (block.tokens[:, 1:] == jnp.take_along_axis(chosen, parents, axis=1)) & block.verified
    right = jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)
    alive = ~jnp.any(tree.ancestors & ~right[:, None, :], axis=-1)
    leaf = jnp.argmax(jnp.where(alive, tree.depth, -1), axis=1)
    on_path = jnp.take_along_axis(tree.ancestors, leaf[:, None, None], axis=1)[:, 0]
    depths = jnp.arange(block.proposal.depth + 1)
    at = on_path[:, None, :] & (tree.depth[:, None, :] == depths[None, :, None])
    path = jnp.argmax(at, axis=-1).astype(jnp.int32)
    return path, jnp.take_along_axis(tree.depth, leaf[:, None], axis=1)[:, 0] + 1
