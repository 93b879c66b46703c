"""The bytes of every token, and what an automaton over bytes becomes when it reads tokens.

Shapes: V tokens, N nodes of the tree of their bytes, S states, C classes of tokens that no state tells apart.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Automaton, Budget, leading_to, unsatisfiable
from dflash_jax.constraints.errors import ConstraintError

MOST_EDGES = 2**23  # of a state and a token, that are followed one by one
TOGETHER = 2**20  # nodes that are looked at together


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
    """Bytes of tokens as a tree; node 0 is its root, and the children of a node follow one another.

    Attributes:
        byte: that leads to each node.
        child, children: of each node, the first one and how many.
        tokens: of all nodes in order; those that end at node n are `tokens[token[n] : token[n + 1]]`.
    """

    byte: np.ndarray
    child: np.ndarray
    children: np.ndarray
    token: np.ndarray
    tokens: np.ndarray


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
            if token and min(token) >= 0x20 and b'"' not in token and b"\\" not in token:
                try:
                    found[i] = len(token.decode())
                except UnicodeDecodeError:
                    continue
        return found

    @cached_property
    def _trees(self) -> tuple[_Tree, _Tree]:
        """Of all tokens, and of those that are not plain."""
        with_text = [i for i, token in enumerate(self.tokens) if token]
        return _tree(self.tokens, with_text), _tree(self.tokens, [i for i in with_text if self._plain[i] < 0])

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The token of each text that is one."""
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}

    def prepare(self) -> None:
        """Makes what all constraints share."""
        _ = self._trees

    def reading(self, automaton: Automaton, ends: Sequence[int], budget: Budget | None = None) -> TokenAutomaton:
        """The automaton that reads tokens in place of bytes.

        Args:
            ends: tokens that end an answer, where it may end.

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
        by_length = (after >= 0).all(axis=0)
        by_length[DEAD] = False
        whole, rest = self._trees
        budget.check()
        parts = []
        if len(states := np.flatnonzero(~by_length)) > 1:
            parts.append(_walk(automaton.next, states, whole, budget))
        if len(states := np.flatnonzero(by_length)):
            parts.append(_walk(automaton.next, states, rest, budget))
        state, token, to = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return self._table(automaton, (state, token, to), np.where(by_length[None], after, 0), ends, budget)

    def _table(
        self,
        automaton: Automaton,
        edges: tuple[np.ndarray, np.ndarray, np.ndarray],
        after: np.ndarray,
        ends: Sequence[int],
        budget: Budget,
    ) -> TokenAutomaton:
        """Classes of tokens, and the table by them.

        Args:
            edges: states, tokens, and the states that these lead to.
            after: of each number of plain characters, where they lead [n, S]; 0 where edges say it.
        """
        state, token, to = edges
        rng, size = np.random.default_rng(1), len(automaton.next)
        names = rng.integers(1, 2**63, (2, size), dtype=np.uint64) | np.uint64(1)
        # Tokens that lead every state to the same one have equal sums, and others do not but by a chance of 2**-60.
        mixed = names[0][state] * (names[1][to] >> np.uint64(7))
        order = np.argsort(token, kind="stable")
        begins = np.searchsorted(token[order], np.arange(len(self) + 1))
        running = np.concatenate([[np.uint64(0)], np.cumsum(mixed[order], dtype=np.uint64)])
        sums = running[begins[1:]] - running[begins[:-1]]
        of_length = (names[0][None] * (names[1][after] >> np.uint64(7)) * (after > 0)).sum(axis=1, dtype=np.uint64)
        plain = self._plain
        sums += np.where(plain > 0, of_length[np.maximum(plain, 0)], np.uint64(0))
        special = {i: number for number, i in enumerate(dict.fromkeys(ends))}
        sums[list(special)] = rng.integers(1, 2**63, len(special), dtype=np.uint64)
        _, first, classes = np.unique(sums, return_index=True, return_inverse=True)
        classes = classes.reshape(-1)
        budget.check()
        table = np.zeros((size, len(first)), np.int32)
        one = np.zeros(len(self), bool)
        one[first] = True
        kept = one[token]
        table[state[kept], classes[token[kept]]] = to[kept]
        for number, i in enumerate(first):
            if plain[i] > 0 and i not in special:
                column = after[plain[i]]
                table[:, number] = np.where(column > 0, column, table[:, number])
        end_classes = classes[list(special)]
        table[:, end_classes] = DEAD
        alive = automaton.final.copy() if len(special) else np.zeros(size, bool)
        alive = leading_to(table, alive)
        if not alive[1]:
            raise unsatisfiable("no tokens of this vocabulary do")
        table = np.where(alive[table], table, DEAD)
        allowed = table > 0
        allowed[np.ix_(automaton.final & alive, end_classes)] = True
        allowed[DEAD] = False
        # States that tokens reach, and no others.
        seen, frontier = np.zeros(size, bool), np.asarray([1])
        while frontier.size:
            seen[frontier] = True
            frontier = np.unique(table[frontier])
            frontier = frontier[(frontier > 0) & ~seen[frontier]]
        seen[DEAD] = True
        number = np.cumsum(seen) - 1
        hint = _hints(automaton, allowed, classes, self, special)
        return TokenAutomaton(number[table[seen]].astype(np.int32), classes.astype(np.int32), allowed[seen], hint[seen])


def _tree(tokens: Sequence[bytes | None], of: Sequence[int]) -> _Tree:
    """The tree of some tokens."""
    ordered = sorted(of, key=lambda i: tokens[i] or b"")
    texts = [tokens[i] or b"" for i in ordered]
    parents, byte, ending, path, before = [-1], [0], [], [0], b""
    for text in texts:
        shared = 0
        while shared < min(len(before), len(text)) and before[shared] == text[shared]:
            shared += 1
        del path[shared + 1 :]
        for value in text[shared:]:
            parents.append(path[-1])
            byte.append(value)
            path.append(len(byte) - 1)
        ending.append(path[-1])
        before = text
    # In the order of their parents; these stand before them already.
    order = np.argsort(np.asarray(parents), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    nodes = np.arange(len(order) + 1)
    # `order` sorts by old numbers of parents: what counts is that children of one parent lie side by side.
    of_parent = np.searchsorted(np.asarray(parents)[order], np.arange(len(order) + 1))
    child, children = of_parent[:-1][order], np.diff(of_parent)[order]
    at = number[np.asarray(ending, np.int64)] if ending else np.zeros(0, np.int64)
    sort = np.argsort(at, kind="stable")
    return _Tree(
        np.asarray(byte, np.int32)[order],
        child,
        children,
        np.searchsorted(at[sort], nodes),
        np.asarray(ordered, np.int32)[sort] if ending else np.zeros(0, np.int32),
    )


def _walk(
    following: np.ndarray, states: np.ndarray, tree: _Tree, budget: Budget
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From which of some states which tokens lead where: three arrays of a length."""
    found, edges = list[tuple[np.ndarray, np.ndarray, np.ndarray]](), 0
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
            to = following[np.repeat(at, counts), tree.byte[child]]
            alive = np.flatnonzero(to)
            node, at, origin = child[alive], to[alive], np.repeat(origin, counts)[alive]
            here = tree.token[node + 1] - tree.token[node]
            if (count := int(here.sum())) > 0:
                edges += count
                if edges > MOST_EDGES:
                    raise ConstraintError(
                        "constraint_too_large", "the constraint allows too many tokens in too many states; make it smaller"
                    )
                ends = np.cumsum(here)
                place = np.repeat(tree.token[node] - (ends - here), here) + np.arange(count)
                found.append((np.repeat(origin, here), tree.tokens[place], np.repeat(at, here)))
        each = max(1, min(4 * each, each * TOGETHER // most))
    if not found:
        return tuple(np.zeros(0, np.int64) for _ in range(3))  # pyright: ignore[reportReturnType]
    return tuple(np.concatenate(column) for column in zip(*found, strict=True))  # pyright: ignore[reportReturnType]


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
