"""The parts of a step, each looped on the device and timed."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.cache import Block, Cache
from dflash_jax.decoding.step import (
    State,
    Verified,
    chain_step,
    committing,
    drafting,
    init_state,
    verifying,
)
from dflash_jax.drafters.dflash import Drafter
from dflash_jax.infer.engine import Engine
from dflash_jax.infer.programs import block_compiler_options
from dflash_jax.infer.rows import STOP_WIDTH
from dflash_jax.target import Target


class StepTimes:
    """Times of one autoregressive step, one fused speculative step, and its draft, verify and commit.

    Every part runs `loops` times inside one compiled loop with the engines' own batch and cache sizes and
    `length` committed positions a row, at one `temperature`.
    """

    def __init__(self, plain: Engine, speculative: Engine, length: int, loops: int = 30, *, temperature: float = 0.0):
        target, drafter = speculative.target, speculative.drafter
        if drafter is None:
            raise ValueError("the parts of a speculative step need a block size that proposes tokens")
        block, proposals, width = speculative.block_size, speculative.proposals, speculative.width
        self._parts = {
            "autoregressive": _Looped(
                partial(_fused, block=1, proposals=proposals), target, None, plain, length, loops, temperature
            )
        }
        for name, step in {
            "speculative": partial(_fused, block=block, proposals=proposals),
            "draft": partial(_draft, block=block, proposals=proposals),
            "verify": partial(_verify, width=width),
            "commit": partial(_commit, width=width),
        }.items():
            self._parts[name] = _Looped(step, target, drafter, speculative, length, loops, temperature)
        self._times: dict[str, list[float]] = {name: [] for name in self._parts}
        self.samples = 0

    def sample(self) -> None:
        """Times every part once."""
        self.samples += 1
        for name, part in self._parts.items():
            self._times[name].append(part.seconds())

    def seconds(self) -> dict[str, float]:
        """The median of each part."""
        return {name: sorted(values)[len(values) // 2] for name, values in self._times.items()}


class _Looped:
    """One part, compiled into a loop whose state starts at `length` committed positions."""

    def __init__(
        self,
        step: Callable,
        target: Target,
        drafter: Drafter | None,
        engine: Engine,
        length: int,
        loops: int,
        temperature: float,
    ):
        length = min(length, engine.max_length - engine.width)
        options = block_compiler_options() if drafter else None

        def loop(target: Target, drafter: Drafter | None, state: State) -> State:
            return jax.lax.fori_loop(0, loops, lambda _, s: _at(step(target, drafter, s), length), state)

        self._arguments, self._loops = (target, drafter), loops
        state = _at(init_state(target, drafter, engine.slots, engine.max_length, STOP_WIDTH), length)
        self._state = state.replace(
            remaining=jnp.full(engine.slots, jnp.iinfo(jnp.int32).max, jnp.int32),
            sampling=state.sampling.replace(temperature=jnp.full(engine.slots, temperature)),
        )
        self._program = jax.jit(loop, donate_argnums=2, compiler_options=options)
        self.seconds()

    def seconds(self) -> float:
        begin = time.perf_counter()
        self._state = jax.block_until_ready(self._program(*self._arguments, self._state))
        return (time.perf_counter() - begin) / self._loops


def _at(state: State, length: int) -> State:
    """The state with every row back at `length`, so that each iteration does the same work."""

    def back(cache: Cache) -> Cache:
        return cache.replace(lengths=jnp.minimum(cache.lengths, 0) + length)

    draft_cache = back(state.draft_cache) if state.draft_cache else None
    return state.replace(target_cache=back(state.target_cache), draft_cache=draft_cache)


def _fused(target: Target, drafter: Drafter | None, state: State, *, block: int, proposals: Any) -> State:
    return chain_step(target, drafter, block, proposals)(state)[0]


def _draft(target: Target, drafter: Drafter, state: State, *, block: int, proposals: Any) -> State:
    width = drafter.config.proposals(block) + 1
    noise = jnp.zeros((state.anchor.shape[0], width, target.config.vocab_size))
    tokens = drafting(target, drafter, block, proposals)(state, noise)
    return state.replace(anchor=tokens[:, -1])  # the next iteration depends on this one


def _verify(target: Target, drafter: Drafter, state: State, *, width: int) -> State:
    tokens = jnp.broadcast_to(state.anchor[:, None], (state.anchor.shape[0], width))
    logits, _ = verifying(target, drafter)(state, tokens)
    return state.replace(anchor=jnp.max(jnp.argmax(logits, axis=-1), axis=1).astype(jnp.int32))


def _commit(target: Target, drafter: Drafter, state: State, *, width: int) -> State:
    # Keys, values and features of the right shapes that change with every iteration.
    rows = state.anchor.shape[0]
    value = (state.anchor[:, None, None] % 7).astype(target.dtype)
    features = len(drafter.config.target_layer_ids) * target.config.hidden_size
    heads, size = target.config.num_key_value_heads, target.config.head_dim
    fresh = jnp.broadcast_to(value[..., None], (rows, heads, width, size))
    positions = state.target_cache.lengths[:, None] + jnp.arange(width)[None]
    blocks = tuple(Block(fresh, fresh) for _ in state.target_cache.entries)
    verified = Verified(positions, jnp.broadcast_to(value, (rows, width, features)), blocks)
    state = committing(drafter)(state, verified, 1 + state.anchor % width)
    return state.replace(anchor=state.anchor + 1)
