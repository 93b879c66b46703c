"""The bytes of every token, and what an automaton over bytes becomes when it reads tokens.

Shapes: V tokens, N nodes of the tree of their bytes, S states, C classes of tokens that no state tells apart.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Automaton, Budget, leading_to, unsatisfiable
from dflash_jax.constraints.expressions import OTHER
from dflash_jax.constraints.texts import NOWHERE, Moves, Tree, tree_of

_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that no UTF-8 has


class TokenAutomaton(NamedTuple):
    """An automaton that reads tokens; state 0 is dead, state 1 the first.

    Attributes:
        next: of a state by the class of a token [S, C]; 0 where the token is not allowed.
        classes: of each token [V].
        allowed: which classes of tokens a state allows [S, C]; end tokens are allowed, and lead to state 0.
        masks: the tokens that states allow, each set once, as bits of words, the lowest first [M, V / 32].
        mask_of: which of them each state has [S].
        hint: a token that is likely in a state [S]; -1 is none.
    """

    next: np.ndarray
    classes: np.ndarray
    allowed: np.ndarray
    masks: np.ndarray
    mask_of: np.ndarray
    hint: np.ndarray

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The state before each token and after the last one; 0 after one that was not allowed, and after an end."""
        states = [1]
        for token in tokens:
            states.append(int(self.next[states[-1], self.classes[token]]))
        return states

    def allows(self, state: int) -> np.ndarray:
        """Which tokens a state allows [V]."""
        return self.allowed[state][self.classes]


class Vocabulary:
    """What tokens are made of.

    Args:
        tokens: bytes of each token; None for one that is no text, such as a special token.
        special: ids of special tokens by their names.
    """

    def __init__(self, tokens: Sequence[bytes | None], special: Mapping[str, int] | None = None):
        self.tokens, self.special = list(tokens), dict(special or {})

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _tree(self) -> Tree:
        return tree_of({i: token for i, token in enumerate(self.tokens) if token}, len(self))

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The token of each text that is one."""
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _has_every_byte(self) -> bool:
        return all(bytes([byte]) in self.numbers for byte in range(256) if byte not in _NEVER)

    def prepare(self) -> None:
        """Makes what all constraints share."""
        _ = self._tree, self.numbers

    def reading(
        self,
        automaton: Automaton,
        ends: Sequence[int],
        budget: Budget | None = None,
        marks: Mapping[str, int] | None = None,
    ) -> TokenAutomaton:
        """The automaton that reads tokens in place of bytes.

        Args:
            ends: tokens that end an answer, where it may end.
            marks: symbols of special tokens (see `Expressions.marks`); all others are `OTHER`.

        Raises:
            ConstraintError: it takes too long, is too large, or no tokens satisfy it.
        """
        budget = budget or Budget()
        moves, tree = Moves(automaton.next[:, :OTHER]), self._tree
        move = np.append(moves.of_texts(tree, budget), NOWHERE)[tree.of_token]  # of each token
        symbols = {i: (marks or {}).get(name, OTHER) for name, i in self.special.items()}
        to = [*moves.to, *automaton.next[:, OTHER:].T.astype(np.int16)]
        for i, symbol in symbols.items():
            if automaton.next[:, symbol].any():
                move[i] = len(moves.to) + symbol - OTHER
        special = {i: number for number, i in enumerate(dict.fromkeys(ends))}
        move[list(special)] = len(to) + np.arange(len(special))
        to += [moves.to[NOWHERE]] * len(special)
        used, classes = np.unique(move, return_inverse=True)
        classes = classes.reshape(-1)
        budget.check()
        table, size = np.stack([to[one] for one in used], axis=1), len(automaton.next)
        end_classes = classes[list(special)]
        alive: np.ndarray = np.arange(size) > DEAD
        # What bytes can finish, tokens can, if there is one for each byte, and no end is one of them or of a mark.
        needed = any(symbols.get(i, OTHER) > OTHER or len(self.tokens[i] or b"") == 1 for i in ends)
        if needed or not self._has_every_byte:
            alive = leading_to(table, automaton.final)
            table = np.where(alive[table], table, DEAD)
        if not alive[1]:
            raise unsatisfiable("no tokens of this vocabulary do")
        allowed = table > 0
        allowed[np.ix_(automaton.final & alive, end_classes)] = True
        allowed[DEAD] = False
        # States that tokens reach, and no others.
        seen: np.ndarray = np.full(size, False)
        frontier = np.asarray([1])
        while frontier.size:
            seen[frontier] = True
            frontier = np.unique(table[frontier])
            frontier = frontier[(frontier > 0) & ~seen[frontier]]
        seen[DEAD] = True
        number = np.cumsum(seen) - 1
        hint = _hints(automaton, allowed, classes, self, special)[seen]
        following, allowed = number[table[seen]].astype(np.int32), allowed[seen]
        return TokenAutomaton(following, classes.astype(np.int32), allowed, *_masks(allowed, classes), hint)


def _masks(allowed: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each set of tokens that a state allows once, and which of them each state has."""
    sets, mask_of = np.unique(np.packbits(allowed, axis=1), axis=0, return_inverse=True)
    sets = np.unpackbits(sets, axis=1, count=allowed.shape[1])
    bits = np.packbits(sets[:, classes], axis=1, bitorder="little")
    words = np.ascontiguousarray(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))).view("<u4")
    return words, mask_of.reshape(-1)


def _hints(
    automaton: Automaton, allowed: np.ndarray, classes: np.ndarray, vocabulary: Vocabulary, ends: Mapping[int, int]
) -> np.ndarray:
    """A token for each state: the longest of a text that must follow, or any that may."""
    known = vocabulary.numbers
    first = np.unique(classes, return_index=True)[1]
    hints = np.full(len(allowed), -1, np.int32)
    alive = automaton.next > 0
    only = np.where((alive.sum(axis=1) == 1) & ~automaton.final, alive.argmax(axis=1), -1)
    for state in np.flatnonzero(allowed.any(axis=1)):
        may = np.flatnonzero(allowed[state])
        hints[state] = min(first[may])
        text, at = b"", state
        while len(text) < 32 and 0 <= only[at] < 256:
            text += bytes([only[at]])
            at = automaton.next[at, only[at]]
            token = known.get(text)
            if token is not None and allowed[state, classes[token]]:
                hints[state] = token
    return hints
