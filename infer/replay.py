"""The losslessness checker: replays committed tokens through the target and measures how far each is
from the target's own choice. It tells numerics (a tiny gap) from logic (a large one), in any dtype.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Cache, commit, once_read
from dflash_jax.decoding.penalties import History, Penalties, penalise
from dflash_jax.decoding.sampling import Sampling, gumbel_noise, perturbed_scores, request_key
from dflash_jax.target import Target


class Replay(NamedTuple):
    """How a generation compares with the target's choices.

    Attributes:
        worst_gap: largest amount by which a committed token's score stayed below the best score at its
            position; 0 if every token is the target's choice. Scores are logits (greedy) or filtered
            log-probabilities over temperature plus noise. Infinite for a token outside top-k or top-p.
        worst_index: where, counted in generated tokens.
        mismatches: tokens that are not the target's choice in this replay.
        near_ties: of these, how many with a gap below `TIE`, so that rounding explains them.
    """

    worst_gap: float
    worst_index: int
    mismatches: int
    near_ties: int


TIE = 1e-4


def replay(
    target: Target,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    request_id: str = "0",
    request_seed: int | None = None,
    sample: int = 0,
    chunk: int = 128,
) -> Replay:
    """Scores `tokens` as a continuation of `prompt` with the plain target, `chunk` positions at a time.

    The settings must be those of the run: `spec_generate(seed=s)` gives row i the request id str(i).
    """
    if not prompt or not tokens:
        raise ValueError("replay needs a prompt and generated tokens, got an empty sequence")
    sequence = np.asarray([*prompt, *tokens], np.int32)
    sampling = Sampling(
        jnp.full(1, temperature, jnp.float32),
        jnp.full(1, top_k, jnp.int32),
        jnp.full(1, top_p, jnp.float32),
        jnp.full(1, min_p, jnp.float32),
        request_key(request_seed, seed, request_id, sample)[None],
    )
    given = (repetition_penalty, presence_penalty, frequency_penalty)
    penalties = Penalties(*(jnp.full(1, value, jnp.float32) for value in given))
    inputs, labels = sequence[:-1], sequence[1:]
    room = -(-len(sequence) // 256) * 256
    history = History(np.pad(sequence, (0, room - len(sequence)))[None], np.int32([len(prompt)]))
    cache, gaps, start, end = target.init_cache(1, room), [], 0, 0
    while start < len(inputs):
        # No chunk holds scored positions and others: those before in it count as tokens of the answer.
        end = min(start + chunk, len(prompt) - 1 if start < len(prompt) - 1 else len(inputs))
        pad = (0, chunk - (end - start))
        cache, gap = _gaps(
            target,
            cache,
            np.pad(inputs[start:end], pad)[None],
            np.pad(labels[start:end], pad)[None],
            np.int32([end - start]),
            sampling,
            penalties,
            history,
        )
        gaps.append(np.asarray(gap)[0, : end - start])
        start = end
    gap = np.concatenate(gaps)[len(prompt) - 1 :]
    wrong = gap > 0
    return Replay(float(gap.max()), int(gap.argmax()), int(wrong.sum()), int((wrong & (gap < TIE)).sum()))


@partial(jax.jit, donate_argnames="cache")
def _gaps(
    target: Target,
    cache: Cache,
    tokens: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    count: Int[Array, " B"],
    sampling: Sampling,
    penalties: Penalties,
    history: History,
) -> tuple[Cache, Float[Array, "B T"]]:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    hidden, _, blocks = target.forward(tokens, positions, None, cache)
    logits = penalise(target.unembed(hidden), penalties, history, cache.lengths + 1, labels[:, :-1])
    scores = perturbed_scores(logits, gumbel_noise(sampling, positions + 1, logits.shape[-1]), sampling)
    chosen = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return commit(cache, blocks, once_read(count, hidden)), jnp.max(scores, axis=-1) - chosen
