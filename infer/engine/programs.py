"""The compiled programs of an engine: decode for some steps, begin a row, read some of its prompt, end it.

Shapes: B rows, C tokens of a prompt, M steps.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Int

from dflash_jax.cache import commit, once_read
from dflash_jax.decoding.automata import Automata
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.logprobs import log_probabilities
from dflash_jax.decoding.penalties import remember, remember_prompts
from dflash_jax.decoding.sampling import gumbel_noise
from dflash_jax.decoding.state import DraftModel, RowSettings, Seen, State, TargetModel, all_rows, begin_row, some_rows
from dflash_jax.decoding.step import Committed, run, speculative_step, step_functions
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import Options
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.mesh import constrain, split_rows
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
) -> tuple[Wrapped, tuple]:
    """`run` of a speculative step as a jitted function and its arguments: one program per number of rows and draft.
    `rows` are the only ones that it advances, and that its trace has. `options` are the compiler's, `automata`
    those of constraints. `state` is donated."""
    steps, leave = np.int32(max_steps), np.int32(leave_below)
    static = draft, config.proposals, config.steps_per_visit, config.logprobs
    return _decode_program(tuple((options or {}).items())), (
        target,
        drafter,
        state,
        rows,
        steps,
        leave,
        automata,
        *static,
    )


@cache
def _decode_program(options: tuple[tuple[str, str | bool], ...]) -> Wrapped:
    def program(target, drafter, state, rows, max_steps, leave_below, automata, draft, proposals, capacity, logprobs):
        parts = step_functions(target, drafter, draft.block_size, proposals, draft.nodes, automata, draft.budget)
        step = partial(speculative_step, parts, logprobs=logprobs)
        narrow = state if rows is None else some_rows(state, rows)
        narrow, trace = run(step, narrow, max_steps, leave_below, capacity)
        return pin(narrow if rows is None else all_rows(state, narrow)), trace

    names = ("draft", "proposals", "capacity", "logprobs")
    return jax.jit(program, static_argnames=names, donate_argnames="state", compiler_options=dict(options) or None)


@partial(jax.jit, donate_argnames="state")
def begin(state: State, row: Int[Array, ""]) -> State:
    """Makes an idle row ready for a new prompt."""
    return pin(begin_row(state, row))


@partial(jax.jit, donate_argnames="state", static_argnames="logprobs")
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
) -> tuple[State, Committed]:
    """Commits the next tokens of some prompts; the last ones of a prompt also choose the first new token.

    Args:
        rows: rows to fill: idle, begun, all different; and any others with a count of 0, which stay as they are.
        tokens, counts: of each row, and how many of them are prompt.
        last: whether the prompt ends here: the row then starts decoding.
        automata: of the rows' constraints, where they may have any.
        logprobs: see `speculative_step`.

    Returns:
        The state, and the first new token [B, 1] of each row, which counts if `last`. It belongs to no round.
    """
    tokens = constrain(tokens, P(split_rows(tokens.shape[0])))
    lengths = jnp.where(counts > 0, state.lengths[rows], 0)  # or a pass would cost as much as the longest of them
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    taps = drafter.taps if drafter else ()
    where = positions, None, state.target_cache, lengths
    hidden, features, fresh = target.forward(tokens, *where, taps=taps, rows=rows, counts=counts)
    kept = once_read(counts, hidden)
    state = state.replace(target_cache=commit(state.target_cache, fresh, lengths, kept, rows=rows))
    if drafter is not None:
        seen = Seen(tokens, features, positions, lengths, kept, rows)
        state = state.replace(draft=drafter.commit(target, state.draft, seen))
    end, read = lengths + counts, counts > 0
    given: RowSettings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *settings)
    history = remember_prompts(state.paged_history, tokens, rows, lengths, counts, given.prompt)
    of_rows = history.of_rows(rows)
    final = jnp.maximum(counts - 1, 0)
    logits = target.unembed(jnp.take_along_axis(hidden, final[:, None, None], axis=1))
    noise = gumbel_noise(given.sampling, end[:, None], target.config.vocab_size)
    settings_of_rows = given.sampling, given.penalties, of_rows, end, noise, target.decodable
    choice = Choice(*settings_of_rows, stops=given.stop_tokens, automata=automata, walk=given.walk)
    begun = None if given.walk is None else given.walk.state[:, None]
    token, scores = choice.tokens(logits, states=begun), None
    if logprobs is not None:
        scores = log_probabilities(choice.masked(logits), token, given.scored, logprobs)
    goes_on = last & ~jnp.any(token == given.stop_tokens, axis=1)
    budgets = jnp.where(goes_on, given.remaining - 1, 0)
    of_rows = remember(of_rows, token, end, (read & last).astype(jnp.int32)).replace(pages=None)
    written = jnp.where(read, rows, state.lengths.shape[0])
    walk = given.walk
    if walk is not None and (after := choice.following(begun, token)) is not None:
        walk = walk.replace(state=after[:, 0])
    after = given._replace(remaining=budgets, walk=walk)._asdict()
    del after["prompt"]
    filled = state.replace(rows=written, anchor=token[:, 0], lengths=end, history=of_rows, **after)
    state = all_rows(state.replace(history=history.replace(pages=None)), filled)
    return pin(state), Committed(token, last.astype(jnp.int32), scores)


@partial(jax.jit, donate_argnames="state")
def release(state: State, row: Int[Array, ""]) -> State:
    """Ends a row from the host, at a stop string or a cancelled request."""
    return pin(state.replace(remaining=state.remaining.at[row].set(0)))
