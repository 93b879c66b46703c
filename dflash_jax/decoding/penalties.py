"""Penalties on tokens that a request has already read or written, and end tokens that come too early.

They depend on nothing but the request's own tokens before a position, so they keep speculation exact: within a block,
the proposals before a position are its history if they are accepted, and else the position is not kept.
Shapes: B rows, S positions, T verify width, P = T - 1 proposals, V vocabulary, C prompt chunk.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.sampling import if_any


class Penalties(struct.PyTreeNode):
    """Settings of every row, applied to the logits before anything else, greedy rows included.

    Attributes:
        repetition: divides positive logits, and multiplies negative ones, of tokens in prompt or answer; 1 is none.
        presence: subtracted once from the logits of tokens in the answer; 0 is none.
        frequency: subtracted once per occurrence in the answer; 0 is none.
        min_tokens: how many tokens of the answer may not be stop tokens, the first ones; 0 is none.
    """

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    min_tokens: Int[Array, " B"]


class History(struct.PyTreeNode):
    """The tokens of every row by position.

    Attributes:
        tokens: committed ones and the anchor; the rest is ignored.
        prompt: how many of them are the prompt.
    """

    tokens: Int[Array, "B S"]
    prompt: Int[Array, " B"]


def check_penalties(repetition: float, presence: float, frequency: float) -> None:
    """Raises ValueError for a penalty out of range; presence and frequency as OpenAI has them."""
    if not 0.01 <= repetition <= 100:
        raise ValueError(f"repetition_penalty must lie in 0.01..100, got {repetition}; 1 is none")
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if not -2 <= value <= 2:
            raise ValueError(f"{name} must lie in -2..2, got {value}; 0 is none")


def no_penalties(rows: int) -> Penalties:
    """Neutral penalties for `rows` rows."""
    return Penalties(jnp.ones(rows), jnp.zeros(rows), jnp.zeros(rows), jnp.zeros(rows, jnp.int32))


def empty_history(rows: int, positions: int) -> History:
    """Room for so many tokens a row."""
    return History(jnp.zeros((rows, positions), jnp.int32), jnp.zeros(rows, jnp.int32))


def remember(history: History, tokens: Int[Array, "B T"], start: Int[Array, " B"], kept: Int[Array, " B"]) -> History:
    """The history with the first `kept` tokens of each row from position `start` on; what does not fit is dropped."""
    rows, positions = history.tokens.shape
    index = jnp.arange(tokens.shape[1])[None]
    places = jnp.where(index < kept[:, None], start[:, None] + index, positions)
    written = history.tokens.at[jnp.arange(rows)[:, None], places].set(tokens, mode="drop")
    return history.replace(tokens=written)


def remember_prompts(
    history: History,
    tokens: Int[Array, "B C"],
    rows: Int[Array, " B"],
    start: Int[Array, " B"],
    counts: Int[Array, " B"],
) -> History:
    """The history with the next `counts` tokens of the prompts of these rows, all different; 0 leaves one as it is."""
    index = jnp.arange(tokens.shape[1])[None]
    places = jnp.where(index < counts[:, None], start[:, None] + index, history.tokens.shape[1])
    read = jnp.where(counts > 0, rows, history.prompt.shape[0])
    return History(
        history.tokens.at[rows[:, None], places].set(tokens, mode="drop"),
        history.prompt.at[read].set(start + counts, mode="drop"),
    )


def penalise(
    logits: Float[Array, "B T V"],
    penalties: Penalties,
    history: History,
    known: Int[Array, " B"],
    proposals: Int[Array, "B P"] | None = None,
    seen: Bool[Array, "#B T P"] | None = None,
    *,
    vocabulary: Int[Array, " V"] | None = None,
    vocab_size: int | None = None,
    stops: Int[Array, "B Q"] | None = None,
    depth: Int[Array, "#B #T"] | None = None,
) -> Float[Array, "B T V"]:
    """The logits of each row under its penalties, without its stop tokens while it has fewer than `min_tokens`; costs
    next to nothing where no row asks for either.

    Args:
        known: tokens of the history that count.
        proposals: tokens that are not in the history yet; without them, all positions see the history alone.
        seen: which proposals stand before a position (the ancestors of a tree's node); None is a chain, where position
            i sees the first i.
        vocabulary, vocab_size: the id of each of the logits, and how many ids there are; None is 0, 1, 2, ...
        stops: stop tokens of each row, padded with -1; None holds none back.
        depth: how many tokens stand between the history and each position; None is as many as it has seen.
    """
    rows, positions, size = logits.shape
    row, ids = jnp.arange(rows)[:, None], jnp.arange(size) if vocabulary is None else vocabulary
    if depth is None:
        depth = jnp.arange(positions)[None] if seen is None else jnp.sum(seen, axis=2, dtype=jnp.int32)
    least = penalties.min_tokens[:, None]
    early = jnp.broadcast_to((known - history.prompt)[:, None] + depth < least, (rows, positions)) & (least > 0)

    def applied() -> Float[Array, "B T V"]:
        places = jnp.arange(history.tokens.shape[1])[None]
        every = jnp.zeros((rows, vocab_size or size))

        def count(which: Bool[Array, "B S"]) -> Float[Array, "B V"]:
            found = every.at[row, history.tokens].add(which.astype(jnp.float32))
            return found if vocabulary is None else found[:, vocabulary]

        read = count(places < jnp.minimum(known, history.prompt)[:, None])[:, None]
        written = count((places >= history.prompt[:, None]) & (places < known[:, None]))[:, None]
        if proposals is not None:
            # One comparison after the other, which the compiler fuses: nothing of this size is ever in memory.
            index = jnp.arange(proposals.shape[1] + 1)
            before = ((index[None, :-1] < index[:, None])[None] if seen is None else seen)[..., None]
            proposed = proposals[:, None, :, None] == ids[None, None, None]
            written = written + jnp.sum(before & proposed, axis=2, dtype=jnp.float32)
        setting = lambda x: x[:, None, None]
        divisor = jnp.where((read > 0) | (written > 0), setting(penalties.repetition), 1.0)
        repeated = jnp.where(logits > 0, logits / divisor, logits * divisor)
        present = jnp.where(written > 0, setting(penalties.presence), 0.0)
        penalised = repeated - setting(penalties.frequency) * written - present
        if stops is None:
            return penalised
        ends = jnp.any(ids[None, :, None] == stops[:, None], axis=2)
        return jnp.where(early[:, :, None] & ends[:, None], -jnp.inf, penalised)

    some = (penalties.repetition != 1) | (penalties.presence != 0) | (penalties.frequency != 0)
    if stops is not None:
        some |= jnp.any(early, axis=1)
    return if_any(some, applied, lambda: logits)
