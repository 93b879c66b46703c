"""Penalties on tokens that a request has already read or written, and end tokens that come too early.

They depend on nothing but the request's own tokens before a position, so they keep speculation exact: within a block,
the proposals before a position are its history if they are accepted, and else the position is not kept.
`choice.Choice` applies them. Shapes: B rows, S positions, T tokens, C prompt chunk.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


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
    prompts: Int[Array, " B"] | None = None,
) -> History:
    """The history with the next `counts` tokens of these rows, all different, as they are read; 0 leaves one as it is.

    Args:
        prompts: how many tokens of each are its prompt, if not all that are read.
    """
    index = jnp.arange(tokens.shape[1])[None]
    places = jnp.where(index < counts[:, None], start[:, None] + index, history.tokens.shape[1])
    read, end = jnp.where(counts > 0, rows, history.prompt.shape[0]), start + counts
    return History(
        history.tokens.at[rows[:, None], places].set(tokens, mode="drop"),
        history.prompt.at[read].set(end if prompts is None else jnp.minimum(end, prompts), mode="drop"),
    )
