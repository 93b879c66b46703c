"""The speculative step and its device-side loop. No model, family or kernel is named here.

Shapes: B rows, T block positions, J committed positions of a step, V vocabulary, M steps.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax import cache
from dflash_jax.decoding.automata import FREE, Automata, Walk
from dflash_jax.decoding.budget import within_budget
from dflash_jax.decoding.calibration import Calibration
from dflash_jax.decoding.choice import Choice, Proposals
from dflash_jax.decoding.forecast import Forecast, Limited, forecast, limited
from dflash_jax.decoding.logprobs import Logprobs, log_probabilities
from dflash_jax.decoding.penalties import remember
from dflash_jax.decoding.prompts import Prompts, Read, commit_prompts, first_tokens
from dflash_jax.decoding.proposal import Accepted, Block, Proposal, accept, make_block
from dflash_jax.decoding.sampling import gumbel_noise
from dflash_jax.decoding.state import DraftModel, Query, Seen, State, TargetModel, without_idle_rows
from dflash_jax.models.attention import Inputs
from dflash_jax.packing import joined, parted


class Committed(struct.PyTreeNode):
    """Tokens of one step: the first `count` of each row's `tokens` (0 for an idle row).

    Attributes:
        logprobs: of the same positions; None in a program that serves none.
        first: the first tokens of prompts that were read and ended; None where the step reads none.
        forecast: of a tree, see `Forecast`.
        limited: what a budget left out; None without one.
    """

    tokens: Int[Array, "B J"]
    count: Int[Array, " B"]
    logprobs: Logprobs | None = None
    forecast: Forecast | None = None
    limited: Limited | None = None
    first: "Committed | None" = None


class Verified(NamedTuple):
    """What a verify pass leaves to be committed.

    Attributes:
        block: what was verified.
        features: outputs of the tapped target layers, side by side, at the positions that were.
        fresh: what the pass found for every entry of the target's cache.
        read: of prompts, with the logits after the last token of each; None where it read none.
    """

    block: Block
    features: Float[Array, "b t FD"]
    fresh: tuple[PyTree, ...]
    read: tuple[Read, Float[Array, "R 1 V"]] | None = None


def all_positions(state: State, block: Block) -> Block:
    """The block as it is: all of its positions are verified."""
    return block


class StepFunctions(NamedTuple):
    """The functions that a step is made of.

    Attributes:
        choose: how tokens are chosen in this step.
        propose: nodes after each row's anchor; what they are never changes the output.
        narrow: the block with those of its positions that are verified, if they are not all; nor does that.
        read: commits prompts that were read in the same pass, and begins rows whose prompt has ended, given which
            log-probabilities are served; returns their first tokens. None reads none.
        verify: the target's logits of a block, and what is to be committed of it.
        commit: writes what was accepted to the target's cache and the drafter's state.
    """

    choose: Callable[[State], Choice]
    propose: Callable[[State, Choice], Proposal]
    verify: Callable[[State, Block], tuple[Float[Array, "b t V"], Verified]]
    commit: Callable[[State, Verified, Accepted], State]
    narrow: Callable[[State, Block], Block] = all_positions
    read: Callable[[State, Verified, tuple[int | None, bool]], tuple[State, Committed]] | None = None


def speculative_step(
    functions: StepFunctions, state: State, *, logprobs: int | None = None, sampled_logprobs: bool = False
) -> tuple[State, Committed]:
    """One round: propose a block, verify it, accept its longest correct path plus one token, commit.

    The tokens are the target's own whatever is proposed: every position's token is chosen from the
    target's logits, and a proposal only decides whether the next position may be read as well.
    (Paper section 3; reference `dflash/model.py`, `dflash_generate`.)

    Args:
        functions: the models, as functions.
        state: before the step; it stays valid unless your `jax.jit` donates it.
        logprobs: alternatives to return the log-probabilities of; None returns none.
        sampled_logprobs: whether those in the distribution that tokens are sampled from are returned, too.

    Raises:
        ValueError: a proposal is deeper than its drafter said.
    """
    view = without_idle_rows(state)
    choice = functions.choose(view)
    block = functions.narrow(view, make_block(view.anchor, functions.propose(view, choice)))
    if block.proposal.depth + 1 > choice.noise.shape[1]:
        deep, most = block.proposal.depth, choice.noise.shape[1] - 1
        raise ValueError(f"a proposal may be {most} nodes deep, as its drafter's `depth` says; this one is {deep}")
    logits, verified = functions.verify(view, block)
    states = choice.states(block.proposal)
    chosen, room = choice.for_block(logits, block, states), view.target_cache.room(view.lengths, view.rows)
    accepted, remaining = accept(chosen, block, view.remaining, view.stop_tokens, room)
    tokens, path, count = accepted
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    scores = None
    if logprobs is not None:
        along = _along(logits, block, path)
        sampled = partial(
            choice.sampled_scores, along, tokens, tokens[:, :-1], _states_along(states, path, tokens.shape[1])
        )
        more = sampled if sampled_logprobs else None
        scores = log_probabilities(choice.masked(along), tokens, view.scored, logprobs, more)
    after = functions.commit(view, verified, accepted).replace(
        anchor=jnp.where(count > 0, last, view.anchor),
        lengths=state.lengths + count,
        remaining=remaining,
        history=remember(view.paged_history, tokens, view.lengths + 1, count).replace(pages=None),
        calibration=_calibrated(view, block.proposal, accepted),
        walk=_walked(state, choice, states, accepted, last),
    )
    first, how = None, (logprobs, sampled_logprobs)
    if functions.read is not None:
        after, first = functions.read(after, verified, how)
    return after, Committed(tokens, count, scores, forecast(block.proposal, accepted), limited(block), first)


def _along(x: Float[Array, "b t N"], block: Block, path: Int[Array, "B J"] | None) -> Float[Array, "B J N"]:
    """What was computed of the verified positions of a block, along each row's path."""
    if block.packing is not None:
        places = block.packing.places
        return block.packing.along(x, places if path is None else jnp.take_along_axis(places, path, axis=1))
    return x if path is None else jnp.take_along_axis(x, path[:, :, None], axis=1)


def _states_along(
    states: Int[Array, "B T"] | None, path: Int[Array, "B J"] | None, count: int
) -> Int[Array, "B J"] | None:
    """The states of the rows' automata along each row's path."""
    if states is None:
        return None
    return states[:, :count] if path is None else jnp.take_along_axis(states, path, axis=1)


def _walked(
    state: State, choice: Choice, states: Int[Array, "B T"] | None, accepted: Accepted, last: Int[Array, " B"]
) -> Walk | None:
    """Where the rows are after a step: one token beyond the last accepted position of the block. A row that is idle
    stays where it is."""
    if state.walk is None or states is None:
        return state.walk
    at = jnp.maximum(accepted.count - 1, 0)[:, None]
    at = at if accepted.path is None else jnp.take_along_axis(accepted.path, at, axis=1)
    after = choice.following(jnp.take_along_axis(states, at, axis=1), last[:, None])
    assert after is not None
    return state.walk.replace(state=jnp.where(accepted.count > 0, after[:, 0], state.walk.state))


def _calibrated(state: State, proposal: Proposal, accepted: Accepted) -> Calibration | None:
    """What the step reveals of the drafter: a token is judged if all proposals before it were right. Rows with a
    constraint teach nothing: what nobody can get wrong says nothing of the drafter."""
    if state.calibration is None or proposal.lessons is None:
        return state.calibration
    depth = proposal.depth
    judged = jnp.arange(depth)[None] < accepted.count[:, None]
    if state.walk is not None:
        judged &= state.walk.state[:, None] == FREE
    right, sampled = accepted.tokens[:, :depth], state.sampling.temperature > 0
    return state.calibration.learn(proposal.lessons, right, accepted.path, judged, sampled)


# --------------------------------------------------------------------------------------------------
# Its functions for a target and a drafter


def make_choose(target: TargetModel, depth: int, automata: Automata | None = None) -> Callable[[State], Choice]:
    """A function State -> `Choice`: settings, and noise [B, depth + 1, V] of `depth` nodes and the token after them.
    `automata` are those of constraints, if there may be any."""

    def choose(state: State) -> Choice:
        positions = state.lengths[:, None] + 1 + jnp.arange(depth + 1)[None]
        noise = gumbel_noise(state.sampling, positions, target.config.vocab_size)
        settings = state.sampling, state.penalties, state.paged_history, state.lengths + 1
        constraints = {"automata": automata, "walk": state.walk}
        return Choice(*settings, noise, target.decodable, stops=state.stop_tokens, **constraints)

    return choose


def make_propose(
    target: TargetModel,
    drafter: DraftModel,
    block_size: int,
    proposals: Proposals,
    nodes: int = 0,
    *,
    scored: bool = False,
) -> Callable[[State, Choice], Proposal]:
    """Proposals of a drafter; see `Choice.for_drafting` for their kinds."""

    def propose(state: State, choice: Choice) -> Proposal:
        assert state.calibration is not None
        drafting = choice.for_drafting(proposals, state.calibration).replace(nodes=nodes, scored=scored)
        query = Query(state.anchor, state.lengths, block_size, state.rows)
        found = drafter.propose(target, state.draft, query, drafting)
        if found.parents is None and found.depth != (promised := drafter.depth(block_size)):
            raise ValueError(
                f"the drafter promises chains of {promised} tokens by its `depth`, and proposes {found.depth}"
            )
        return found

    return propose


def nothing(state: State, choice: Choice) -> Proposal:
    """Proposes no nodes: the step commits one token, as autoregressive decoding does."""
    return Proposal(jnp.zeros((state.anchor.shape[0], 0), jnp.int32))


def verify(
    target: TargetModel, drafter: DraftModel | None, prompts: Prompts | None, state: State, block: Block
) -> tuple[Float[Array, "b t V"], Verified]:
    """Scores a block with one pass of the target, in which a position sees its ancestors; the pass reads prompts, too,
    if there are any."""
    visible, packing = None if block.tree is None else block.tree.ancestors, block.packing
    counts = jnp.where(state.remaining > 0, block.tokens.shape[1], 0) if packing is None else packing.counts
    where = block.positions(state.lengths), visible, state.lengths, state.rows
    inputs = [Inputs(block.tokens, *where, counts=counts, packing=packing)]
    inputs += [] if prompts is None else [prompts.inputs]
    taps = drafter.taps if drafter else ()
    (hidden, features, fresh), *others = target.forward_all(inputs, state.target_cache, taps=taps)
    read = [Read(given, *found) for given, found in zip(inputs[1:], others, strict=True)]
    states = [hidden, *(one.last() for one in read)]
    logits, *after = parted(target.unembed(joined(states)), [x.shape[:2] for x in states])
    return logits, Verified(block, features, fresh, *zip(read, after, strict=True))


def read_prompts(
    target: TargetModel,
    drafter: DraftModel | None,
    prompts: Prompts,
    automata: Automata | None,
    state: State,
    verified: Verified,
    logprobs: tuple[int | None, bool],
) -> tuple[State, Committed]:
    """See `StepFunctions.read`."""
    assert verified.read is not None
    read, logits = verified.read
    state = commit_prompts(target, drafter, state, read)
    state, token, scores = first_tokens(target, state, prompts, logits, automata, *logprobs)
    return state, Committed(token, prompts.last.astype(jnp.int32), scores)


def commit(
    target: TargetModel, drafter: DraftModel | None, state: State, verified: Verified, accepted: Accepted
) -> State:
    """Commits what was accepted to the target's cache, and its features to the drafter's state."""
    _, path, count = accepted
    written = cache.commit(state.target_cache, verified.fresh, state.lengths, count, path=path, rows=state.rows)
    state = state.replace(target_cache=written)
    if drafter is None:
        return state
    tokens, features = verified.block.tokens, _along(verified.features, verified.block, path)
    if path is not None:
        tokens = jnp.take_along_axis(tokens, path, axis=1)
    positions = state.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    seen = Seen(tokens, features, positions, state.lengths, count, state.rows)
    return state.replace(draft=drafter.commit(target, state.draft, seen))


def step_functions(
    target: TargetModel,
    drafter: DraftModel | None,
    block_size: int,
    proposals: Proposals = "calibrated",
    nodes: int = 0,
    automata: Automata | None = None,
    budget: int = 0,
    prompts: Prompts | None = None,
) -> StepFunctions:
    """The step of a target and a drafter.

    Args:
        drafter: None decodes plainly, one token a step.
        block_size: positions per step, the anchor included; 0 proposes nothing, but keeps the drafter's state up to
            date.
        proposals: "calibrated", "coupled", "argmax" or "independent" (docs/sampling.md).
        nodes: number of nodes of a tree besides the anchor; 0 proposes a chain.
        automata: of the constraints that rows may have, where the state has a `walk`.
        budget: positions that are verified of a row on average; the likeliest of all rows are (see `budget`). 0
            verifies all that is proposed.
        prompts: to read in the same pass, of rows that do not decode, after what is committed of them.
    """
    depth, propose, narrow = 0, nothing, all_positions
    if drafter is not None and block_size > 0 and drafter.depth(block_size) > 0:
        depth = drafter.depth(block_size)
        narrower = 0 < budget <= (nodes or depth)
        propose = make_propose(target, drafter, block_size, proposals, nodes, scored=narrower)
        if narrower:
            within = lambda block, state: within_budget(block, state.remaining, budget)
            narrow = lambda state, block: block._replace(packing=within(block, state))
    return StepFunctions(
        make_choose(target, depth, automata),
        propose,
        partial(verify, target, drafter, prompts),
        partial(commit, target, drafter),
        narrow,
        None if prompts is None else partial(read_prompts, target, drafter, prompts, automata),
    )


def run(
    step: Callable[..., tuple[State, Committed]],
    state: State,
    max_steps: Int[Array, ""],
    leave_below: Int[Array, ""],
    capacity: int,
    prompts: Prompts | None = None,
) -> tuple[State, Committed]:
    """Steps on the device until the budget is spent, all rows are idle, or fewer rows decode than `leave_below`.

    Args:
        step: called with the state, and with `prompts` i, if there are any, in step i.

    Returns:
        The state, and the tokens of each step stacked [M, B, J] / [M, B], M = `capacity` >= `max_steps`;
        counts of steps not taken are 0.
    """
    step = jax.jit(step, inline=True)  # traced once, for its shapes and in the loop
    given = lambda i: () if prompts is None else (jax.tree.map(lambda x: x[i], prompts),)
    shapes = jax.eval_shape(step, state, *given(0))[1]
    trace = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shapes)

    def going(carry) -> Bool[Array, ""]:
        i, state, _ = carry
        busy, room = state.remaining > 0, state.target_cache.room(state.lengths, state.rows)
        goes_on = busy if room is None else busy & (room > 0)  # some row has memory to go on
        return (i < max_steps) & (jnp.sum(busy) >= jnp.maximum(leave_below, 1)) & jnp.any(goes_on)

    def once(carry):
        i, state, trace = carry
        state, committed = step(state, *given(i))
        return i + 1, state, jax.tree.map(lambda all, one: all.at[i].set(one), trace, committed)

    _, state, trace = jax.lax.while_loop(going, once, (jnp.int32(0), state, trace))
    return state, trace
