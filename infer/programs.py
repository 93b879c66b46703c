"""The compiled programs of an engine: decode for some steps, begin a row, read a chunk of its prompt, end it.

Shapes: B rows, C prefill chunk, M steps.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.cache import commit, once_read
from dflash_jax.decoding.choice import Choice, Proposals
from dflash_jax.decoding.logprobs import log_probabilities
from dflash_jax.decoding.penalties import remember_row
from dflash_jax.decoding.sampling import gumbel_noise
from dflash_jax.decoding.state import DraftModel, RowSettings, State, TargetModel, begin_row
from dflash_jax.decoding.step import Committed, make_round, run, speculative_step
from dflash_jax.sharding import pin


def decode_call(
    target: TargetModel,
    drafter: DraftModel | None,
    state: State,
    max_steps: int,
    leave_on_finish: bool,
    *,
    block_size: int,
    proposals: Proposals = "coupled",
    capacity: int,
    logprobs: int | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """`run` of a speculative step as a jitted function and its arguments: one program per batch shape and block size
    (0 proposes nothing). `state` is donated."""
    steps, leave = jnp.asarray(max_steps, jnp.int32), jnp.asarray(leave_on_finish)
    arguments = target, drafter, state, steps, leave, block_size, proposals, capacity, logprobs
    return _decode_program(drafter is not None and block_size > 0), arguments


@cache
def _decode_program(speculative: bool) -> Callable:
    def program(target, drafter, state, max_steps, leave_on_finish, block_size, proposals, capacity, logprobs):
        parts = make_round(target, drafter, block_size, proposals)
        step = partial(speculative_step, parts, logprobs=logprobs)
        state, trace = run(step, state, max_steps, leave_on_finish, capacity)
        return pin(state), trace

    names = ("block_size", "proposals", "capacity", "logprobs")
    options = block_compiler_options() if speculative else None
    return jax.jit(program, static_argnames=names, donate_argnames="state", compiler_options=options)


BLOCK_OPTIONS: dict[str, dict[str, str | bool]] = {
    # XLA hands products to YNNPACK. For one row that is the fastest way; for a block of 16 the older Eigen path takes a
    # quarter less time (benchmarks.md).
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    # Merging a draft layer's products of the same input copies its part of `kv_proj` in every step.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
}


@cache
def block_compiler_options() -> dict[str, str | bool] | None:
    """Compiler options of programs that multiply blocks of rows; None where there are none, or this XLA knows none."""
    options = BLOCK_OPTIONS.get(jax.default_backend())
    if options is None:
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return None
    return options


@partial(jax.jit, donate_argnames="state")
def begin(state: State, row: Int[Array, ""]) -> State:
    """Makes an idle row ready for a new prompt."""
    return pin(begin_row(state, row))


@partial(jax.jit, donate_argnames="state", static_argnames="logprobs")
def prefill(
    target: TargetModel,
    drafter: DraftModel | None,
    state: State,
    row: Int[Array, ""],
    tokens: Int[Array, " C"],
    count: Int[Array, ""],
    last: Bool[Array, ""],
    settings: RowSettings,
    logprobs: int | None = None,
) -> tuple[State, Committed]:
    """Commits the next `count` prompt tokens of one row; the last chunk also chooses the first new token.

    Args:
        row: the row to fill: idle, and begun.
        tokens, count: a chunk, and how many of its tokens are prompt.
        last: whether the prompt ends here: the row then starts decoding.
        settings: of the row.
        logprobs: see `speculative_step`.

    Returns:
        The state, and the first new token [1, 1], which counts if `last`. It belongs to no round.
    """
    lengths = jax.lax.dynamic_slice(state.lengths, (row,), (1,))
    positions = lengths[:, None] + jnp.arange(tokens.shape[0])[None]
    taps = drafter.taps if drafter else ()
    where = positions, None, state.target_cache, lengths
    hidden, features, fresh = target.forward(tokens[None], *where, taps=taps, row=row)
    kept = once_read(count[None], hidden)
    state = state.replace(target_cache=commit(state.target_cache, fresh, lengths, kept, row=row))
    if drafter is not None:
        seen = tokens[None], features, positions, lengths, kept
        state = state.replace(draft=drafter.commit(target, state.draft, *seen, row=row))
    end = lengths[0] + count
    history = remember_row(state.history, tokens, row, lengths[0], count)
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), history)
    sampling, penalties = jax.tree.map(lambda x: x[None], (settings.sampling, settings.penalties))
    logits = target.unembed(jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1))
    noise = gumbel_noise(sampling, end[None, None], target.config.vocab_size)
    token = Choice(sampling, penalties, own, end[None], noise, target.decodable).tokens(logits)
    scores = None if logprobs is None else log_probabilities(logits, token, settings.scored[None], logprobs)
    goes_on = last & ~jnp.any(token[0] == settings.stop_tokens)
    rows = RowSettings(state.remaining, state.stop_tokens, state.sampling, state.penalties, state.scored)
    budget = jnp.where(goes_on, settings.max_new_tokens - 1, 0)
    put = lambda all, one: all.at[row].set(one)
    rows = jax.tree.map(put, rows, settings._replace(max_new_tokens=budget))
    state = state.replace(
        anchor=put(state.anchor, token[0, 0]),
        lengths=put(state.lengths, end),
        remaining=rows.max_new_tokens,
        stop_tokens=rows.stop_tokens,
        sampling=rows.sampling,
        penalties=rows.penalties,
        scored=rows.scored,
        history=remember_row(history, token[0], row, end, jnp.int32(1)).replace(prompt=history.prompt),
    )
    return pin(state), Committed(token, last.astype(jnp.int32)[None], scores)


@partial(jax.jit, donate_argnames="state")
def release(state: State, row: Int[Array, ""]) -> State:
    """Ends a row from the host, at a stop string or a cancelled request."""
    return pin(state.replace(remaining=state.remaining.at[row].set(0)))
