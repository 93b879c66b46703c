"""Which tokens a drafter's scores select, under the settings and the noise of a step (see `choice.Choice`).

Scores are of the tokens of the choice, or of a few candidates among them, and already allowed (`Choice.allowed`). What
is returned are the target's ids.
Shapes: B rows, T depths, W nodes of one depth, N options of a place (tokens or candidates), R ranks, C values of the
sharpness.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.calibration import MOST_LOGIT, SHARPNESS, Lessons
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.sampling import best_score, first_argmax, if_any, scaled_scores, select, top_k
from dflash_jax.decoding.tree import Ranked

Noise = Callable[[], Array]  # [#B #T N], made inside conditions: their operands are made even if no row needs them


def pick(
    choice: Choice,
    scores: Float[Array, "B T N"],
    depth: int = 0,
    candidates: Int[Array, "B T N"] | None = None,
    hints: Int[Array, "B T"] | None = None,
) -> Proposal:
    """The chain of a token for each of the depths `depth..depth+T-1`, and what there is to learn of it; with scores, if
    the choice asks for them.

    Args:
        candidates: which tokens the scores are of, for one depth; None is all.
        hints: the target's ids of what to take where no score is above minus infinity.
    """
    depths = slice(depth, depth + scores.shape[1])
    if choice.scored:
        ranked, lessons = rank(choice, scores, depths, candidates, hints, count=1)
        return Proposal(ranked.tokens[..., 0], scores=ranked.scores[..., 0], lessons=lessons)
    noise, ids = _options(choice, depths, candidates)
    if choice.plain or choice.sharpness is None:
        places = first_argmax(scores) if choice.plain else select(scores, noise(), choice.sampling)
        return Proposal(_hinted(ids(places[..., None])[..., 0], jnp.max(scores, axis=-1), hints))
    trials = ids(_trials(choice, scores, noise))
    best = choice.sharpness[depths][None, :, None]
    tokens = jnp.take_along_axis(trials, best, axis=2)[..., 0]
    return Proposal(_hinted(tokens, jnp.max(scores, axis=-1), hints), lessons=Lessons(trials))


def pick_in_turn(choice: Choice, scores: Float[Array, "B T N"]) -> Int[Array, "B T"]:
    """The chain of the best token of each depth among those that a row's constraint allows after the ones before.

    Filters are the target's affair: what they leave of a drafter's tokens may hold none that is allowed.
    """
    assert choice.automata is not None
    assert choice.walk is not None
    temperature = choice.sampling.temperature[:, None, None]
    sampled, states, tokens = temperature > 0, choice.walk.state[:, None], list[Array]()
    for depth in range(scores.shape[1]):
        keys, c = scores[:, depth, None], jnp.float32(1)
        if not choice.plain:
            if choice.sharpness is not None:
                c = jnp.asarray(SHARPNESS)[choice.sharpness[depth]]
            sharp = jnp.where(jnp.isfinite(c), c, 1.0) * keys / jnp.where(sampled, temperature, 1.0)
            keys = jnp.where(sampled & jnp.isfinite(c), sharp + choice.noise[:, depth, None], keys)
        best, places = best_score(choice.masked(keys, states))
        tokens.append(_hinted(choice.ids(places), best, choice.automata.hint[states]))
        states = choice.automata.following(states, choice.walk.automaton, tokens[-1])
    return jnp.concatenate(tokens, axis=1)


def _hinted(tokens: Int[Array, "B T"], best: Float[Array, "B T"], hints: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """The tokens, and where the best score is minus infinity, what is hinted at."""
    if hints is None:
        return tokens
    return jnp.where((best == -jnp.inf) & (hints >= 0), hints, tokens)


def rank(
    choice: Choice,
    scores: Float[Array, "B T N"],
    depths: slice,
    candidates: Int[Array, "B T N"] | None = None,
    hints: Int[Array, "B T"] | None = None,
    *,
    count: Literal[1] | None = None,
) -> tuple[Ranked, Lessons]:
    """The best tokens by how likely each is to be what the target will choose, and what there is to learn of them.

    Their order is that of the scores that a chain takes the largest of. The drafter's probability of each is the
    softmax of its scores, with the noise that draft and target share. `choice.reliability` says what that is worth.

    Args:
        depths: T of them, or one, if the scores are of T nodes of that depth.
        candidates: which tokens the scores are of; None is all.
        hints: see `pick`.
        count: 1 is the best token of each place alone; None as many as a tree may have.
    """
    noise, ids = _options(choice, depths, candidates)
    coupled = lambda: _keys(choice, scores, noise, depths)
    keys, own = (
        (scores, scores) if choice.plain else if_any(choice.sampling.temperature > 0, coupled, lambda: (scores, scores))
    )
    if count == 1:
        best, places = (x[..., None] for x in best_score(keys))
    else:
        best, places = top_k(keys, min(choice.nodes, choice.ranks, keys.shape[-1]))
    logits = _logits(jnp.take_along_axis(own, places, axis=-1) - jax.nn.logsumexp(own, axis=-1, keepdims=True))
    likely = jnp.where(best > -jnp.inf, jax.nn.log_sigmoid(reliable(choice, logits, depths)), -jnp.inf)
    # What may not be proposed gives way to another of the first one, and nothing follows a place without options.
    tokens = ids(jnp.where(likely > -jnp.inf, places, places[..., :1]))
    if hints is not None:
        first = jnp.arange(likely.shape[-1])[None, None] == 0
        first &= (likely[..., :1] == -jnp.inf) & (hints >= 0)[..., None]
        likely, tokens = jnp.where(first, 0.0, likely), jnp.where(first, hints[..., None], tokens)
    trials = None if choice.plain or choice.sharpness is None else ids(_trials(choice, scores, noise))
    return Ranked(likely, tokens), Lessons(trials, tokens, logits)


def _logits(likely: Float[Array, "B T R"]) -> Float[Array, "B T R"]:
    """The logits of log-probabilities of tokens, none above that of one before it, within `MOST_LOGIT`."""
    likely = jax.lax.cummin(likely, axis=2)
    logits = likely - jnp.log(jnp.maximum(-jnp.expm1(likely), 1e-30))
    return jnp.clip(jnp.where(likely > -jnp.inf, logits, -jnp.inf), -MOST_LOGIT, MOST_LOGIT)


def reliable(choice: Choice, logits: Float[Array, "B T R"], depths: slice) -> Float[Array, "B T R"]:
    """What a drafter's log-odds of tokens to be right are worth."""
    if choice.reliability is None:
        return logits
    a, b = jnp.moveaxis(choice.reliability[:, depths], 2, 0)[..., None]
    sampled = (choice.sampling.temperature > 0)[:, None, None]
    greedy, noisy = (a[i][None] + b[i][None] * logits for i in range(2))
    return jnp.where(sampled, noisy, greedy)


def likeliest(
    choice: Choice, scores: Float[Array, "B T N"], count: int
) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """Scores and tokens (of the choice) of the `count` options most likely to be picked at each of the depths 0..T-1,
    for a drafter that rescores only these, given the token before.

    With the noise that draft and target share, an unlikely token that the noise favors is among them.
    """

    depths = slice(scores.shape[1])
    sampled = lambda: top_k(_keys(choice, scores, lambda: choice.noise[:, depths], depths)[0], count)[1]
    greedy = lambda: top_k(scores, count)[1]
    places = greedy() if choice.plain else if_any(choice.sampling.temperature > 0, sampled, greedy)
    return jnp.take_along_axis(scores, places, axis=2), places


def _options(
    choice: Choice, depths: slice, candidates: Int[Array, "B T N"] | None
) -> tuple[Noise, Callable[[Array], Array]]:
    """The noise of these depths, or of candidates at one depth, and what gives the target's ids of places [B, T, K]."""
    if candidates is None:
        return lambda: choice.noise[:, depths], choice.ids

    def noise() -> Float[Array, "B _ N"]:
        places = candidates.reshape(candidates.shape[0], 1, -1)
        return jnp.take_along_axis(choice.noise[:, depths], places, axis=2).reshape(candidates.shape)

    return noise, lambda places: choice.ids(jnp.take_along_axis(candidates, places, axis=2))


def _trials(choice: Choice, scores: Float[Array, "B T N"], noise: Noise) -> Int[Array, "B T C"]:
    """The place of the best score at each sharpness."""

    def sampled() -> Int[Array, "B T C"]:
        scaled = scaled_scores(scores, choice.sampling)
        trials = [first_argmax(scaled if math.isinf(c) else c * scaled + noise()) for c in SHARPNESS]
        return jnp.stack(trials, axis=-1)

    greedy = lambda: jnp.repeat(first_argmax(scores)[..., None], len(SHARPNESS), axis=-1)
    return if_any(choice.sampling.temperature > 0, sampled, greedy)


def _keys(
    choice: Choice, scores: Float[Array, "B T N"], noise: Noise, depths: slice
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
    """What the largest of is picked at some depths, in a step with a sampled row, and the same at a sharpness of 1."""
    scaled = scaled_scores(scores, choice.sampling)
    noisy = jnp.where(choice.sampling.temperature[:, None, None] > 0, noise(), 0.0)
    if choice.sharpness is None:
        return scaled + noisy, scaled + noisy
    c = jnp.asarray(SHARPNESS)[choice.sharpness[depths]][None, :, None]
    keys = jnp.where(jnp.isfinite(c), jnp.where(jnp.isfinite(c), c, 1.0) * scaled + noisy, scaled)
    return keys, scaled + noisy
