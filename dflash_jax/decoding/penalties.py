"""Penalties on tokens that a request has already read or written, and end tokens that come too early.

They depend on nothing but the request's own tokens before a position, so they keep speculation exact: within a block,
the proposals before a position are its history if they are accepted, and else the position is not kept.
`choice.Choice` applies them.
Shapes: B rows, R rows of tokens, or pages, of S positions, T tokens, C prompt chunk, M pages of a row, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Pages


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
    """The tokens of every row by position, where its pages say if rows have such.

    Attributes:
        tokens: committed ones and the anchor; the rest is ignored. In pages, as those of the target's cache: R is the
            number of pages, and S their size.
        prompt: how many of them are the prompt.
        pages: of each row (see `cache.pages`); they stand in the cache, and here where a history is used.
    """

    tokens: Int[Array, "R S"]
    prompt: Int[Array, " B"]
    pages: Int[Array, "B M"] | None = None

    def of_rows(self, rows: Int[Array, " _"]) -> "History":
        """That of some rows."""
        if self.pages is None:
            return History(self.tokens[rows], self.prompt[rows])
        return History(self.tokens, self.prompt[rows], self.pages[rows])

    def with_rows(self, rows: Int[Array, " _"], some: "History", *, paged: bool) -> "History":
        """The same with what became of some rows; those beyond its last one are left out."""
        tokens = some.tokens if paged else self.tokens.at[rows].set(some.tokens)
        return History(tokens, self.prompt.at[rows].set(some.prompt))

    def put(
        self, tokens: Int[Array, "B T"], start: Int[Array, " B"], kept: Int[Array, " B"], rows: Int[Array, " B"] | None
    ) -> "History":
        """The same with the first `kept` tokens of these rows, or of all, from position `start` on; what does not fit
        is dropped."""
        rows = jnp.arange(tokens.shape[0]) if rows is None else rows
        index, (count, size) = jnp.arange(tokens.shape[1])[None], self.tokens.shape
        places = jnp.where(index < kept[:, None], start[:, None] + index, jnp.iinfo(jnp.int32).max)
        of = rows[:, None]
        if self.pages is not None:
            pages = self.pages[rows]
            within = places // size < pages.shape[1]
            of = jnp.take_along_axis(pages, jnp.minimum(places // size, pages.shape[1] - 1), axis=1)
            of, places = jnp.where(within, of, count), places % size
        return self.replace(tokens=self.tokens.at[of, places].set(tokens, mode="drop"))

    def at(self, positions: Int[Array, "B N"]) -> Int[Array, "B N"]:
        """The tokens at these positions of each row."""
        if self.pages is None:
            return jnp.take_along_axis(self.tokens, positions, axis=1)
        size = self.tokens.shape[1]
        return self.tokens[jnp.take_along_axis(self.pages, positions // size, axis=1), positions % size]

    def occurrences(
        self, known: Int[Array, " B"], size: int, row: Int[Array, "B 1"]
    ) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
        """How often each token stands in the prompt and in the answer of each row.

        Args:
            known: tokens of the history that count.
            size: V.
            row: the numbers of the rows.
        """
        none = jnp.zeros((known.shape[0], size))

        def add(
            counts: tuple[Array, Array], tokens: Int[Array, "B S"], first: Int[Array, ""] | int
        ) -> tuple[Array, Array]:
            places = first + jnp.arange(tokens.shape[1])[None]
            read = places < jnp.minimum(known, self.prompt)[:, None]
            written = (places >= self.prompt[:, None]) & (places < known[:, None])
            put = lambda count, which: count.at[row, tokens].add(which.astype(jnp.float32))
            return put(counts[0], read), put(counts[1], written)

        if self.pages is None:
            return add((none, none), self.tokens, 0)
        pages, positions = self.pages, self.tokens.shape[1]
        page = lambda i: self.tokens[jax.lax.dynamic_index_in_dim(pages, i, axis=1, keepdims=False)]
        used = jnp.minimum((jnp.max(known) + positions - 1) // positions, pages.shape[1])
        return jax.lax.fori_loop(0, used, lambda i, counts: add(counts, page(i), i * positions), (none, none))


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


def empty_history(rows: int, room: int | Pages) -> History:
    """Room for the tokens of so many rows, as that of the target's cache."""
    shape = (room.total, room.size) if isinstance(room, Pages) else (rows, room)
    return History(jnp.zeros(shape, jnp.int32), jnp.zeros(rows, jnp.int32))


def remember(history: History, tokens: Int[Array, "B T"], start: Int[Array, " B"], kept: Int[Array, " B"]) -> History:
    """The history with the first `kept` tokens of each row from position `start` on; what does not fit is dropped."""
    return history.put(tokens, start, kept, None)


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
    read, end = jnp.where(counts > 0, rows, history.prompt.shape[0]), start + counts
    ends = end if prompts is None else jnp.minimum(end, prompts)
    return history.put(tokens, start, counts, rows).replace(prompt=history.prompt.at[read].set(ends, mode="drop"))
