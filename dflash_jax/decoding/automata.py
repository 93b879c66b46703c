"""Constraints on the device: automata that read tokens, and the state of each row in its own.

What a row may choose follows from the state that its tokens lead to, and so from the tokens alone: a constrained answer
is the same with and without speculation. Tables of all automata lie in arrays of fixed sizes, so that a new one
compiles no new program.
Shapes: B rows, T block positions, P proposals, V tokens, U = V / 32 words of bits, M masks, S states, N transitions,
G automata.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Int16, UInt32

FREE = 0  # the state of rows without a constraint, and after a token that was not allowed


class Automata(struct.PyTreeNode):
    """Tables of automata.

    Attributes:
        masks: tokens that a state allows, as bits of words, the lowest first; mask 0 allows all.
        mask_of: the mask of each state.
        base: where the transitions of a state begin.
        hint: a token to propose in a state where a drafter has none that is allowed; -1 is none.
        cells: next state, at `base[state] + class`.
        classes: of each token, in each automaton.
    """

    masks: UInt32[Array, "M U"]
    mask_of: Int[Array, " S"]
    base: Int[Array, " S"]
    hint: Int[Array, " S"]
    cells: Int16[Array, " N"]
    classes: Int16[Array, "G V"]

    def following(
        self, states: Int[Array, "B T"], automaton: Int[Array, " B"], tokens: Int[Array, "B T"]
    ) -> Int[Array, "B T"]:
        """The states after these tokens."""
        return self._by_class(states, self._classes(automaton, tokens))

    def _classes(self, automaton: Int[Array, " B"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        return self.classes[automaton[:, None], tokens].astype(jnp.int32)

    def _by_class(self, states: Int[Array, "..."], classes: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.where(states == FREE, FREE, self.cells[self.base[states] + classes].astype(jnp.int32))

    def allowed(
        self, states: Int[Array, "B T"], vocabulary: Int[Array, " K"] | None, size: int
    ) -> Bool[Array, "B T K"]:
        """Which tokens these states allow.

        Args:
            vocabulary: ids to look at; None is all `size`.
        """
        words = self.masks[self.mask_of[states]]
        if vocabulary is not None:
            bits = words[:, :, vocabulary // 32] >> (vocabulary % 32).astype(jnp.uint32)[None, None]
            return (bits & 1).astype(bool)
        bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, None]
        return (bits & 1).astype(bool).reshape(*words.shape[:2], -1)[:, :, :size]

    def permits(self, states: Int[Array, "B T"], tokens: Int[Array, "B T K"]) -> Bool[Array, "B T K"]:
        """Whether these states allow some tokens of their own."""
        words = self.masks[self.mask_of[states][..., None], tokens // 32]
        return ((words >> (tokens % 32).astype(jnp.uint32)) & 1).astype(bool)


class Walk(struct.PyTreeNode):
    """Where each row is: its state, of all automata, and which automaton it is of."""

    state: Int[Array, " B"]
    automaton: Int[Array, " B"]

    def along(self, automata: Automata, tokens: Int[Array, "B P"]) -> Int[Array, "B P+1"]:
        """The states before each token of a chain, and after the last one."""
        states, classes = [self.state], automata._classes(self.automaton, tokens)
        for place in range(tokens.shape[1]):
            states.append(automata._by_class(states[-1], classes[:, place]))
        return jnp.stack(states, axis=1)

    def in_tree(
        self, automata: Automata, tokens: Int[Array, "B P"], parents: Int[Array, "B P"], depth: int
    ) -> Int[Array, "B P+1"]:
        """The states after the anchor and after each node of a tree, whose longest path has `depth` nodes."""
        first, classes = self.state[:, None], automata._classes(self.automaton, tokens)
        states = jnp.broadcast_to(first, (tokens.shape[0], tokens.shape[1] + 1))
        for _ in range(depth):  # each round settles another depth
            after = automata._by_class(jnp.take_along_axis(states, parents, axis=1), classes)
            states = jnp.concatenate([first, after], axis=1)
        return states


def unconstrained(rows: int) -> Walk:
    """Rows without a constraint."""
    return Walk(jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))


def empty_tables(vocab_size: int, *, states: int, cells: int, masks: int, automata: int) -> Automata:
    """Tables on the host without any automaton.

    Args:
        states, cells, masks, automata: how many there is room for.
    """
    every = np.zeros((masks, -(-vocab_size // 32)), np.uint32)
    every[0] = 0xFFFFFFFF
    tables: list[Any] = [every, np.zeros(states, np.int32), np.zeros(states, np.int32), np.full(states, -1, np.int32)]
    tables += [np.zeros(cells, np.int16), np.zeros((automata, vocab_size), np.int16)]
    return Automata(*tables)
