"""How a step chooses tokens: everything but the logits.

Target and drafter choose through the same object, so settings, penalties and noise are applied the same way.
Shapes: B rows, T block positions, P proposed tokens, W positions with noise, V tokens that can be chosen, N ids of the
target.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.automata import FREE, Automata, Walk
from dflash_jax.decoding.calibration import Calibration
from dflash_jax.decoding.penalties import History, Penalties
from dflash_jax.decoding.proposal import Block, Proposal
from dflash_jax.decoding.sampling import (
    Sampling,
    first_argmax,
    gumbel_noise,
    if_any,
    perturbed_scores,
    scaled_scores,
    select,
)
from dflash_jax.packing import Packing

RANKS = 16  # tokens of a place of a tree
BEST = 10  # places of a depth from which every drafter goes on
Proposals = Literal["calibrated", "coupled", "argmax", "independent"]


class Choice(struct.PyTreeNode):
    """Settings, history and noise of one step, for the tokens that can be chosen.

    Those are all ids of the target, or, once `restricted`, the tokens of a drafter: logits, noise and places are then
    in the drafter's own numbering, and `ids` gives the target's.

    Attributes:
        sampling, penalties, history: of every row.
        rows: of `history` and `known`, whose each row is; None is its own.
        known: tokens of the history that count; the next one has this position.
        noise: by depth: of position `known + d`. All nodes of a tree at one depth share it.
        decodable: which tokens may be chosen; None is all.
        plain: whether the best penalized score is taken, without temperature, filters and noise.
        nodes: of the tree that a drafter is to propose; 0 is a chain.
        scored: whether a chain needs scores, too.
        sharpness: which of `calibration.SHARPNESS` to use at each depth; None does without.
        reliability: a and b of each depth, for greedy and for sampled rows (see `calibration`); None does without.
        stops: stop tokens of every row, padded with -1, which `Penalties.min_tokens` holds back; None holds back none.
        vocabulary: the target's id of each token, ascending; None is 0, 1, 2, ...
        vocab_size: ids of the target, where there is a vocabulary.
        automata, walk: the constraints of rows, and where each is; None in a program that serves none.
    """

    sampling: Sampling
    penalties: Penalties
    history: History
    known: Int[Array, " B"]
    noise: Float[Array, "B W V"]
    decodable: Bool[Array, " V"] | None
    plain: bool = struct.field(pytree_node=False, default=False)
    nodes: int = struct.field(pytree_node=False, default=0)
    scored: bool = struct.field(pytree_node=False, default=False)
    sharpness: Int[Array, " D"] | None = None
    reliability: Float[Array, "2 D 2"] | None = None
    stops: Int[Array, "B Q"] | None = None
    vocabulary: Int[Array, " V"] | None = None
    vocab_size: int | None = struct.field(pytree_node=False, default=None)
    automata: Automata | None = None
    walk: Walk | None = None
    rows: Int[Array, " B"] | None = None

    @property
    def ranks(self) -> int:
        """Tokens of a place that a tree may have: a few, unless it is wider than it is deep. (Of more, XLA sorts the
        whole vocabulary on GPUs.)"""
        depth = self.noise.shape[1] - 1
        return RANKS if self.nodes <= RANKS + RANKS * BEST * (depth - 1) else self.nodes

    @property
    def constrained(self) -> Bool[Array, " B"]:
        """Rows that have a constraint; there must be automata."""
        assert self.walk is not None
        return self.walk.state != FREE

    def restricted(self, vocabulary: Int[Array, " M"] | None = None, *, forbidden: tuple[int, ...] = ()) -> "Choice":
        """The same for a drafter that can propose some tokens only.

        Args:
            vocabulary: the target's id of each of its tokens, ascending; None is all.
            forbidden: ids of the target that are never proposed, such as a mask token.

        Raises:
            ValueError: it is restricted to a vocabulary already.
        """
        if self.vocabulary is not None:
            raise ValueError(
                "the choice is restricted to a vocabulary already; restrict the one that `propose` is given"
            )
        noise, decodable, size = self.noise, self.decodable, self.noise.shape[2]
        ids = jnp.arange(size) if vocabulary is None else vocabulary
        if vocabulary is not None:
            noise, decodable = noise[:, :, vocabulary], None if decodable is None else decodable[vocabulary]
        if forbidden:
            free = jnp.all(ids[:, None] != jnp.asarray(forbidden)[None], axis=1)
            decodable = free if decodable is None else free & decodable
        whole = None if vocabulary is None else size
        return self.replace(noise=noise, decodable=decodable, vocabulary=vocabulary, vocab_size=whole)

    def ids(self, tokens: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The target's ids of tokens."""
        return tokens if self.vocabulary is None else self.vocabulary[tokens]

    def for_block(
        self, logits: Float[Array, "b t V"], block: Block, states: Int[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """The target's token after every position of a block, each given its own ancestors, and the states of the rows'
        automata there. If only some are verified, the logits are of these, and other tokens are arbitrary."""
        if block.packing is not None:
            return self._packed(block.packing, logits, block, states)
        if block.tree is None:
            seen, noise = None, self.noise[:, : logits.shape[1]]
        else:
            seen = block.tree.ancestors[:, :, 1:]
            noise = jnp.take_along_axis(self.noise, block.tree.depth[:, :, None], axis=1)
        logits = self._penalised(logits, block.proposal.tokens, seen, states=states)
        return select(self.masked(logits, states), noise, self.sampling)

    def _packed(
        self, packing: Packing, logits: Float[Array, "B N V"], block: Block, states: Int[Array, "B T"] | None
    ) -> Int[Array, "B T"]:
        """The same where each verified position is a row of its own with one position."""
        B, T = block.tokens.shape
        of_each = lambda x: x.reshape(-1, *x.shape[2:])
        of_rows = lambda x: of_each(packing.of_rows(x))
        depth = packing.pack(jnp.broadcast_to(block.depth, (B, T))).reshape(packing.rows.shape)
        if block.tree is None:
            seen = jnp.arange(T - 1)[None] < of_each(packing.columns)[:, None]
        else:
            seen = of_each(packing.pack(block.tree.ancestors[:, :, 1:]))
        alone = self.replace(
            sampling=jax.tree.map(of_rows, self.sampling),
            penalties=jax.tree.map(of_rows, self.penalties),
            stops=None if self.stops is None else of_rows(self.stops),
            rows=packing.rows.reshape(-1),
        )
        noise, proposed = of_each(packing.at(self.noise, depth))[:, None], of_rows(block.proposal.tokens)
        states = None if states is None else of_each(packing.pack(states))[:, None]
        logits = alone._penalised(of_each(logits)[:, None], proposed, seen[:, None], states=states)
        chosen = select(alone.masked(logits, states), noise, alone.sampling)
        return packing.spread(chosen.reshape(B, -1))

    def states(self, proposal: Proposal) -> Int[Array, "B T"] | None:
        """The state of each row's automaton after the anchor and after each node."""
        if self.automata is None or self.walk is None:
            return None
        automata, walk, (rows, nodes) = self.automata, self.walk, proposal.tokens.shape

        def walked() -> Int[Array, "B T"]:
            if proposal.parents is None:
                return walk.along(automata, proposal.tokens)
            return walk.in_tree(automata, proposal.tokens, proposal.parents, proposal.depth)

        return if_any(self.constrained, walked, lambda: jnp.full((rows, nodes + 1), FREE, jnp.int32))

    def following(self, states: Int[Array, "B T"] | None, tokens: Int[Array, "B T"]) -> Int[Array, "B T"] | None:
        """The states after further tokens, the target's ids."""
        if self.automata is None or self.walk is None or states is None:
            return None
        return self.automata.following(states, self.walk.automaton, tokens)

    def chain_scores(
        self, logits: Float[Array, "B T V"], following: Int[Array, "B P"], states: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """What the target's tokens after a chain are the largest of, given the tokens between its positions, and the
        states of the rows' automata there (see `allowed`)."""
        logits = self.masked(self._penalised(logits, following, states=states), states)
        return perturbed_scores(logits, self.noise, self.sampling)

    def sampled_scores(
        self,
        logits: Float[Array, "B T V"],
        tokens: Int[Array, "B T"],
        following: Int[Array, "B P"] | None = None,
        states: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Scores whose softmax is the distribution that these tokens of the target were sampled from, after a chain
        (see `chain_scores`). That of a greedy row is all in its token. A filter's cut, found again in another part of
        a program, may differ in its last bit: the token that was sampled counts as kept."""
        scores = self.masked(self._penalised(logits, following, states=states), states)
        temperature = self.sampling.temperature[:, None, None]
        is_chosen = jnp.arange(scores.shape[-1])[None, None] == tokens[..., None]
        best = jnp.max(scores, axis=-1, keepdims=True)
        whole = (scores - best) / jnp.where(temperature > 0, temperature, 1.0)
        sampled = jnp.where(is_chosen, whole, scaled_scores(scores, self.sampling))
        return jnp.where(temperature > 0, sampled, jnp.where(is_chosen, 0.0, -jnp.inf))

    def tokens(
        self,
        logits: Float[Array, "B T V"],
        *,
        depth: int = 0,
        before: Int[Array, "B P"] | None = None,
        states: Int[Array, "B T"] | None = None,
    ) -> Int[Array, "B T"]:
        """The target's ids of tokens for the depths `depth..depth+T-1`, each from its own logits.

        Args:
            before: ids proposed at smaller depths, which penalties count.
            states: see `allowed`.
        """
        logits = self.allowed(logits, before, states=states)
        noise = self.noise[:, depth : depth + logits.shape[1]]
        return self.ids(first_argmax(logits) if self.plain else select(logits, noise, self.sampling))

    def allowed(
        self,
        logits: Float[Array, "B T V"],
        before: Int[Array, "B P"] | None = None,
        seen: Bool[Array, "#B T P"] | None = None,
        states: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits under the row's penalties, minus infinity for what must not be chosen.

        Where a row may not end yet, no logits here may end it, whatever their depth: that is exact at depth 0, and
        deeper ones are proposals.

        Args:
            before: ids that are proposed before, which penalties count.
            seen: which of them count for which logits; None is all for all.
            states: of the rows' automata at each of the logits; None asks no automaton.
        """
        if before is not None and seen is None:
            seen = jnp.ones((1, logits.shape[1], before.shape[1]), bool)
        depth = jnp.zeros((1, 1), jnp.int32)
        return self.masked(self._penalised(logits, before, seen, depth=depth, states=states), states)

    def masked(self, logits: Float[Array, "B T V"], states: Int[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        """Minus infinity for what must not be chosen: ids that are no token of the tokenizer, and what these states of
        the rows' automata do not allow."""
        if self.decodable is not None:
            logits = jnp.where(self.decodable[None, None], logits, -jnp.inf)
        if self.automata is None or states is None:
            return logits
        return jnp.where(self.automata.allowed(states, self.vocabulary, logits.shape[-1]), logits, -jnp.inf)

    def _penalised(
        self,
        logits: Float[Array, "B T V"],
        before: Int[Array, "B P"] | None,
        seen: Bool[Array, "#B T P"] | None = None,
        *,
        depth: Int[Array, "#B #T"] | None = None,
        states: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of each row under its penalties, without its stop tokens while it has fewer than `min_tokens`;
        costs next to nothing where no row asks for either.

        Args:
            before: tokens that are not in the history yet; without them, all positions see the history alone.
            seen: which of them stand before a position (the ancestors of a tree's node); None is a chain, where
                position i sees the first i.
            depth: how many tokens stand between the history and each position; None is as many as it has seen.
            states: see `allowed`; where an automaton allows nothing but stop tokens, these are not held back.
        """
        own = lambda x: x if self.rows is None else x[self.rows]
        penalties, history, known, prompt = self.penalties, self.history, own(self.known), own(self.history.prompt)
        rows, positions, size = logits.shape
        ids = jnp.arange(size) if self.vocabulary is None else self.vocabulary
        row = jnp.arange(self.known.shape[0])[:, None]  # in the condition, it would change the last bits of other parts
        if depth is None:
            depth = jnp.arange(positions)[None] if seen is None else jnp.sum(seen, axis=2, dtype=jnp.int32)
        least = penalties.min_tokens[:, None]
        early = jnp.broadcast_to((known - prompt)[:, None] + depth < least, (rows, positions)) & (least > 0)

        def applied() -> Float[Array, "B T V"]:
            counts = history.occurrences(self.known, self.vocab_size or size, row)
            choosable = lambda x: x if self.vocabulary is None else x[:, self.vocabulary]
            read, written = (own(choosable(count))[:, None] for count in counts)
            if before is not None:
                # One comparison after the other, which the compiler fuses: nothing of this size is ever in memory.
                index = jnp.arange(before.shape[1] + 1)
                shown = ((index[None, :-1] < index[:, None])[None] if seen is None else seen)[..., None]
                proposed = before[:, None, :, None] == ids[None, None, None]
                written = written + jnp.sum(shown & proposed, axis=2, dtype=jnp.float32)
            setting = lambda x: x[:, None, None]
            divisor = jnp.where((read > 0) | (written > 0), setting(penalties.repetition), 1.0)
            repeated = jnp.where(logits > 0, logits / divisor, logits * divisor)
            present = jnp.where(written > 0, setting(penalties.presence), 0.0)
            penalised = repeated - setting(penalties.frequency) * written - present
            if self.stops is None:
                return penalised
            ends = jnp.any(ids[None, :, None] == self.stops[:, None], axis=2)[:, None]
            may_go_on: Array | bool = True
            if self.automata is not None and states is not None:
                allowed = self.automata.allowed(states, self.vocabulary, size)
                may_go_on = jnp.any(allowed & ~ends, axis=2, keepdims=True)
            return jnp.where(early[:, :, None] & ends & may_go_on, -jnp.inf, penalised)

        some = (penalties.repetition != 1) | (penalties.presence != 0) | (penalties.frequency != 0)
        if self.stops is not None:
            some |= jnp.any(early, axis=1)
        return if_any(some, applied, lambda: logits)

    def for_drafting(self, proposals: Proposals, calibration: Calibration) -> "Choice":
        """The same for a drafter.

        "coupled" adds the target's noise to the draft scores, so that draft and target tend to pick the
        same token at any temperature; "calibrated" sharpens the scores first, by what was learned; "argmax" adds no
        noise; "independent" adds noise of its own.
        """
        drafting = self.replace(reliability=calibration.weights)
        if proposals == "calibrated":
            return drafting.replace(sharpness=calibration.best)
        if proposals == "argmax":
            return drafting.replace(plain=True)
        if proposals == "independent":
            other = self.sampling.replace(key=jax.vmap(lambda k: jax.random.fold_in(k, 2**31))(self.sampling.key))
            positions = self.known[:, None] + jnp.arange(self.noise.shape[1])[None]
            return drafting.replace(noise=gumbel_noise(other, positions, self.noise.shape[2]))
        return drafting
