"""The parts of a step, looped on the device and timed: each alone, and all in turn.

Whatever a part needs is of the shapes that the other parts return, filled with random numbers. Tokens are all
different: a block of one token would visit fewer experts than a real one.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.decoding.proposal import Accepted, Block, Proposal, accept, make_block
from dflash_jax.decoding.state import DraftModel, State, init_state
from dflash_jax.decoding.step import StepFunctions, speculative_step, step_functions
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import STOP_WIDTH
from dflash_jax.mesh import entered
from dflash_jax.sharding import pin
from dflash_jax.target import Target

PARTS = ("draft", "verify", "accept", "commit")  # of a fused step
IN_TURN = "parts in turn"
SAMPLES = 9  # of the time of each part in a run


def samples_due(turn: int, turns: int) -> int:
    """How often parts are timed after one of the turns of a run, so that `SAMPLES` spread over all of it."""
    return (turn + 1) * SAMPLES // turns - turn * SAMPLES // turns


class StepTimes:
    """Times of one autoregressive step, one fused speculative step, and its parts.

    Every part runs `loops` times inside one compiled loop with the engines' own batch and cache sizes and
    `length` committed positions a row, at one `temperature`. Blocks of other `widths` are verified as well.

    A part that is looped alone may keep its weights in a cache of the processor, as it cannot in a step. So a fused
    step is compared with its parts in turn: one loop over all of them, each on inputs of its own, kept apart by
    barriers.
    """

    def __init__(
        self,
        plain: Engine,
        speculative: Engine,
        length: int,
        loops: int = 30,
        *,
        temperature: float = 0.0,
        widths: Sequence[int] = (),
    ):
        drafter = speculative.drafter
        if drafter is None:
            raise ValueError("the parts of a speculative step need a block size that proposes tokens")
        proposals, nodes = speculative.config.proposals, speculative.tree
        settings = {"block_size": speculative.block_size, "proposals": proposals, "nodes": nodes}
        where = length, loops, temperature
        self._parts = {"autoregressive": Looped(partial(fused, block_size=0), plain, *where)}
        steps = dict(zip(PARTS, (draft, verify, choose, commit), strict=True))
        width, vocab_size = drafter.depth(speculative.block_size) + 1, speculative.target.config.vocab_size
        noise = (jax.random.gumbel(jax.random.key(0), (speculative.slots, width, vocab_size)),)
        given = {"draft": noise, IN_TURN: noise}
        for name, step in {"speculative": fused, IN_TURN: in_turn, **steps}.items():
            self._parts[name] = Looped(partial(step, **settings), speculative, *where, given.get(name, ()))
        for width in widths:
            narrow = partial(verify, **settings | {"block_size": width})
            self._parts[f"verify {width}"] = Looped(narrow, speculative, *where)
        self._times: dict[str, list[float]] = {name: [] for name in self._parts}

    def sample(self) -> None:
        """Times every part once."""
        for name, part in self._parts.items():
            self._times[name].append(part.seconds())

    def seconds(self) -> dict[str, float]:
        """The median of each part."""
        return {name: sorted(values)[len(values) // 2] for name, values in self._times.items()}

    def fused_over_parts(self) -> float:
        """The time of a fused step over that of its parts in turn: the median over the samples, in each of which both
        were timed within a second or so."""
        ratios = sorted(map(truediv, self._times["speculative"], self._times[IN_TURN]))
        return ratios[len(ratios) // 2]


class Looped:
    """One part, compiled into a loop whose state starts at `length` committed positions; `given` are arguments of the
    part that another part makes."""

    def __init__(
        self,
        step: Callable,
        engine: Engine,
        length: int,
        loops: int,
        temperature: float,
        given: tuple[jax.Array, ...] = (),
    ):
        target, drafter, rows = engine.target, engine.drafter, engine.slots
        length = min(length, engine.max_length - engine.width)
        options = engine.batch.calls.compiler_options(Draft(engine.block_size, engine.tree), rows)

        def made() -> State:
            state = init_state(target, drafter, rows, engine.max_length, STOP_WIDTH)
            return pin(
                state.replace(
                    anchor=_random(state.anchor, target.config.vocab_size),
                    lengths=jnp.full(rows, length, jnp.int32),
                    remaining=jnp.full(rows, jnp.iinfo(jnp.int32).max, jnp.int32),
                    sampling=state.sampling.replace(temperature=jnp.full(rows, temperature)),
                )
            )

        def loop(target: Target, drafter: DraftModel | None, state: State, *given: jax.Array) -> State:
            # Each iteration starts at the same length, and on what the last one left.
            def once(_, state: State) -> State:
                after = step(target, drafter, state, *given)
                return after.replace(lengths=jnp.minimum(after.lengths, 0) + length)

            return pin(jax.lax.fori_loop(0, loops, once, state))

        self._arguments, self._given, self._loops, self._mesh = (target, drafter), given, loops, target.mesh
        with entered(self._mesh):
            self._state = jax.jit(made)()
        self._program = jax.jit(loop, donate_argnums=2, compiler_options=options)
        self.seconds()

    def seconds(self) -> float:
        """Of one step."""
        begin = time.perf_counter()
        with entered(self._mesh):
            self._state = jax.block_until_ready(self._program(*self._arguments, self._state, *self._given))
        return (time.perf_counter() - begin) / self._loops


def fused(target: Target, drafter: DraftModel | None, state: State, **how: Any) -> State:
    """A whole step; with a block of 0 an autoregressive one. `how`: the arguments of `step_functions`."""
    return speculative_step(step_functions(target, drafter, **how), state)[0]


def in_turn(target: Target, drafter: DraftModel, state: State, noise: jax.Array, **how: Any) -> State:
    """The parts of a step, one after the other, with nothing shared."""
    for part in (partial(draft, noise=noise), verify, choose, commit):
        state = jax.lax.optimization_barrier(part(target, drafter, state, **how))
    return state


def draft(target: Target, drafter: DraftModel, state: State, noise: jax.Array | None = None, **how: Any) -> State:
    """What a step does before it verifies, but for the noise, which `choose` makes.

    Without `noise`, numbers that need not be read from memory take its place: to count the bytes of the draft alone.
    """
    parts = step_functions(target, drafter, **how)
    if noise is None:  # not zeros: the compiler would leave out the sum
        shape = jax.eval_shape(parts.choose, state).noise.shape
        noise = jnp.broadcast_to((state.anchor % 7).astype(jnp.float32)[:, None, None], shape)
    choice = parts.choose(state).replace(noise=noise)
    return state.replace(anchor=parts.propose(state, choice).tokens[:, -1])  # the next iteration depends on this one


def verify(target: Target, drafter: DraftModel | None, state: State, **how: Any) -> State:
    """The target's pass over a block, with the choice of tokens of largest logit."""
    parts = step_functions(target, drafter, **how)
    logits, _ = parts.verify(state, _some_block(target, parts, state))
    return state.replace(anchor=jnp.full_like(state.anchor, jnp.max(jnp.argmax(logits, axis=-1))))


def choose(target: Target, drafter: DraftModel, state: State, **how: Any) -> State:
    """The noise of a step, the target's choice of tokens by it, and how many of a block's are accepted."""
    parts = step_functions(target, drafter, **how)
    block = _some_block(target, parts, state)
    like, _ = jax.eval_shape(parts.verify, state, block)
    logits = jnp.broadcast_to((state.anchor[0] % 7).astype(like.dtype), like.shape)
    chosen = parts.choose(state).for_block(logits, block)
    accepted, _ = accept(chosen, block, state.remaining, state.stop_tokens)
    return state.replace(anchor=(state.anchor + accepted.count) % target.config.vocab_size)


def commit(target: Target, drafter: DraftModel, state: State, **how: Any) -> State:
    """What a step does with the tokens that are accepted: between one and all, by row."""
    parts = step_functions(target, drafter, **how)
    filled = _some_block(target, parts, state)
    # What a verify pass returns, as numbers that change with every iteration.
    _, like = jax.eval_shape(parts.verify, state, filled)
    change = (state.anchor[0] % 7).astype(jnp.float32)
    fill = lambda x: jnp.broadcast_to(change.astype(x.dtype), x.shape)
    verified = jax.tree.map(fill, like)._replace(block=filled)
    width = filled.proposal.depth + 1
    path = None if filled.tree is None else jnp.broadcast_to(jnp.arange(width)[None], (state.anchor.shape[0], width))
    accepted = Accepted(filled.tokens[:, :width], path, 1 + state.anchor % width)
    return parts.commit(state, verified, accepted).replace(anchor=state.anchor + 1)


def _some_block(target: Target, parts: StepFunctions, state: State) -> Block:
    """A block of random tokens, of the shape that this round's proposals have."""

    def propose(state: State) -> Proposal:
        return parts.propose(state, parts.choose(state))

    like = jax.eval_shape(propose, state)
    tokens = (_random(like.tokens, target.config.vocab_size) + state.anchor[:, None]) % target.config.vocab_size
    parents = None if like.parents is None else jnp.zeros(like.parents.shape, jnp.int32)
    scores = None if like.scores is None else jnp.zeros(like.scores.shape)
    proposal = like.replace(tokens=tokens, parents=parents, scores=scores)
    return parts.narrow(state, make_block(state.anchor, proposal))


def _random(like: Any, vocab_size: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), like.shape, 0, vocab_size, jnp.int32)
