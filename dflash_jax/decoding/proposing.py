"""The proposals of drafters: chains, and trees of the best paths.

`propose` is for a drafter none of whose depths depends on the tokens of those before, `grow` for one that chooses a
token given those before it, depth after depth.
Shapes: B rows, T depths, V tokens of the choice, W nodes of one depth, N options after a node, Z nodes so far, d depth,
P nodes of the tree.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.calibration import Lessons
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.sampling import if_any
from dflash_jax.decoding.selection import likeliest, pick, pick_in_turn, rank
from dflash_jax.decoding.tree import Level, best_nodes, joined, next_level, pruned

Carry = TypeVar("Carry")


CANDIDATES = 64  # least tokens of a depth that are looked at for a tree under a constraint


def propose(choice: Choice, logits: Float[Array, "B T V"]) -> Proposal:
    """The chain of the best tokens of the depths 0..T-1, or the tree of the likeliest paths.

    Where a row has a constraint, the tokens before decide what is allowed: depth after depth is chosen.
    """
    logits, depth = choice.allowed(logits), logits.shape[1]
    if not choice.nodes:
        picked = pick(choice, logits)
        if choice.automata is None:
            return picked
        tokens = if_any(choice.constrained, lambda: pick_in_turn(choice, logits), lambda: picked.tokens)
        return picked.replace(tokens=tokens)
    ranked, lessons = rank(choice, logits, slice(depth))

    def best() -> tuple[Array, Array, Array]:
        nodes = best_nodes(ranked, choice.nodes)
        return nodes.tokens, nodes.parents, nodes.scores

    def in_turn() -> tuple[Array, Array, Array]:
        count = min(max(CANDIDATES, choice.nodes), logits.shape[-1])
        scores, candidates = likeliest(choice, logits, count)

        def expand(d: int, frontier: Frontier, carried: Carry) -> tuple[Options, Carry]:
            shape = (*frontier.tokens.shape, count)
            return Options(*(jnp.broadcast_to(x[:, d, None], shape) for x in (scores, candidates))), carried

        anchor = jnp.zeros(logits.shape[0], jnp.int32)  # the logits follow from it already
        tree = grow(choice, anchor, depth, expand, ())
        assert tree.parents is not None
        assert tree.scores is not None
        return tree.tokens, tree.parents, tree.scores

    nodes = best() if choice.automata is None else if_any(choice.constrained, in_turn, best)
    return Proposal(nodes[0], nodes[1], min(depth, choice.nodes), nodes[2], lessons)


class Frontier(NamedTuple):
    """Nodes of one depth that a drafter goes on from: the anchor first, then one of a chain, or the best of a tree.

    Attributes:
        tokens: the target's ids of the nodes.
        parents: index of each one's parent in the frontier before.
        lineage: index of each of its ancestors, and of itself, in the frontier of its depth.
        before: tokens of the nodes that lead to them; None at the anchor.
        seen: which of these lead to which node; None is all to all.
        states: of the rows' automata after each node; None without constraints.
    """

    tokens: Int[Array, "B W"]
    parents: Int[Array, "B W"]
    lineage: Int[Array, "B W d"]
    before: Int[Array, "B Z"] | None = None
    seen: Bool[Array, "1 W Z"] | None = None
    states: Int[Array, "B W"] | None = None


class Options(NamedTuple):
    """What may follow each node, as the drafter sees it.

    Attributes:
        logits: of the options.
        candidates: tokens of the choice that these are of, with logits that are allowed already (`Choice.allowed`);
            None is all tokens.
    """

    logits: Float[Array, "B W N"]
    candidates: Int[Array, "B W N"] | None = None


Expand = Callable[[int, Frontier, Carry], tuple[Options, Carry]]


def grow(
    choice: Choice,
    anchor: Int[Array, " B"],
    depth: int,
    expand: Expand[Carry],
    carried: Carry,
    *,
    width: int | None = None,
) -> Proposal:
    """A chain, or the tree of the best paths among those that were looked at.

    Args:
        depth: nodes of the longest path.
        expand: options after the nodes of a frontier, given its depth and what was carried to it; returns what to
            carry on, too.
        carried: to the anchor.
        width: of a tree, most nodes of a depth to go on from; None is as many as can matter.
    """
    none = jnp.zeros((anchor.shape[0], 1), jnp.int32)
    begun = None if choice.walk is None else choice.walk.state[:, None]
    frontier = Frontier(anchor[:, None], none, jnp.zeros((*none.shape, 0), jnp.int32), states=begun)
    if choice.nodes:
        return _tree(choice, frontier, min(depth, choice.nodes), expand, carried, width or choice.nodes)
    picks = list[Proposal]()
    for d in range(depth):
        options, carried = expand(d, frontier, carried)
        scores, hints = _allowed(choice, options, frontier)
        picks.append(pick(choice, scores, d, options.candidates, hints))
        lineage = jnp.concatenate([frontier.lineage, none[:, :, None]], axis=2)
        states = choice.following(frontier.states, picks[-1].tokens)
        frontier = Frontier(picks[-1].tokens, none, lineage, joined(picks).tokens, states=states)
    return joined(picks)


def _allowed(
    choice: Choice, options: Options, frontier: Frontier
) -> tuple[Float[Array, "B W N"], Int[Array, "B W"] | None]:
    """The logits of options under the penalties and the constraints of the paths that lead to them, penalties only
    where they are not of candidates; and what to propose where none is left."""
    states, automata = frontier.states, choice.automata
    if options.candidates is None:
        logits = choice.allowed(options.logits, frontier.before, frontier.seen, states)
    elif automata is None or states is None:
        logits = options.logits
    else:
        logits = jnp.where(automata.permits(states, choice.ids(options.candidates)), options.logits, -jnp.inf)
    return logits, None if automata is None or states is None else automata.hint[states]


def _tree(
    choice: Choice, frontier: Frontier, depth: int, expand: Expand[Carry], carried: Carry, width: int
) -> Proposal:
    levels, lessons = list[Level](), list[Lessons]()
    paths = jnp.zeros(frontier.lineage.shape, jnp.int32)  # ids that lead to each node of the frontier
    for d in range(depth):
        options, carried = expand(d, frontier, carried)
        scores, hints = _allowed(choice, options, frontier)
        ranked, learnt = rank(choice, scores, slice(d, d + 1), options.candidates, hints)
        lessons.append(learnt)
        levels.append(next_level(ranked, levels[-1] if levels else None, choice.nodes))
        tokens, parents = levels[-1].tokens[:, :width], levels[-1].parents[:, :width]
        W = tokens.shape[1]
        itself = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None], tokens.shape)
        lineage, paths = (
            jnp.concatenate([jnp.take_along_axis(x, parents[:, :, None], axis=1), last[:, :, None]], axis=2)
            for x, last in ((frontier.lineage, itself), (paths, tokens))
        )
        seen = jnp.repeat(jnp.eye(W, dtype=bool), d + 1, axis=1)[None]
        states = frontier.states
        if states is not None:
            states = choice.following(jnp.take_along_axis(states, parents, axis=1), tokens)
        frontier = Frontier(tokens, parents, lineage, paths.reshape(paths.shape[0], -1), seen, states)
    best = pruned(levels, choice.nodes)
    return Proposal(best.tokens, best.parents, depth, best.scores, _placed(lessons, levels, best.chosen))


def _placed(lessons: list[Lessons], levels: list[Level], chosen: Int[Array, "B P"]) -> Lessons:
    """The lessons of all depths, and the place that each node has among them."""
    places, begin = [], 1
    for level, following in zip(levels, [*lessons[1:], None], strict=True):
        index = jnp.arange(level.scores.shape[1], dtype=jnp.int32)
        count = 0 if following is None or following.tokens is None else following.tokens.shape[1]
        places.append(jnp.where(index < count, begin + index, -1))
        begin += count
    of_nodes = jnp.concatenate(places)[chosen]
    return joined(lessons).replace(places=jnp.pad(of_nodes, ((0, 0), (1, 0))))  # the anchor's is the first
