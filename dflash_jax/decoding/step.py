"""The speculative step and its device-side loop. No model, family or kernel is named here.

Shapes: B rows, T verify width, P = T - 1 proposals, V vocabulary, Q stop tokens, M steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.cache import Block, Cache, commit
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.logprobs import Logprobs, log_probabilities
from dflash_jax.decoding.penalties import History, Penalties, empty_history, no_penalties, penalise, remember
from dflash_jax.decoding.sampling import Sampling, first_argmax, greedy_rows, gumbel_noise, select

Proposals = Literal["coupled", "argmax", "independent"]


class Target(Protocol):
    """What the algorithm asks of a target model, a pytree of its parameters (see `target.Target`)."""

    @property
    def config(self) -> DecoderConfig: ...
    def init_cache(self, rows: int, slots: int) -> Cache: ...
    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        visible: Any,
        cache: Cache,
        *,
        taps: tuple[int, ...] = (),
        row: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T FD"], tuple[Block, ...]]: ...
    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]: ...


class Drafter(Protocol):
    """What the algorithm asks of a drafter, likewise (see `drafter.Drafter`)."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def init_cache(self, rows: int, slots: int) -> Cache: ...
    def proposals(self, block_size: int) -> int: ...
    def logits(self, target: Any, anchor: Int[Array, " B"], cache: Cache, block_size: int) -> Float[Array, "B P V"]: ...
    def context(
        self,
        features: Float[Array, "B T FD"],
        positions: Int[Array, "B T"],
        cache: Cache,
        *,
        row: Int[Array, ""] | int = 0,
    ) -> tuple[Block, ...]: ...


class State(struct.PyTreeNode):
    """Everything a decoding batch carries from step to step; donated to every program.

    Attributes:
        anchor: last committed token of each row. Its keys and values are not in the caches yet: it sits
            at position `target_cache.lengths`.
        remaining: tokens each row may still commit; 0 is an idle row.
        stop_tokens: tokens that end a row, padded with -1.
        sampling, penalties: settings of each row.
        history: tokens of each row up to its anchor, which penalties look at.
        scored: rows that want log-probabilities.
        target_cache: holds exactly the positions before the anchor.
        draft_cache: the same positions, projected from target features; None without a drafter. It falls behind in
            rows that are read or decoded without the drafter.
    """

    anchor: Int[Array, " B"]
    remaining: Int[Array, " B"]
    stop_tokens: Int[Array, "B Q"]
    sampling: Sampling
    penalties: Penalties
    history: History
    scored: Bool[Array, " B"]
    target_cache: Cache
    draft_cache: Cache | None


class Committed(struct.PyTreeNode):
    """Tokens of one step: the first `count` of each row's `tokens` (0 for an idle row).

    Attributes:
        logprobs: of the same positions; None in a program that serves none.
    """

    tokens: Int[Array, "B T"]
    count: Int[Array, " B"]
    logprobs: Logprobs | None = None


class Verified(NamedTuple):
    """What a verify pass leaves to be committed.

    Attributes:
        positions: absolute positions of the block.
        features: outputs of the tapped target layers, side by side.
        blocks: fresh keys and values of every target layer.
    """

    positions: Int[Array, "B T"]
    features: Float[Array, "B T FD"]
    blocks: tuple[Block, ...]


class RowSettings(NamedTuple):
    """Settings of one row at admission; the fields are those of `State` without their row axis."""

    max_new_tokens: Int[Array, ""]
    stop_tokens: Int[Array, " Q"]
    sampling: Sampling
    penalties: Penalties
    scored: Bool[Array, ""]


Draft = Callable[[State, Float[Array, "B T V"]], Int[Array, "B P"]]
Verify = Callable[[State, Int[Array, "B T"]], tuple[Float[Array, "B T V"], "Verified"]]
Commit = Callable[[State, "Verified", Int[Array, " B"]], State]


def init_state(target: Target, drafter: Drafter | None, rows: int, slots: int, stop_width: int) -> State:
    """An idle batch of `rows` rows, each with room for `slots` committed tokens."""
    return State(
        anchor=jnp.zeros(rows, jnp.int32),
        remaining=jnp.zeros(rows, jnp.int32),
        stop_tokens=jnp.full((rows, stop_width), -1, jnp.int32),
        sampling=greedy_rows(rows),
        penalties=no_penalties(rows),
        history=empty_history(rows, slots),
        scored=jnp.zeros(rows, jnp.bool_),
        target_cache=target.init_cache(rows, slots),
        draft_cache=drafter.init_cache(rows, slots) if drafter else None,
    )


def speculative_step(
    draft: Draft,
    verify: Verify,
    commit: Commit,
    vocab_size: int,
    width: int,
    state: State,
    *,
    logprobs: int | None = None,
) -> tuple[State, Committed]:
    """One round: draft a block, verify it, accept its longest correct prefix plus one token, commit.

    The tokens are the target's own whatever is proposed: every position's token is chosen from the
    target's logits, and a proposal only decides whether the next position may be read as well.

    Args:
        draft: proposes P = width - 1 tokens per row; gets the noise of the positions they are for.
        verify: the target's logits of `[anchor, proposals]`, and what is to be committed.
        commit: writes the first `count` of these positions to the caches.
        vocab_size, width: V and T.
        state: consumed.
        logprobs: alternatives to tell the log-probabilities of; None tells none.
    """
    state = _forget_idle_rows(state)
    positions = state.target_cache.lengths[:, None] + 1 + jnp.arange(width)[None]
    noise = gumbel_noise(state.sampling, positions, vocab_size)
    proposals = draft(state, noise)
    logits, verified = verify(state, jnp.concatenate([state.anchor[:, None], proposals], axis=1))
    first = state.target_cache.lengths + 1
    scores = penalise(logits, state.penalties, state.history, first, proposals)
    tokens = select(scores, noise, state.sampling)
    count, remaining = accept(tokens, proposals, state.remaining, state.stop_tokens)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    told = None if logprobs is None else log_probabilities(logits, tokens, state.scored, logprobs)
    state = commit(state, verified, count).replace(
        anchor=jnp.where(count > 0, last, state.anchor),
        remaining=remaining,
        history=remember(state.history, tokens, first, count),
    )
    return state, Committed(tokens, count, told)


def _forget_idle_rows(state: State) -> State:
    """Sets the lengths of idle rows to 0, and their settings to those that cost nothing: a finished row must not count
    where a step costs the longest row, or what any row asks for."""
    busy = state.remaining > 0
    forget = lambda x, idle: jnp.where(busy, x, idle)

    def emptied(cache: Cache) -> Cache:
        return cache.replace(lengths=forget(cache.lengths, 0))

    return state.replace(
        target_cache=emptied(state.target_cache),
        draft_cache=None if state.draft_cache is None else emptied(state.draft_cache),
        sampling=state.sampling.replace(temperature=forget(state.sampling.temperature, 0.0)),
        penalties=jax.tree.map(forget, state.penalties, no_penalties(busy.shape[0])),
        scored=state.scored & busy,
    )


def accept(
    tokens: Int[Array, "B T"],
    proposals: Int[Array, "B P"],
    remaining: Int[Array, " B"],
    stop_tokens: Int[Array, "B Q"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the chosen `tokens` each row commits, and how many it may commit afterwards.

    The run of correct proposals plus one, cut behind the first stop token and at the budget.
    """
    matched = jnp.cumprod((tokens[:, :-1] == proposals).astype(jnp.int32), axis=1)
    count = jnp.minimum(jnp.sum(matched, axis=1) + 1, remaining)
    stops = jnp.any(tokens[:, :, None] == stop_tokens[:, None, :], axis=-1)
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    stopped = until_stop <= count
    count = jnp.minimum(count, until_stop).astype(jnp.int32)
    return count, jnp.where(stopped, 0, remaining - count).astype(jnp.int32)


def drafting(target: Target, drafter: Drafter, block_size: int, proposals: Proposals) -> Draft:
    """Proposes with one pass of the drafter.

    "coupled" adds the target's noise to the draft scores, so that draft and target tend to pick the
    same token at any temperature; "argmax" adds none; "independent" adds noise of its own.
    """

    def draft(state: State, noise: Float[Array, "B T V"]) -> Int[Array, "B P"]:
        assert state.draft_cache is not None
        logits = drafter.logits(target, state.anchor, state.draft_cache, block_size)
        logits = penalise(logits, state.penalties, state.history, state.target_cache.lengths + 1)
        noise = noise[:, : logits.shape[1]]
        if proposals == "argmax":
            return first_argmax(logits)
        if proposals == "independent":
            own = state.sampling.replace(key=jax.vmap(lambda k: jax.random.fold_in(k, 2**31))(state.sampling.key))
            positions = state.target_cache.lengths[:, None] + 1 + jnp.arange(logits.shape[1])[None]
            noise = gumbel_noise(own, positions, logits.shape[-1])
        return select(logits, noise, state.sampling)

    return draft


def verifying(target: Target, drafter: Drafter | None) -> Verify:
    """Scores a block with one causal pass of the target."""
    taps = drafter.taps if drafter else ()

    def verify(state: State, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T V"], Verified]:
        positions = state.target_cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
        hidden, features, blocks = target.forward(tokens, positions, None, state.target_cache, taps=taps)
        return target.unembed(hidden), Verified(positions, features, blocks)

    return verify


def committing(drafter: Drafter | None) -> Commit:
    """Commits a block to the target cache, and its features to the draft cache."""

    def keep(state: State, verified: Verified, count: Int[Array, " B"]) -> State:
        state = state.replace(target_cache=commit(state.target_cache, verified.blocks, count))
        if drafter is None:
            return state
        assert state.draft_cache is not None
        context = drafter.context(verified.features, verified.positions, state.draft_cache)
        return state.replace(draft_cache=commit(state.draft_cache, context, count))

    return keep


def chain_step(
    target: Target, drafter: Drafter | None, block_size: int, proposals: Proposals, logprobs: int | None = None
) -> Callable[[State], tuple[State, Committed]]:
    """`speculative_step` of a target and a drafter; without a drafter, one autoregressive token.

    A `block_size` of 0 does not draft either, but keeps the draft cache up to date for later steps that do.
    """
    if drafter is None or block_size == 0:
        width, draft = 1, lambda state, noise: jnp.zeros((state.anchor.shape[0], 0), jnp.int32)
    else:
        width, draft = drafter.proposals(block_size) + 1, drafting(target, drafter, block_size, proposals)
    models = draft, verifying(target, drafter), committing(drafter)
    return partial(speculative_step, *models, target.config.vocab_size, width, logprobs=logprobs)


def run(
    step: Callable[[State], tuple[State, Committed]],
    state: State,
    max_steps: Int[Array, ""],
    leave_on_finish: Bool[Array, ""],
    capacity: int,
) -> tuple[State, Committed]:
    """Steps on the device until the budget is spent, all rows are idle, or a row finished and that is asked for.

    Returns:
        The state, and the tokens of each step stacked [M, B, T] / [M, B], M = `capacity` >= `max_steps`;
        counts of steps not taken are 0.
    """
    shapes = jax.eval_shape(step, state)[1]
    trace = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shapes)
    running = state.remaining > 0

    def going(carry) -> Bool[Array, ""]:
        i, state, _ = carry
        finished = jnp.any(running & (state.remaining == 0))
        return (i < max_steps) & jnp.any(state.remaining > 0) & ~(leave_on_finish & finished)

    def once(carry):
        i, state, trace = carry
        state, committed = step(state)
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), trace, committed)

    _, state, trace = jax.lax.while_loop(going, once, (jnp.int32(0), state, trace))
    return state, trace
