"""Which of the likely paths after an anchor make the tree that is verified.

A node's score is the logarithm of the probability that it is right and all its ancestors are. Scores fall along a path,
so the best nodes are closed under ancestors, and hold the best path of every depth that they reach. They are found with
static shapes, without a heap (method 9.1 has the heap; arXiv 2604.12989).
Shapes: B rows, D depths, R ranks of a place, W nodes that are expanded together, C candidates, P nodes of the tree.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

Depths = TypeVar("Depths", bound=PyTree)
MOST_STATIC = 32  # nodes up to which all candidates of independent depths are listed beforehand


class Nodes(NamedTuple):
    """The nodes of a tree, the best first, and so each after its parent.

    Attributes:
        tokens: of the nodes.
        parents: block position of each node's parent: 0 is the anchor, i + 1 is node i.
        scores: of the nodes.
        chosen: index of each node among what they were chosen from.
    """

    tokens: Int[Array, "B P"]
    parents: Int[Array, "B P"]
    scores: Float[Array, "B P"]
    chosen: Int[Array, "B P"]


class Ranked(NamedTuple):
    """The likeliest tokens for some places, the best first.

    Attributes:
        scores: log-probability of each to be right, if everything before it is.
        tokens: which they are.
    """

    scores: Float[Array, "B D R"]
    tokens: Int[Array, "B D R"]


class Level(NamedTuple):
    """Candidates of one depth, the best first.

    Attributes:
        scores, tokens: of the candidates.
        parents: index of each one's parent among the candidates of the depth before; of depth 1 all zero.
    """

    scores: Float[Array, "B C"]
    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]


class Candidates(NamedTuple):
    """Paths of ranks that can belong to the best nodes, parents first.

    Attributes:
        depths, ranks: of their last nodes, from 0.
        parents: index of the candidate that each one continues; -1 for the anchor.
    """

    depths: np.ndarray
    ranks: np.ndarray
    parents: np.ndarray


@cache
def candidates(nodes: int, depths: int, ranks: int) -> Candidates:
    """All paths of ranks that can be among the `nodes` best where no depth depends on the token before.

    A path (r1, ..., rd), ranks counted from 0, has at least the sum over j of (r1 + 1) ... (rj + 1) paths that score no
    less: those of no larger ranks (drafting 2.2).
    """
    found, level = [], [(-1, 1, 0)]  # of each path: its index, the product of its ranks, the sum so far
    for depth in range(depths):
        following = []
        for parent, product, total in level:
            for rank in range(ranks):
                size = product * (rank + 1)
                if total + size > nodes:
                    break
                following.append((len(found), size, total + size))
                found.append((depth, rank, parent))
        level = following
    columns = np.asarray(found, np.int32).reshape(-1, 3).T
    return Candidates(*columns)


def best_nodes(ranked: Ranked, nodes: int) -> Nodes:
    """The best nodes where the tokens of a depth are as likely after any other: one `top_k` over all candidates, or
    level by level where these would be too many.

    Args:
        ranked: of every depth; as many ranks as nodes, or those that trees have (`Choice.ranks`).
    """
    _, D, R = ranked.scores.shape
    if nodes > MOST_STATIC:
        return pruned(levels_of(ranked, nodes), nodes)
    all = candidates(nodes, D, R)
    scores: list[Array] = []
    begin = 0
    for depth in range(D):
        here = all.depths == depth
        sums = ranked.scores[:, depth, all.ranks[here]]
        if depth:
            sums += scores[-1][:, all.parents[here] - begin]
            begin += scores[-1].shape[1]
        scores.append(sums)
    tokens = ranked.tokens[:, all.depths, all.ranks]
    parents = jnp.broadcast_to(all.parents[None], tokens.shape)
    return likeliest_nodes(jnp.concatenate(scores, axis=1), tokens, parents, nodes)


def levels_of(ranked: Ranked, nodes: int) -> list[Level]:
    """The best candidates of each depth, where no depth depends on the token before.

    The r-th child of the i-th node of a depth is not among the best unless (i + 1) (r + 1) <= `nodes`, both from 0.
    """
    levels = list[Level]()
    for depth in range(ranked.scores.shape[1]):
        scores, tokens = ranked.scores[:, depth], ranked.tokens[:, depth]
        beams = levels[-1].scores.shape[1] if levels else 1
        pairs = [(i, r) for i in range(beams) for r in range(scores.shape[1]) if (i + 1) * (r + 1) <= nodes]
        parents, ranks = np.asarray(pairs, np.int32).T
        totals = scores[:, ranks] + (levels[-1].scores[:, parents] if levels else 0.0)
        best, at = jax.lax.top_k(totals, min(nodes, len(pairs)))
        levels.append(Level(best, jnp.take_along_axis(tokens[:, ranks], at, axis=1), jnp.asarray(parents)[at]))
    return levels


def next_level(ranked: Ranked, before: Level | None, nodes: int) -> Level:
    """The best candidates of a depth, given the likeliest tokens after the first nodes of the depth before.

    Args:
        ranked: its places are these nodes; of depth 1 the anchor alone.
    """
    B, W, R = ranked.scores.shape
    totals = ranked.scores + (0.0 if before is None else before.scores[:, :W, None])
    best, at = jax.lax.top_k(totals.reshape(B, W * R), min(nodes, W * R))
    return Level(best, jnp.take_along_axis(ranked.tokens.reshape(B, W * R), at, axis=1), (at // R).astype(jnp.int32))


def joined(depths: Sequence[Depths]) -> Depths:
    """Arrays [B, D, ...] of depths that follow one another, as those of all of them."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *depths)


def pruned(levels: Sequence[Level], nodes: int) -> Nodes:
    """The best of the candidates of all depths. They are all the best there are, since scores fall along a path."""
    begins = np.cumsum([0, *(level.scores.shape[1] for level in levels)])
    parents = [level.parents + begin for level, begin in zip(levels[1:], begins, strict=False)]
    parents = [jnp.full_like(levels[0].parents, -1), *parents]
    every = joined([level._replace(parents=index) for level, index in zip(levels, parents, strict=True)])
    return likeliest_nodes(*every, nodes)


def likeliest_nodes(
    scores: Float[Array, "B C"], tokens: Int[Array, "B C"], parents: Int[Array, "B C"], nodes: int
) -> Nodes:
    """The best of candidates that stand after their parents; of equal ones the first."""
    best, chosen = jax.lax.top_k(scores, min(nodes, scores.shape[1]))
    pick = lambda x: jnp.take_along_axis(x, chosen, axis=1)
    of = pick(parents)
    place = jnp.argmax(chosen[:, None, :] == of[:, :, None], axis=-1).astype(jnp.int32) + 1
    return Nodes(pick(tokens), jnp.where(of < 0, 0, place), best, chosen)
