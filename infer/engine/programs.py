"""The compiled programs of an engine: decode for some steps, begin a row, read some of its prompt, end it.

Shapes: B rows, C tokens of a prompt, M steps.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.automata import Automata
from dflash_jax.decoding.prompts import Prompts, Read, commit_prompts, first_tokens, stacked
from dflash_jax.decoding.state import DraftModel, RowSettings, State, TargetModel, all_rows, begin_row, some_rows
from dflash_jax.decoding.step import Committed, run, speculative_step, step_functions
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import Options
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.sharding import pin


def decode_call(
    target: TargetModel,
    drafter: DraftModel | None,
    state: State,
    max_steps: int,
    leave_below: int,
    draft: Draft,
    config: EngineConfig,
    rows: np.ndarray | None = None,
    options: Options | None = None,
    automata: Automata | None = None,
    prompts: Prompts | None = None,
) -> tuple[Wrapped, tuple]:
    """`run` of a speculative step as a jitted function and its arguments: one program per number of rows and draft.
    `rows` are the only ones that it advances, and that its trace has. `options` are the compiler's, `automata`
    those of constraints. Step i also reads prompts i of `prompts` [M, ...], if there are any. `state` is donated."""
    steps, leave = np.int32(max_steps), np.int32(leave_below)
    static = draft, config.proposals, config.steps_per_visit, config.logprobs, config.sampled_logprobs
    return _decode_program(tuple((options or {}).items())), (
        target,
        drafter,
        state,
        rows,
        steps,
        leave,
        automata,
        prompts,
        *static,
    )


@cache
def _decode_program(options: tuple[tuple[str, str | bool], ...]) -> Wrapped:
    def decode(
        target,
        drafter,
        state,
        rows,
        max_steps,
        leave_below,
        automata,
        prompts,
        draft,
        proposals,
        capacity,
        logprobs,
        sampled,
    ):
        how = draft.block_size, proposals, draft.nodes, automata, draft.budget

        def step(state: State, prompts: Prompts | None = None) -> tuple[State, Committed]:
            reads = None if prompts is None else prompts.after(state)
            return speculative_step(
                step_functions(target, drafter, *how, reads), state, logprobs=logprobs, sampled_logprobs=sampled
            )

        narrow = state if rows is None else some_rows(state, rows)
        narrow, trace = run(step, narrow, max_steps, leave_below, capacity, prompts)
        return pin(narrow if rows is None else all_rows(state, narrow)), trace

    names = ("draft", "proposals", "capacity", "logprobs", "sampled")
    return jax.jit(decode, static_argnames=names, donate_argnames="state", compiler_options=dict(options) or None)


@partial(jax.jit, donate_argnames="state")
def begin(state: State, row: Int[Array, ""], length: Int[Array, ""]) -> State:
    """Makes an idle row ready for a new prompt, as if so many of its tokens were committed."""
    return pin(begin_row(state, row, length))


@partial(jax.jit, donate_argnames="state", static_argnames=("logprobs", "sampled_logprobs"))
def prefill(
    target: TargetModel,
    drafter: DraftModel | None,
    state: State,
    rows: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    counts: Int[Array, " B"],
    last: Bool[Array, " B"],
    settings: tuple[RowSettings, ...],
    automata: Automata | None = None,
    logprobs: int | None = None,
    sampled_logprobs: bool = False,
) -> tuple[State, Committed]:
    """Commits the next tokens of some prompts; the last ones of a prompt also choose the first new token.

    Args:
        rows, tokens, counts, last: see `Prompts`.
        automata: of the rows' constraints, where they may have any.
        logprobs, sampled_logprobs: see `speculative_step`.

    Returns:
        The state, and the first new token [B, 1] of each row, which counts if `last`. It belongs to no round.
    """
    prompts = Prompts(rows, tokens, counts, last, stacked(settings)).after(state)
    taps = drafter.taps if drafter else ()
    (found,) = target.forward_all([prompts.inputs], state.target_cache, taps=taps)
    read = Read(prompts.inputs, *found)
    state = commit_prompts(target, drafter, state, read)
    logits = target.unembed(read.last())
    state, token, scores = first_tokens(target, state, prompts, logits, automata, logprobs, sampled_logprobs)
    return pin(state), Committed(token, last.astype(jnp.int32), scores)


@partial(jax.jit, donate_argnames="state")
def release(state: State, row: Int[Array, ""]) -> State:
    """Ends a row from the host, at a stop string or a canceled request."""
    return pin(state.replace(remaining=state.remaining.at[row].set(0)))
