"""The losslessness check: runs the tokens of an answer through the target and measures how far each is from the
target's own choice. It tells rounding (a tiny gap) from an error (a large one), in any dtype.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Cache, commit, once_read
from dflash_jax.decoding.automata import FREE, Automata
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.penalties import History, Penalties
from dflash_jax.decoding.sampling import Sampling, gumbel_noise
from dflash_jax.infer.engine.constraints import Constraints
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.mesh import entered
from dflash_jax.target import Target


class Replay(NamedTuple):
    """How a generation compares with the target's choices.

    Attributes:
        worst_gap: largest amount by which the score of a token stayed below the best score at its position; 0 if every
            token is the target's choice. Scores are logits (greedy) or filtered log-probabilities over temperature plus
            Gumbel noise. Infinite for a token outside top-k or top-p, a stop token
            before `min_tokens`, and one that the constraint does not allow.
        worst_index: where, counted in generated tokens.
        mismatches: tokens that are not the target's choice in this replay.
        near_ties: of these, how many with a gap that rounding explains: below 1e-4, or in bfloat16 and float16 below
            two rounding errors of the position's largest logit (over the temperature, if there is one).
    """

    worst_gap: float
    worst_index: int
    mismatches: int
    near_ties: int


TIE = 1e-4
ROUNDINGS = 2


def replay(
    target: Target,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    request_id: str = "0",
    sample: int = 0,
    chunk: int = 128,
    **settings: Any,
) -> Replay:
    """Scores `tokens` as a continuation of `prompt` with the plain target, `chunk` positions at a time.

    The settings must be those of the run: `spec_generate(seed=s)` gives row i the request id str(i).

    Args:
        prompt, tokens: token ids of the prompt, and those generated after it, the stop token included.
        params: of the request.
        seed: of the engine, for a request without a seed of its own.
        request_id, sample: of the request.
        settings: fields of `SamplingParams` by name, which win over `params`.

    Raises:
        ValueError: an empty prompt or answer, or a constraint that cannot be enforced.
    """
    if not prompt or not tokens:
        raise ValueError("replay needs a prompt and generated tokens, got an empty sequence")
    size = target.config.vocab_size
    known = lambda token: isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < size
    if wrong := [token for token in (*prompt, *tokens) if not known(token)]:
        raise ValueError(f"replay needs token ids in 0..{size - 1}, got {wrong[0]!r:.60}")
    params = replace(params or SamplingParams(), **settings)
    row = params.on_device(request_id, sample, seed, 1)
    settings = jax.tree.map(lambda x: jnp.asarray(x)[None], (row.sampling, row.penalties, row.stop_tokens))
    sequence = np.asarray([*prompt, *tokens], np.int32)
    inputs, labels = sequence[:-1], sequence[1:]
    room = -(-len(sequence) // 256) * 256
    history = History(jnp.asarray(np.pad(sequence, (0, room - len(sequence)))[None]), jnp.asarray([len(prompt)]))
    automata, states = _constrained(target, params, tokens)
    states = np.asarray([*[FREE] * (len(prompt) - 1), *states], np.int32)  # before each of the labels
    with entered(target.mesh):
        cache, found, start, end = target.init_cache(1, room), [], 0, 0
        while start < len(inputs):
            # No chunk holds scored positions and others: those before in it count as tokens of the answer.
            end = min(start + chunk, len(prompt) - 1 if start < len(prompt) - 1 else len(inputs))
            pad = (0, chunk - (end - start))
            piece = [np.pad(of[start:end], pad)[None] for of in (inputs, labels, states)]
            count, length = np.array([end - start], np.int32), np.array([start], np.int32)
            cache, *gap_and_tie = _gaps(target, cache, length, *piece, count, *settings, history, automata)
            found.append(np.concatenate(gap_and_tie)[:, : end - start])
            start = end
    gap, tie = np.concatenate(found, axis=1)[:, len(prompt) - 1 :]
    wrong = ~(gap <= 0)
    return Replay(float(gap.max()), int(gap.argmax()), int(wrong.sum()), int((wrong & (gap < tie)).sum()))


def _constrained(target: Target, params: SamplingParams, tokens: Sequence[int]) -> tuple[Automata | None, list[int]]:
    """The automaton of a constraint, and its state before each of these tokens."""
    if params.constraint is None:
        return None, [FREE] * len(tokens)
    constraints = Constraints(target, EngineConfig.constraint_states)
    ready = constraints.check(params)
    begin = constraints.place(ready)
    assert ready is not None
    assert begin is not None
    states = ready.automaton.walk(tokens)[:-1]
    return constraints.tables, [int(begin.state) + state - 1 if state else FREE for state in states]


@partial(jax.jit, donate_argnames="cache")
def _gaps(
    target: Target,
    cache: Cache,
    lengths: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    states: Int[Array, "B T"],
    count: Int[Array, " B"],
    sampling: Sampling,
    penalties: Penalties,
    stops: Int[Array, "B Q"],
    history: History,
    automata: Automata | None,
) -> tuple[Cache, Float[Array, "B T"], Float[Array, "B T"]]:
    """How far each label's score is below the best one, and how far rounding may put it."""
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    hidden, _, fresh = target.forward(tokens, positions, None, cache, lengths)
    noise = gumbel_noise(sampling, positions + 1, target.config.vocab_size)
    settings = sampling, penalties, history, lengths + 1, noise, target.decodable
    choice = Choice(*settings, stops=stops, automata=automata)
    logits = target.unembed(hidden)
    scores = choice.chain_scores(logits, labels[:, :-1], states)
    chosen = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    gaps, temperature = jnp.max(scores, axis=-1) - chosen, sampling.temperature[:, None]
    largest = jnp.max(jnp.abs(logits), axis=-1) / jnp.where(temperature > 0, temperature, 1)
    precision = jnp.finfo(target.dtype)
    ties = jnp.maximum(TIE, (ROUNDINGS * float(precision.eps) if precision.bits < 32 else 0.0) * largest)
    return commit(cache, fresh, lengths, once_read(count, hidden)), gaps, ties
