"""What followed the last times a text ended as it ends now: proposals without a model.

The end of each row's text is compared with every place before it. The longest match wins, of equal ones the latest, and
what stands after it is copied. Prompt and answer are searched alike, on the device, in one pass over the tokens; memory
that rows share is read a few pages at a time.
Shapes: B rows, N positions, K copies, D tokens of a copy, M pages of a row, P nodes of a tree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.calibration import MOST_LOGIT, Lessons
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.penalties import History
from dflash_jax.decoding.proposal import Proposal, make_tree
from dflash_jax.decoding.sampling import if_any
from dflash_jax.decoding.selection import reliable
from dflash_jax.decoding.tree import likeliest_nodes

LONGEST = 16  # tokens of the end that are compared
PIECE = 4096  # positions that are looked at together, where rows share memory
SHIFT = 26  # bits of a position beside the length of its match


class Copies(NamedTuple):
    """Texts that may follow each row, the best first. As they stand in the row, those with a match begin with different
    tokens.

    Attributes:
        tokens: of each copy. One that comes to the end of the text goes on as the text does from the match on.
        matched: tokens before it that are the same as the last ones of the row, up to `LONGEST`; 0 for no copy, whose
            tokens may be any.
        fits: whether a token and those before it are what the row's constraint allows; None is all.
        asked: whether it is what the constraint asks for in the place of another; None is none.
    """

    tokens: Int[Array, "B K D"]
    matched: Int[Array, "B K"]
    fits: Bool[Array, "B K D"] | None = None
    asked: Bool[Array, "B K D"] | None = None

    def logits(self) -> Float[Array, "B K D"]:
        """Log-odds of each token to be right if those before it are: half the length of the match to one, which has
        grown with them. (In code and mathematics of the benchmarks 1, 2, 4, 8 and 16 tokens that match were followed
        by the same token in 0.26, 0.45, 0.62, 0.77 and 0.93 of the cases.)"""
        grown = self.matched[..., None] + jnp.arange(self.tokens.shape[2])[None, None]
        odds = jnp.minimum(grown, LONGEST).astype(jnp.float32) / 2
        likely = (self.matched[..., None] > 0) & (True if self.fits is None else self.fits)
        logits = jnp.where(likely, jnp.log(jnp.maximum(odds, 0.5)), -MOST_LOGIT)
        return logits if self.asked is None else jnp.where(self.asked, MOST_LOGIT, logits)


def copies(history: History, known: Int[Array, " B"], depth: int, count: int = 1) -> Copies:
    """The best continuations of each row.

    Args:
        history: prompt and answer of every row.
        known: how many tokens of it there are.
        depth: D.
        count: K.
    """
    last = known[:, None] - 1 - jnp.arange(LONGEST)[None]
    ends = jnp.where(last >= 0, history.at(jnp.maximum(last, 0)), -1)
    keys = _best(history, known, ends, count)
    begin, matched = keys & (2**SHIFT - 1), keys >> SHIFT
    period = jnp.maximum(known[:, None] - begin, 1)
    places = begin[..., None] + jnp.arange(depth)[None, None] % period[..., None]
    tokens = history.at(jnp.minimum(places, jnp.maximum(known - 1, 0)[:, None, None]).reshape(known.shape[0], -1))
    return Copies(tokens.reshape(places.shape), matched)


def _best(history: History, known: Int[Array, " B"], ends: Int[Array, "B _"], count: int) -> Int[Array, "B K"]:
    """The best places to go on from, each with another token: length of the match and position, in one number; 0 for
    none."""
    B = known.shape[0]
    before = jnp.full((B, LONGEST), -2, jnp.int32)  # matches nothing
    if history.pages is None:
        return _distinct(*_matches(history.tokens, before, 0, known, ends), count)[0]
    table, size, M = history.pages, history.tokens.shape[1], history.pages.shape[1]
    step = min(max(PIECE // size, 1), M)

    def look(i: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, keys, tokens = carry
        pages = jnp.take(table, i * step + jnp.arange(step), axis=1, mode="clip")
        piece = history.tokens[pages].reshape(B, step * size)
        new, of = _distinct(*_matches(piece, before, i * step * size, known, ends), count)
        keys, tokens = (jnp.concatenate(pair, axis=1) for pair in ((keys, new), (tokens, of)))
        return piece[:, -LONGEST:], *_distinct(keys, tokens, count)

    none = jnp.zeros((B, count), jnp.int32)
    pieces = jnp.minimum(-(-jnp.max(known) // (step * size)), -(-M // step))
    return jax.lax.fori_loop(0, pieces, look, (before, none, none))[1]


def _matches(
    tokens: Int[Array, "B N"],
    before: Int[Array, "B _"],
    start: Int[Array, ""] | int,
    known: Int[Array, " B"],
    ends: Int[Array, "B _"],
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Of every position, how many of the tokens before it are those before the end, and itself, in one number, which
    is 0 where none is; and the token that stands there.

    Args:
        tokens: from position `start` on.
        before: the tokens before these.
        ends: the last tokens of the row, the last one first.
    """
    count = tokens.shape[1]
    text = jnp.concatenate([before, tokens], axis=1)
    alike, matched = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
    for back in range(LONGEST):
        alike &= text[:, LONGEST - 1 - back : LONGEST - 1 - back + count] == ends[:, back, None]
        matched += alike.astype(jnp.int32)
    place = start + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.where((place < known[:, None]) & (matched > 0), (matched << SHIFT) | place, 0), tokens


def _distinct(
    keys: Int[Array, "B N"], tokens: Int[Array, "B N"], count: int
) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """The largest keys that differ in their tokens, and these."""
    best, of = list[Array](), list[Array]()
    for _ in range(count):
        best.append(jnp.max(keys, axis=1, keepdims=True))
        of.append(jnp.max(jnp.where(keys == best[-1], tokens, -1), axis=1, keepdims=True))
        keys = jnp.where(tokens == of[-1], 0, keys)
    return jnp.concatenate(best, axis=1), jnp.concatenate(of, axis=1)


# --------------------------------------------------------------------------------------------------
# As proposals


def allowed(choice: Choice, copied: Copies) -> Copies:
    """The copies under the constraints of the rows. Where one does not allow a token, the token that it asks for stands
    there, if it asks for one."""
    automata, walk = choice.automata, choice.walk
    if automata is None or walk is None:
        return copied

    def corrected() -> tuple[Array, Array, Array]:
        states = jnp.broadcast_to(walk.state[:, None], copied.matched.shape)
        tokens, fits, asked = list[Array](), list[Array](), list[Array]()
        for depth in range(copied.tokens.shape[2]):
            token, hint = copied.tokens[:, :, depth], automata.hint[states]
            fit = automata.permits(states, token[..., None])[..., 0]
            asked.append(~fit & (hint >= 0))
            tokens.append(jnp.where(asked[-1], hint, token))
            fits.append((fit | asked[-1]) & (fits[-1] if fits else True))
            states = automata.following(states, walk.automaton, tokens[-1])
        return jnp.stack(tokens, axis=2), jnp.stack(fits, axis=2), jnp.stack(asked, axis=2)

    every = jnp.ones(copied.tokens.shape, bool)
    tokens, fits, asked = if_any(choice.constrained, corrected, lambda: (copied.tokens, every, ~every))
    return Copies(tokens, copied.matched, fits, asked)


def chain(choice: Choice, copied: Copies) -> Proposal:
    """The best copy."""
    lessons = _lessons(copied)
    return Proposal(copied.tokens[:, 0], scores=_scores(choice, copied)[:, 0], lessons=lessons)


def _scores(choice: Choice, copied: Copies) -> Float[Array, "B K D"]:
    """Log-probability of each token to be right if those before it are, by what was learned of copies."""
    logits = copied.logits()
    learnt = reliable(choice, logits.swapaxes(1, 2), slice(logits.shape[2])).swapaxes(1, 2)
    return jax.nn.log_sigmoid(jnp.where(jnp.abs(logits) < MOST_LOGIT, learnt, logits))


def _lessons(copied: Copies) -> Lessons:
    """What the best copy teaches, depth after depth; where there is none, nothing."""
    logits = copied.logits()[:, 0]
    places = jnp.where(logits > -MOST_LOGIT, jnp.arange(logits.shape[1], dtype=jnp.int32)[None], -1)
    return Lessons(None, copied.tokens[:, 0, :, None], logits[..., None], places)


def tree(choice: Choice, copied: Copies) -> Proposal:
    """The likeliest nodes of all copies, which part at the anchor: what follows the second one is likely where the
    first one is not."""
    steps, nodes, (B, K, D) = _scores(choice, copied), choice.nodes, copied.tokens.shape
    others = jnp.cumsum(jnp.log1p(-jnp.exp(steps[:, :, 0])), axis=1)  # that none of the first ones is right
    unlike = jnp.pad(others, ((0, 0), (1, 0)))[:, :K]
    scores = unlike[..., None] + jnp.cumsum(steps, axis=2)
    more = max(nodes - K * D, 0)  # nodes that there is no copy for
    flat = lambda x, value: jnp.pad(x.reshape(B, K * D), ((0, 0), (0, more)), constant_values=value)
    index = jnp.arange(K * D, dtype=jnp.int32)[None]
    parents = jnp.broadcast_to(jnp.where(index % D == 0, -1, index - 1), (B, K * D))
    found = likeliest_nodes(flat(scores, -jnp.inf), flat(copied.tokens, 0), flat(parents, -1), nodes)
    lessons = _lessons(copied)
    assert lessons.places is not None
    following = jnp.pad(lessons.places[:, 1:], ((0, 0), (0, 1)), constant_values=-1)  # place after each of its nodes
    of_nodes = jnp.take_along_axis(following, jnp.minimum(found.chosen, D - 1), axis=1)
    of_nodes = jnp.where(found.chosen < D, of_nodes, -1)
    lessons = lessons.replace(places=jnp.concatenate([lessons.places[:, :1], of_nodes], axis=1))
    return Proposal(found.tokens, found.parents, min(D, nodes), found.scores, lessons)


def extended(proposal: Proposal, copied: Copies) -> Proposal:
    """A drafter's chain that is as long as copies are, with the tokens of the best copy behind its own, which nothing
    speaks for; a tree as it is."""
    more = copied.tokens.shape[2] - proposal.tokens.shape[1]
    if more <= 0 or proposal.parents is not None:
        return proposal
    longer = lambda x, value: jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    tokens = jnp.concatenate([proposal.tokens, copied.tokens[:, 0, -more:]], axis=1)
    scores, lessons = proposal.scores, proposal.lessons
    if scores is not None:
        scores = longer(scores, jax.nn.log_sigmoid(-MOST_LOGIT))
    if lessons is not None:
        lessons = jax.tree.map(lambda x: longer(x, 0), lessons).replace(places=longer(_places(proposal), -1))
    return proposal.replace(tokens=tokens, scores=scores, lessons=lessons)


def _places(proposal: Proposal) -> Int[Array, "B D"]:
    """The places of a chain's lessons."""
    assert proposal.lessons is not None
    if proposal.lessons.places is not None:
        return proposal.lessons.places[:, : proposal.depth]
    return jnp.broadcast_to(jnp.arange(proposal.depth, dtype=jnp.int32)[None], proposal.tokens.shape)


def either(proposal: Proposal, copied: Copies, take: Bool[Array, " B"]) -> Proposal:
    """The chain of a drafter or the best copy: of each row what promises more tokens, or the copy if it is to be taken;
    nothing is learned of the drafter there."""
    copy, lessons, scores = jax.nn.log_sigmoid(copied.logits()[:, 0]), proposal.lessons, proposal.scores
    promised = lambda scores: jnp.sum(jnp.exp(jnp.cumsum(scores, axis=1)), axis=1)
    if scores is not None:
        take |= promised(copy) > promised(scores)
    pick = lambda x, y: jnp.where(take[:, None], x, y)
    if lessons is not None:
        lessons = lessons.replace(places=pick(-1, _places(proposal)))
    if scores is not None:
        scores = pick(copy, scores)
    return proposal.replace(tokens=pick(copied.tokens[:, 0], proposal.tokens), scores=scores, lessons=lessons)


def joined(proposal: Proposal, copied: Copies) -> Proposal:
    """As many nodes as a drafter's tree has: the likeliest of its own and of the best copy, whose tokens are nodes of
    the tree as far as it has them."""
    tokens, parents, own = proposal.tokens, proposal.parents, proposal.scores
    assert parents is not None
    assert own is not None
    copy, (B, P) = copied.tokens[:, 0], tokens.shape
    scores = jnp.cumsum(jax.nn.log_sigmoid(copied.logits()[:, 0]), axis=1)
    D, within = copy.shape[1], make_tree(proposal)
    deep = within.depth[:, 1:] - 1
    same = jnp.pad(tokens == jnp.take_along_axis(copy, deep, axis=1), ((0, 0), (1, 0)), constant_values=True)
    on_copy = jnp.all(~within.ancestors | same[:, None], axis=2)[:, 1:]  # nodes that are the beginning of the copy
    own = jnp.where(on_copy, jnp.maximum(own, jnp.take_along_axis(scores, deep, axis=1)), own)
    at = on_copy[:, None] & (deep[:, None] == jnp.arange(D)[None, :, None])  # the node of each token of the copy
    there, node = jnp.any(at, axis=2), jnp.argmax(at, axis=2).astype(jnp.int32)
    place = jnp.where(there, node, P + jnp.arange(D, dtype=jnp.int32)[None])
    above = jnp.concatenate([jnp.full((B, 1), -1, jnp.int32), place[:, :-1]], axis=1)
    both = lambda x, y: jnp.concatenate([x, y], axis=1)
    found = likeliest_nodes(
        both(own, jnp.where(there, -jnp.inf, scores)), both(tokens, copy), both(parents - 1, above), P
    )
    lessons, depth = proposal.lessons, max(proposal.max_depth, min(D, P))
    if lessons is not None and lessons.places is not None:
        before = jnp.take_along_axis(lessons.places[:, 1:], jnp.minimum(found.chosen, P - 1), axis=1)
        places = jnp.where(found.chosen < P, before, -1)
        lessons = lessons.replace(places=both(lessons.places[:, :1], places))
    elif lessons is not None and depth > (count := jax.tree.leaves(lessons)[0].shape[1]):
        index = jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32)[None], copy.shape)
        after = jnp.take_along_axis(both(deep, index), found.chosen, axis=1) + 1  # the depth of what follows each node
        places = jnp.where(after < count, after, -1)
        lessons = lessons.replace(places=jnp.pad(places, ((0, 0), (1, 0))))
    return Proposal(found.tokens, found.parents, depth, found.scores, lessons)
