"""The bytes of every token, and what an automaton over bytes becomes when it reads tokens.

Shapes: V tokens, N nodes of the tree of their bytes, S states, C classes of tokens that no state tells apart.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Automaton, Budget, leading_to, unsatisfiable
from dflash_jax.constraints.expressions import OTHER
from dflash_jax.constraints.texts import CHARACTER, Edges, Tree, alike, runs, summed, tree_of, walk

# Characters that stand for themselves in a string of JSON; without <, with which marks begin.
_PLAIN = re.compile(
    rb"(?:[\x20-\x21\x23-\x3b\x3d-\x5b\x5d-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}"
    rb"|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*"
)
_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))  # bytes that no UTF-8 has


class TokenAutomaton(NamedTuple):
    """An automaton that reads tokens; state 0 is dead, state 1 the first.

    Attributes:
        next: of a state by the class of a token [S, C]; 0 where the token is not allowed.
        classes: of each token [V].
        allowed: which classes of tokens a state allows [S, C]; end tokens are allowed, and lead to state 0.
        hint: a token that is likely in a state [S]; -1 is none.
    """

    next: np.ndarray
    classes: np.ndarray
    allowed: np.ndarray
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


class _Paths(NamedTuple):
    """Where the texts of all tokens lead from all states.

    Attributes:
        parts: from states of each kind, where texts lead that are followed one by one.
        after: where plain characters lead, by their number [n, S]; 0 where it does not depend on that alone.
        like: states that do what another one does [L], and which one that is [L];
        differs: but not after these symbols [S, SYMBOLS].
        instead: where the other states lead after these.
    """

    parts: Sequence[Edges]
    after: np.ndarray
    like: tuple[np.ndarray, np.ndarray]
    differs: np.ndarray
    instead: Edges


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
    def _plain(self) -> np.ndarray:
        """Of each token, how many characters it has, if they are whole and stand for themselves in a string of JSON;
        -1 for all others."""
        found = np.full(len(self), -1, np.int32)
        for i, token in enumerate(self.tokens):
            if token and _PLAIN.fullmatch(token):
                found[i] = len(token.decode())
        return found

    @cached_property
    def _trees(self) -> tuple[Tree, Tree]:
        """Of all tokens; and of those that are not plain, in which each plain character at the beginning is one
        symbol."""
        texts = {i: tuple(token) for i, token in enumerate(self.tokens) if token}
        short = dict[int, tuple[int, ...]]()
        for i, text in texts.items():
            if self._plain[i] < 0:
                begin = _PLAIN.match(bytes(text))
                plain = begin[0] if begin else b""
                short[i] = (CHARACTER,) * len(plain.decode()) + text[len(plain) :]
        return tree_of(texts, len(self)), tree_of(short, len(self))

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The token of each text that is one."""
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _has_every_byte(self) -> bool:
        return all(bytes([byte]) in self.numbers for byte in range(256) if byte not in _NEVER)

    def prepare(self) -> None:
        """Makes what all constraints share."""
        _ = self._trees, self.numbers

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
        run = runs(automaton.next)
        lengths = self._plain
        longest = int(lengths.max(initial=0))
        # After n plain characters [n, S]; -1 where that depends on which they are.
        after = np.zeros((longest + 1, len(run)), np.int32)
        after[0] = np.arange(len(run))
        for n in range(1, longest + 1):
            after[n] = np.where(after[n - 1] < 0, -1, run[after[n - 1]])
        by_length: np.ndarray = np.all(after >= 0, axis=0)
        by_length[DEAD] = False
        whole, rest = self._trees
        budget.check()
        following = np.concatenate([automaton.next, np.where(by_length, run, DEAD)[:, None]], axis=1)
        states, others, differs = alike(automaton.next, by_length, run)
        alone = ~by_length
        alone[states] = False
        parts = [
            walk(following, np.flatnonzero(alone), whole, budget),
            walk(following, np.flatnonzero(by_length), rest, budget),
            walk(following, states, whole, budget, differs),
        ]
        instead = walk(following, states, whole, budget, differs, others)
        paths = _Paths(parts, np.where(by_length[None], after, 0), (states, others), differs, instead)
        return self._table(automaton, paths, ends, budget, marks or {})

    def _table(
        self,
        automaton: Automaton,
        paths: _Paths,
        ends: Sequence[int],
        budget: Budget,
        marks: Mapping[str, int],
    ) -> TokenAutomaton:
        """Classes of tokens, and the table by them."""
        parts, after, (similar, others) = paths.parts, paths.after, paths.like
        rng, size = np.random.default_rng(1), len(automaton.next)
        names = rng.integers(1, 2**63, (2, size), dtype=np.uint64) | np.uint64(1)
        # Tokens that lead every state to the same one have equal sums, and others do not but by a chance of 2**-60.
        sums = np.zeros(len(self), np.uint64)
        weights = names[0].copy()  # what is like a state counts with it
        np.add.at(weights, others, names[0][similar])
        for (tree, state, leaf, to), of in ((parts[0], names[0]), (parts[1], weights), (parts[2], names[0])):
            sums += summed(tree, leaf, of[state] * (names[1][to] >> np.uint64(7)))
        tree, state, leaf, to = paths.instead
        sums -= summed(tree, leaf, names[0][state] * (names[1][to] >> np.uint64(7)))
        of_length = (weights[None] * (names[1][after] >> np.uint64(7)) * (after > 0)).sum(axis=1, dtype=np.uint64)
        plain = self._plain
        sums += np.where(plain > 0, of_length[np.maximum(plain, 0)], np.uint64(0))
        symbols = {i: marks.get(name, OTHER) for name, i in self.special.items()}
        led = automaton.next[:, OTHER:]  # by special tokens
        of_symbol = (names[0][:, None] * (names[1][led] >> np.uint64(7))).sum(axis=0, dtype=np.uint64)
        used = np.count_nonzero(led, axis=0)
        for i, symbol in symbols.items():
            if used[symbol - OTHER]:
                sums[i] = of_symbol[symbol - OTHER]
        special = {i: number for number, i in enumerate(dict.fromkeys(ends))}
        sums[list(special)] = rng.integers(1, 2**63, len(special), dtype=np.uint64)
        _, first, classes = np.unique(sums, return_index=True, return_inverse=True)
        classes = classes.reshape(-1)
        budget.check()
        table = np.zeros((size, len(first)), np.int32)
        for edges in parts[:2]:
            _fill(table, edges, first)
        for number, i in enumerate(first):
            if plain[i] > 0 and i not in special:
                column = after[plain[i]]
                table[:, number] = np.where(column > 0, column, table[:, number])
        begins = np.asarray([(self.tokens[i] or b"\xff")[0] for i in first])  # which no text begins with
        table[similar] = np.where(paths.differs[similar][:, begins], DEAD, table[others])
        _fill(table, parts[2], first)
        for number, i in enumerate(first):
            if int(i) in symbols:
                table[:, number] = automaton.next[:, symbols[int(i)]]
        end_classes = classes[list(special)]
        table[:, end_classes] = DEAD
        alive: np.ndarray = np.arange(size) > DEAD
        # What bytes can finish, tokens can, if there is one for each byte and none of the special ones is an end.
        if not self._has_every_byte or any(symbols.get(i, OTHER) > OTHER for i in ends):
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
        hint = _hints(automaton, allowed, classes, self, special)
        return TokenAutomaton(number[table[seen]].astype(np.int32), classes.astype(np.int32), allowed[seen], hint[seen])


def _fill(table: np.ndarray, edges: Edges, first: np.ndarray) -> None:
    """Writes where edges lead; each column is of one token."""
    tree, state, leaf, to = edges
    order = np.argsort(leaf, kind="stable")
    begins = np.searchsorted(leaf[order], np.arange(tree.texts + 1))
    for number, text in enumerate(tree.of_token[first]):
        if text >= 0:
            some = order[begins[text] : begins[text + 1]]
            table[state[some], number] = to[some]


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
