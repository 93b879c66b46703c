"""Proposals of drafters that choose a token given those before it: depth after depth, along a chain or in a tree.

Shapes: B rows, W nodes of one depth, N options after a node, Z nodes so far, d depth, P nodes of the tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.calibration import Lessons
from dflash_jax.decoding.choice import Choice, Picks
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.tree import Level, next_level, pruned


class Tips(NamedTuple):
    """Nodes of one depth that a drafter goes on from: the anchor first, then one of a chain, or the best of a tree.

    Attributes:
        tokens: of the nodes.
        parents: index of each one's parent among the tips before.
        lineage: index of each of its ancestors, and of itself, among the tips of its depth.
        before: tokens of the nodes that lead to them; None at the anchor.
        seen: which of these lead to which node; None is all to all.
    """

    tokens: Int[Array, "B W"]
    parents: Int[Array, "B W"]
    lineage: Int[Array, "B W d"]
    before: Int[Array, "B Z"] | None = None
    seen: Bool[Array, "1 W Z"] | None = None


class Options(NamedTuple):
    """What may follow each node, as the drafter sees it.

    Attributes:
        logits: of the options.
        candidates: ids of these, all allowed (see `Choice.allowed`); None is the drafter's whole vocabulary.
    """

    logits: Float[Array, "B W N"]
    candidates: Int[Array, "B W N"] | None = None


Expand = Callable[[int, Tips, Any], tuple[Options, Any]]


def grow(
    choice: Choice,
    anchor: Int[Array, " B"],
    depth: int,
    expand: Expand,
    carried: Any = None,
    *,
    width: int | None = None,
    **given: Any,
) -> Proposal:
    """A chain, or the tree of the best paths among those that were looked at.

    Args:
        depth: nodes of the longest path.
        expand: options after the tips of a depth, given what was carried to it; returns what to carry on, too.
        carried: to the anchor.
        width: of a tree, most nodes of a depth to go on from; None is as many as can matter.
        given: see `Choice.tokens`.
    """
    none = jnp.zeros((anchor.shape[0], 1), jnp.int32)
    tips = Tips(anchor[:, None], none, jnp.zeros((*none.shape, 0), jnp.int32))
    if choice.nodes:
        return _tree(choice, tips, min(depth, choice.nodes), expand, carried, width or choice.nodes, given)
    picks = list[Picks]()
    for d in range(depth):
        options, carried = expand(d, tips, carried)
        if options.candidates is None:
            picks.append(choice.picks(options.logits, depth=d, before=tips.before, **given))
        else:
            picks.append(choice.among(options.logits[:, 0], options.candidates[:, 0], depth=d))
        lineage = jnp.concatenate([tips.lineage, none[:, :, None]], axis=2)
        tips = Tips(picks[-1].tokens, none, lineage, Picks.joined(picks).tokens)
    return Picks.joined(picks).chain


def _tree(
    choice: Choice, tips: Tips, depth: int, expand: Expand, carried: Any, width: int, given: dict[str, Any]
) -> Proposal:
    levels, lessons = list[Level](), list[Lessons]()
    paths = jnp.zeros(tips.lineage.shape, jnp.int32)  # tokens that lead to each tip
    for d in range(depth):
        options, carried = expand(d, tips, carried)
        known = given | {"before": tips.before, "seen": tips.seen} if options.candidates is None else {}
        ranked, learnt = choice.ranks(*options, depth=d, **known)
        lessons.append(learnt)
        levels.append(next_level(ranked, levels[-1] if levels else None, choice.nodes))
        tokens, parents = levels[-1].tokens[:, :width], levels[-1].parents[:, :width]
        W = tokens.shape[1]
        itself = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None], tokens.shape)
        lineage, paths = (
            jnp.concatenate([jnp.take_along_axis(x, parents[:, :, None], axis=1), own[:, :, None]], axis=2)
            for x, own in ((tips.lineage, itself), (paths, tokens))
        )
        own = jnp.repeat(jnp.eye(W, dtype=bool), d + 1, axis=1)[None]
        tips = Tips(tokens, parents, lineage, paths.reshape(paths.shape[0], -1), own)
    best = pruned(levels, choice.nodes)
    return Proposal(best.tokens, best.parents, depth, best.scores, _joined(lessons, levels, best.chosen))


def _joined(lessons: list[Lessons], levels: list[Level], chosen: Int[Array, "B P"]) -> Lessons:
    """The lessons of all depths, and the place that each node has among them."""
    join = lambda arrays: None if arrays[0] is None else jnp.concatenate(arrays, axis=1)
    places, begin = [], 1
    for level, following in zip(levels, [*lessons[1:], None], strict=True):
        index = jnp.arange(level.scores.shape[1], dtype=jnp.int32)
        count = 0 if following is None or following.tokens is None else following.tokens.shape[1]
        places.append(jnp.where(index < count, begin + index, -1))
        begin += count
    of_nodes = jnp.concatenate(places)[chosen]
    return Lessons(
        join([one.trials for one in lessons]),
        join([one.tokens for one in lessons]),
        join([one.likelihood for one in lessons]),
        jnp.pad(of_nodes, ((0, 0), (1, 0))),  # the anchor's is the first
    )
