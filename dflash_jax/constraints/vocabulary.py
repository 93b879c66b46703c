"""The bytes of every token, and what an automaton over bytes becomes when it reads tokens.

Shapes: V tokens, N nodes of the tree of their bytes, S states, C classes of tokens that no state tells apart.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Automaton, Budget, leading_to, unsatisfiable
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import OTHER, SYMBOLS

MOST_EDGES = 2**23  # of a state and a text, that are followed one by one
CHARACTER = SYMBOLS  # any character that stands for itself in a string of JSON
TOGETHER = 2**20  # nodes that are looked at together


# Characters that stand for themselves in a string of JSON.
_PLAIN = re.compile(
    rb"(?:[\x20-\x21\x23-\x5b\x5d-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
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


class _Tree(NamedTuple):
    """Texts of tokens as a tree; node 0 is its root, and the children of a node follow one another.

    Attributes:
        symbol: that leads to each node, a byte or `CHARACTER`.
        child, children: of each node, the first one and how many.
        leaf: number of the text that ends at each node; -1 where none does.
        of_token: which text each token is; -1 for those that are not in the tree.
        texts: how many there are.
    """

    symbol: np.ndarray
    child: np.ndarray
    children: np.ndarray
    leaf: np.ndarray
    of_token: np.ndarray
    texts: int


class _Edges(NamedTuple):
    """From which states which texts of a tree lead where."""

    tree: _Tree
    state: np.ndarray
    leaf: np.ndarray
    to: np.ndarray


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
    def _trees(self) -> tuple[_Tree, _Tree]:
        """Of all tokens; and of those that are not plain, in which each plain character at the beginning is one
        symbol."""
        texts = {i: tuple(token) for i, token in enumerate(self.tokens) if token}
        short = dict[int, tuple[int, ...]]()
        for i, text in texts.items():
            if self._plain[i] < 0:
                begin = _PLAIN.match(bytes(text))
                plain = begin[0] if begin else b""
                short[i] = (CHARACTER,) * len(plain.decode()) + text[len(plain) :]
        return _tree(texts, len(self)), _tree(short, len(self))

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
        run = _runs(automaton.next)
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
        parts = [
            _walk(following, np.flatnonzero(~by_length), whole, budget),
            _walk(following, np.flatnonzero(by_length), rest, budget),
        ]
        return self._table(automaton, parts, np.where(by_length[None], after, 0), ends, budget, marks or {})

    def _table(
        self,
        automaton: Automaton,
        parts: Sequence[_Edges],
        after: np.ndarray,
        ends: Sequence[int],
        budget: Budget,
        marks: Mapping[str, int],
    ) -> TokenAutomaton:
        """Classes of tokens, and the table by them.

        Args:
            parts: where texts lead.
            after: of each number of plain characters, where they lead [n, S]; 0 where the parts say it.
        """
        rng, size = np.random.default_rng(1), len(automaton.next)
        names = rng.integers(1, 2**63, (2, size), dtype=np.uint64) | np.uint64(1)
        # Tokens that lead every state to the same one have equal sums, and others do not but by a chance of 2**-60.
        sums = np.zeros(len(self), np.uint64)
        for tree, state, leaf, to in parts:
            of_leaf = np.zeros(tree.texts + 1, np.uint64)
            np.add.at(of_leaf, leaf, names[0][state] * (names[1][to] >> np.uint64(7)))
            sums += of_leaf[tree.of_token]
        of_length = (names[0][None] * (names[1][after] >> np.uint64(7)) * (after > 0)).sum(axis=1, dtype=np.uint64)
        plain = self._plain
        sums += np.where(plain > 0, of_length[np.maximum(plain, 0)], np.uint64(0))
        symbols = {i: marks.get(name, OTHER) for name, i in self.special.items()}
        led = automaton.next[:, OTHER:]  # by special tokens
        weights = (names[0][:, None] * (names[1][led] >> np.uint64(7))).sum(axis=0, dtype=np.uint64)
        used = np.count_nonzero(led, axis=0)
        for i, symbol in symbols.items():
            if used[symbol - OTHER]:
                sums[i] = weights[symbol - OTHER]
        special = {i: number for number, i in enumerate(dict.fromkeys(ends))}
        sums[list(special)] = rng.integers(1, 2**63, len(special), dtype=np.uint64)
        _, first, classes = np.unique(sums, return_index=True, return_inverse=True)
        classes = classes.reshape(-1)
        budget.check()
        table = np.zeros((size, len(first)), np.int32)
        for tree, state, leaf, to in parts:
            order = np.argsort(leaf, kind="stable")
            begins = np.searchsorted(leaf[order], np.arange(tree.texts + 1))
            for number, text in enumerate(tree.of_token[first]):
                if text >= 0:
                    some = order[begins[text] : begins[text + 1]]
                    table[state[some], number] = to[some]
        for number, i in enumerate(first):
            if plain[i] > 0 and i not in special:
                column = after[plain[i]]
                table[:, number] = np.where(column > 0, column, table[:, number])
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


def _tree(texts: Mapping[int, tuple[int, ...]], size: int) -> _Tree:
    """The tree of the texts of some tokens, of `size` in all."""
    parents, symbols, leaves, path, before = [-1], [0], [-1], [0], ()
    of_token, texts_found = np.full(size, -1, np.int32), 0
    for i in sorted(texts, key=texts.__getitem__):
        text, shared = texts[i], 0
        for one, other in zip(before, text, strict=False):
            if one != other:
                break
            shared += 1
        del path[shared + 1 :]
        for symbol in text[shared:]:
            parents.append(path[-1])
            symbols.append(symbol)
            leaves.append(-1)
            path.append(len(symbols) - 1)
        if leaves[path[-1]] < 0:
            leaves[path[-1]] = texts_found
            texts_found += 1
        of_token[i], before = leaves[path[-1]], text
    order = np.argsort(np.asarray(parents), kind="stable")  # children of a node side by side, the root first
    begin = np.searchsorted(np.asarray(parents)[order], np.arange(len(order) + 1))
    columns = np.asarray(symbols, np.int32)[order], begin[:-1][order], np.diff(begin)[order]
    return _Tree(*columns, np.asarray(leaves, np.int32)[order], of_token, texts_found)


def _walk(following: np.ndarray, states: np.ndarray, tree: _Tree, budget: Budget) -> _Edges:
    """Where the texts of a tree lead from some states."""
    none = np.zeros(0, np.int64)
    found, edges = [(none, none, none)], 0
    begin, each = 0, 32
    while begin < len(states):
        begun = states[begin : begin + each]
        begin += each
        origin, at, node = begun, begun, np.zeros(len(begun), np.int64)
        most = 1
        while node.size:
            budget.check()
            counts = tree.children[node]
            total = int(counts.sum())
            most = max(most, total)
            ends = np.cumsum(counts)
            child = np.repeat(tree.child[node] - (ends - counts), counts) + np.arange(total)
            to = following[np.repeat(at, counts), tree.symbol[child]]
            alive = np.flatnonzero(to)
            node, at, origin = child[alive], to[alive], np.repeat(origin, counts)[alive]
            here = np.flatnonzero(tree.leaf[node] >= 0)
            edges += len(here)
            if edges > MOST_EDGES:
                why = "the constraint allows too many tokens in too many states; make it smaller"
                raise ConstraintError("constraint_too_large", why)
            found.append((origin[here], tree.leaf[node[here]], at[here]))
        each = max(1, min(4 * each, each * TOGETHER // most))
    return _Edges(tree, *(np.concatenate(column) for column in zip(*found, strict=True)))


def _runs(following: np.ndarray) -> np.ndarray:
    """Where any single character leads that stands for itself in a string of JSON [S]; -1 where that depends on which
    it is."""

    def same(columns: np.ndarray) -> np.ndarray:
        """The state that all columns [S, n] have; -1 where they differ."""
        return np.where((columns == columns[:, :1]).all(axis=1), columns[:, 0], -1)

    def behind(states: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.where(states < 0, -1, of[states])

    every = lambda low, high: same(following[:, low : high + 1])
    last = every(0x80, 0xBF)
    two = behind(last, last)
    ascii = [b for b in range(0x20, 0x80) if b not in b'"\\']
    leads = [
        same(following[:, ascii]),
        behind(every(0xC2, 0xDF), last),
        behind(following[:, 0xE0], behind(every(0xA0, 0xBF), last)),
        behind(same(following[:, [*range(0xE1, 0xED), 0xEE, 0xEF]]), two),
        behind(following[:, 0xED], behind(every(0x80, 0x9F), last)),
        behind(following[:, 0xF0], behind(every(0x90, 0xBF), two)),
        behind(every(0xF1, 0xF3), behind(last, two)),
        behind(following[:, 0xF4], behind(every(0x80, 0x8F), two)),
    ]
    return same(np.stack(leads, axis=1))


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
