"""How a step chooses tokens: everything but the logits.

Target and drafter choose through the same object, so settings, penalties and noise are applied the same way.
Shapes: B rows, T block positions, P proposed tokens, W positions with noise, V vocabulary, C candidates of a depth.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.calibration import GREEDY, SHARPNESS, Calibration, Lessons
from dflash_jax.decoding.penalties import History, Penalties, penalise
from dflash_jax.decoding.proposal import Block, Proposal
from dflash_jax.decoding.sampling import (
    Sampling,
    first_argmax,
    gumbel_noise,
    if_any,
    perturbed_scores,
    scaled_scores,
    select,
    top_k,
)
from dflash_jax.decoding.tree import Ranked, best_nodes

Proposals = Literal["calibrated", "coupled", "argmax", "independent"]


class Picks(NamedTuple):
    """Proposed tokens.

    Attributes:
        tokens: of these depths.
        trials: what each sharpness would have picked; None where none is learnt.
    """

    tokens: Int[Array, "B T"]
    trials: Int[Array, "B T C"] | None

    @staticmethod
    def joined(each: "Sequence[Picks]") -> "Picks":
        """Those of depths that follow one another."""
        tokens = jnp.concatenate([picks.tokens for picks in each], axis=1)
        trials = [picks.trials for picks in each if picks.trials is not None]
        return Picks(tokens, jnp.concatenate(trials, axis=1) if trials else None)

    @property
    def chain(self) -> Proposal:
        """Proposed one after the other."""
        return Proposal(self.tokens, lessons=None if self.trials is None else Lessons(self.trials))


class Choice(struct.PyTreeNode):
    """Settings, history and noise of one step.

    Attributes:
        sampling, penalties, history: of every row.
        known: tokens of the history that count; the next one has this position.
        noise: by depth: of position `known + d`. All nodes of a tree at one depth share it.
        decodable: ids that may be chosen; None is all.
        plain: whether the best penalised score is taken, without temperature, filters and noise.
        nodes: of the tree that a drafter is to propose; 0 is a chain.
        sharpness: which of `calibration.SHARPNESS` to use at each depth; None does without.
        greedy: sharpness of each depth for the ranks of greedy rows; None does without.
        stops: stop tokens of every row, padded with -1, which `Penalties.min_tokens` holds back; None holds back none.
    """

    sampling: Sampling
    penalties: Penalties
    history: History
    known: Int[Array, " B"]
    noise: Float[Array, "B W V"]
    decodable: Bool[Array, " V"] | None
    plain: bool = struct.field(pytree_node=False, default=False)
    nodes: int = struct.field(pytree_node=False, default=0)
    sharpness: Int[Array, " D"] | None = None
    greedy: Float[Array, " D"] | None = None
    stops: Int[Array, "B Q"] | None = None

    def for_block(self, logits: Float[Array, "B T V"], block: Block) -> Int[Array, "B T"]:
        """The target's token after every position of a block, each given its own ancestors."""
        if block.tree is None:
            seen, noise = None, self.noise[:, : logits.shape[1]]
        else:
            seen = block.tree.ancestors[:, :, 1:]
            noise = jnp.take_along_axis(self.noise, block.tree.depth[:, :, None], axis=1)
        logits = self._penalised(logits, block.proposal.tokens, seen)
        return select(self.masked(logits), noise, self.sampling)

    def chain_scores(self, logits: Float[Array, "B T V"], following: Int[Array, "B P"]) -> Float[Array, "B T V"]:
        """What the target's tokens after a chain are the largest of, given the tokens between its positions."""
        return perturbed_scores(self.masked(self._penalised(logits, following)), self.noise, self.sampling)

    def tokens(
        self, logits: Float[Array, "B T N"], *, depth: int = 0, vocabulary: Int[Array, " N"] | None = None, **given: Any
    ) -> Int[Array, "B T"]:
        """Tokens for the depths `depth..depth+T-1`, each from its own logits.

        Args:
            vocabulary: the id of each of the logits, ascending, of a drafter with a reduced vocabulary; None is all.
            before: tokens proposed at smaller depths, which penalties count.
            forbidden: ids that are never proposed, such as a mask token.
        """
        logits = self.allowed(logits, vocabulary=vocabulary, **given)
        noise = self._noise(depth, logits.shape[1], vocabulary)
        places = first_argmax(logits) if self.plain else select(logits, noise, self.sampling)
        return places if vocabulary is None else vocabulary[places]

    def scores(
        self, logits: Float[Array, "B T N"], *, depth: int = 0, vocabulary: Int[Array, " N"] | None = None, **given: Any
    ) -> Float[Array, "B T N"]:
        """What `tokens` takes the largest of: with it, a tree of likely tokens can be ranked."""
        logits, noise = self.allowed(logits, vocabulary=vocabulary, **given), self._noise
        if self.plain:
            return logits
        return perturbed_scores(logits, noise(depth, logits.shape[1], vocabulary), self.sampling)

    def picks(
        self, logits: Float[Array, "B T N"], *, depth: int = 0, vocabulary: Int[Array, " N"] | None = None, **given: Any
    ) -> Picks:
        """`tokens` for a drafter to propose, with what calibrates them."""
        logits = self.allowed(logits, vocabulary=vocabulary, **given)
        picks = self._picked(logits, self._noise(depth, logits.shape[1], vocabulary), depth)
        if vocabulary is None:
            return picks
        return Picks(vocabulary[picks.tokens], None if picks.trials is None else vocabulary[picks.trials])

    def among(self, scores: Float[Array, "B C"], candidates: Int[Array, "B C"], *, depth: int = 0) -> Picks:
        """One of a few candidates for one depth, given what is known of each (see `allowed`)."""
        rows = jnp.arange(scores.shape[0])[:, None]
        picks = self._picked(scores[:, None], self.noise[:, depth][rows, candidates][:, None], depth)
        token = jnp.take_along_axis(candidates, picks.tokens, axis=1)
        if picks.trials is None:
            return Picks(token, None)
        return Picks(token, jnp.take_along_axis(candidates, picks.trials[:, 0], axis=1)[:, None])

    def _picked(self, logits: Float[Array, "B T N"], noise: Float[Array, "B T N"], depth: int) -> Picks:
        """Places of the best scores."""
        if self.plain:
            return Picks(first_argmax(logits), None)
        if self.sharpness is None:
            return Picks(select(logits, noise, self.sampling), None)

        trials = self._trials(logits, noise)
        best = self.sharpness[depth : depth + logits.shape[1]][None, :, None]
        return Picks(jnp.take_along_axis(trials, best, axis=2)[..., 0], trials)

    def _trials(self, logits: Float[Array, "B T N"], noise: Float[Array, "#B #T N"]) -> Int[Array, "B T C"]:
        """Places of the best scores at each sharpness."""

        def sampled() -> Int[Array, "B T C"]:
            scores = scaled_scores(logits, self.sampling)
            trials = [first_argmax(scores if math.isinf(c) else c * scores + noise) for c in SHARPNESS]
            return jnp.stack(trials, axis=-1)

        def greedy() -> Int[Array, "B T C"]:
            return jnp.repeat(first_argmax(logits)[..., None], len(SHARPNESS), axis=-1)

        return if_any(self.sampling.temperature > 0, sampled, greedy)

    def propose(
        self, logits: Float[Array, "B T N"], *, vocabulary: Int[Array, " N"] | None = None, **given: Any
    ) -> Proposal:
        """The proposal of a drafter none of whose depths depends on the tokens of those before: a chain, or the tree of
        the likeliest paths.

        Args:
            logits: of the depths 0..T-1.
            vocabulary, given: see `tokens`.
        """
        if not self.nodes:
            return self.picks(logits, vocabulary=vocabulary, **given).chain
        logits, depth = self.allowed(logits, vocabulary=vocabulary, **given), logits.shape[1]
        ranked, lessons = self.ranked(logits, self._noise(0, depth, vocabulary), slice(depth))
        if vocabulary is not None:
            ranked, lessons = _renamed(ranked, lessons, lambda places: vocabulary[places])
        best = best_nodes(ranked, self.nodes)
        return Proposal(best.tokens, best.parents, min(depth, self.nodes), best.scores, lessons)

    def ranks(
        self,
        logits: Float[Array, "B W N"],
        candidates: Int[Array, "B W N"] | None = None,
        *,
        depth: int,
        vocabulary: Int[Array, " N"] | None = None,
        **given: Any,
    ) -> tuple[Ranked, Lessons]:
        """The likeliest tokens after W nodes of one depth, and what there is to learn of them.

        Args:
            logits: of the tokens after each node.
            candidates: ids of these, already allowed (see `among`); None is the whole vocabulary.
            vocabulary, given: see `allowed`; `before` and `seen` are of each node.
        """
        noise, here = self._noise(depth, 1, vocabulary), slice(depth, depth + 1)
        if candidates is not None:
            noise = jnp.take_along_axis(noise, candidates.reshape(candidates.shape[0], 1, -1), axis=2)
            found = self.ranked(logits, noise.reshape(candidates.shape), here)
            return _renamed(*found, lambda places: jnp.take_along_axis(candidates, places, axis=2))
        found = self.ranked(self.allowed(logits, vocabulary=vocabulary, **given), noise, here)
        return found if vocabulary is None else _renamed(*found, lambda places: vocabulary[places])

    def ranked(
        self, logits: Float[Array, "B T N"], noise: Float[Array, "#B #T N"], depths: slice
    ) -> tuple[Ranked, Lessons]:
        """The best places by how likely each is to be what the target will choose.

        With the noise that draft and target share, that is the softmax of the very scores that a chain takes the
        largest of; without noise, the softmax of c0 times the scores.
        """
        c0 = jnp.ones((1, 1, 1)) if self.greedy is None else self.greedy[depths][None, :, None]

        def sampled() -> tuple[Array, Array]:
            keys, with_noise = self._keys(logits, noise, depths)
            return keys, jnp.where(with_noise, 1.0, c0)

        def greedy() -> tuple[Array, Array]:
            scale = jnp.broadcast_to(c0, jnp.broadcast_shapes((logits.shape[0], 1, 1), c0.shape))
            return logits, scale

        if self.plain:
            keys, scale = greedy()
        else:
            keys, scale = if_any(self.sampling.temperature > 0, sampled, greedy)
        best, places = top_k(keys, min(self.nodes, keys.shape[-1]))
        scores = scale * best - jax.nn.logsumexp(scale * keys, axis=-1, keepdims=True)
        scores = jnp.where(best > -jnp.inf, scores, -jnp.inf)  # nothing may follow a place without options
        # What may not be proposed gives way to another of the first one.
        places = jnp.where(scores > -jnp.inf, places, places[..., :1])

        def likelihood() -> Float[Array, "B T R C0"]:
            each = [c * best - jax.nn.logsumexp(c * keys, axis=-1, keepdims=True) for c in GREEDY]
            return jnp.stack(each, axis=-1)

        nothing = lambda: jnp.zeros((*best.shape, len(GREEDY)))
        learnt = if_any(self.sampling.temperature == 0, likelihood, nothing)
        trials = None if self.plain or self.sharpness is None else self._trials(logits, noise)
        return Ranked(scores, places), Lessons(trials, places, learnt)

    def best(
        self, logits: Float[Array, "B T N"], count: int, *, vocabulary: Int[Array, " N"] | None = None
    ) -> tuple[Float[Array, "B T C"], Int[Array, "B T C"]]:
        """Logits and places of the `count` options most likely to be picked at each of the depths 0..T-1, for a drafter
        that rescores only these, given the token before.

        With the noise that draft and target share, an unlikely token that the noise favours is among them.

        Args:
            logits: already allowed (see `allowed`).
        """

        def sampled() -> Int[Array, "B T C"]:
            depth = logits.shape[1]
            return top_k(self._keys(logits, self._noise(0, depth, vocabulary), slice(depth))[0], count)[1]

        greedy = lambda: top_k(logits, count)[1]
        places = greedy() if self.plain else if_any(self.sampling.temperature > 0, sampled, greedy)
        return jnp.take_along_axis(logits, places, axis=2), places

    def _keys(
        self, logits: Float[Array, "B T N"], noise: Float[Array, "#B #T N"], depths: slice
    ) -> tuple[Float[Array, "B T N"], Bool[Array, "B _ 1"]]:
        """The scores whose largest is picked at some depths, and which include noise, in a step with a sampled row."""
        scores = scaled_scores(logits, self.sampling)
        c = jnp.ones((1, 1, 1))
        if self.sharpness is not None:
            c = jnp.asarray(SHARPNESS)[self.sharpness[depths]][None, :, None]
        with_noise = (self.sampling.temperature[:, None, None] > 0) & jnp.isfinite(c)
        return jnp.where(with_noise, jnp.where(jnp.isfinite(c), c, 1.0) * scores + noise, scores), with_noise

    def allowed(
        self,
        logits: Float[Array, "B T N"],
        *,
        before: Int[Array, "B P"] | None = None,
        seen: Bool[Array, "#B T P"] | None = None,
        forbidden: tuple[int, ...] = (),
        vocabulary: Int[Array, " N"] | None = None,
    ) -> Float[Array, "B T N"]:
        """The logits under the row's penalties, minus infinity for what must not be chosen; arguments as in `tokens`.
        `seen` says which of the tokens before count for which logits; None is all for all. Where a row may not end yet,
        no logits here may end it, whatever their depth: that is exact at depth 0, and deeper ones are proposals."""
        if before is not None and seen is None:
            seen = jnp.ones((1, logits.shape[1], before.shape[1]), bool)
        logits = self._penalised(logits, before, seen, vocabulary=vocabulary, depth=jnp.zeros((1, 1), jnp.int32))
        ids = jnp.arange(logits.shape[-1]) if vocabulary is None else vocabulary
        if forbidden:
            taken = jnp.any(ids[:, None] == jnp.asarray(forbidden)[None], axis=1)
            logits = jnp.where(taken[None, None], -jnp.inf, logits)
        return self.masked(logits, vocabulary)

    def _penalised(
        self,
        logits: Float[Array, "B T N"],
        before: Int[Array, "B P"] | None,
        seen: Bool[Array, "#B T P"] | None = None,
        *,
        vocabulary: Int[Array, " N"] | None = None,
        depth: Int[Array, "#B #T"] | None = None,
    ) -> Float[Array, "B T N"]:
        """See `penalties.penalise`."""
        where = {"vocabulary": vocabulary, "vocab_size": self.noise.shape[2], "stops": self.stops, "depth": depth}
        return penalise(logits, self.penalties, self.history, self.known, before, seen, **where)

    def _noise(self, depth: int, count: int, vocabulary: Int[Array, " N"] | None) -> Float[Array, "B T N"]:
        """Of so many depths, for the tokens of a vocabulary."""
        noise = self.noise[:, depth : depth + count]
        return noise if vocabulary is None else noise[:, :, vocabulary]

    def for_drafting(self, proposals: Proposals, calibration: Calibration) -> "Choice":
        """The same for a drafter.

        "coupled" adds the target's noise to the draft scores, so that draft and target tend to pick the
        same token at any temperature; "calibrated" sharpens the scores first, by what was learnt; "argmax" adds no
        noise; "independent" adds noise of its own.
        """
        own = self.replace(greedy=calibration.greedy)
        if proposals == "calibrated":
            return own.replace(sharpness=calibration.best)
        if proposals == "argmax":
            return own.replace(plain=True)
        if proposals == "independent":
            other = self.sampling.replace(key=jax.vmap(lambda k: jax.random.fold_in(k, 2**31))(self.sampling.key))
            positions = self.known[:, None] + jnp.arange(self.noise.shape[1])[None]
            return own.replace(noise=gumbel_noise(other, positions, self.noise.shape[2]))
        return own

    def masked(
        self, logits: Float[Array, "B T N"], vocabulary: Int[Array, " N"] | None = None
    ) -> Float[Array, "B T N"]:
        """Minus infinity for ids that are no token of the tokenizer."""
        if self.decodable is None:
            return logits
        decodable = self.decodable if vocabulary is None else self.decodable[vocabulary]
        return jnp.where(decodable[None, None], logits, -jnp.inf)


def _renamed(ranked: Ranked, lessons: Lessons, ids: Callable[[Array], Array]) -> tuple[Ranked, Lessons]:
    """Places as the ids of their tokens."""
    of = lambda places: None if places is None else ids(places)
    return ranked._replace(tokens=ids(ranked.tokens)), lessons.replace(
        trials=of(lessons.trials), tokens=of(lessons.tokens)
    )
