"""The texts of all tokens as a tree, and where they lead in an automaton over bytes.

Shapes: V tokens, N nodes of the tree, S states.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Budget
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import SYMBOLS

MOST_EDGES = 2**23  # of a state and a text, that are followed one by one
CHARACTER = SYMBOLS  # any character that stands for itself in a string of JSON
TOGETHER = 2**20  # nodes that are looked at together
MOST_DIFFERENT = 8  # symbols after which a state that is like another one does something else


class Tree(NamedTuple):
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


class Edges(NamedTuple):
    """From which states which texts of a tree lead where."""

    tree: Tree
    state: np.ndarray
    leaf: np.ndarray
    to: np.ndarray


def summed(tree: Tree, leaf: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The sum of values over the edges of each token's text [V]."""
    of_leaf = np.zeros(tree.texts + 1, np.uint64)
    np.add.at(of_leaf, leaf, values)
    return of_leaf[tree.of_token]


def alike(following: np.ndarray, by_length: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States which nearly all symbols leave as they leave another one, to which plain characters lead: such as those
    that have read the beginning of a mark. These [L], the others [L], and the symbols that differ [S, SYMBOLS]."""
    other = following[:, ord("q")]  # a letter of no mark, as good as any
    differs = following != following[other]
    found = by_length[other] & (run[other] == other) & ~by_length & (differs.sum(axis=1) <= MOST_DIFFERENT)
    found[DEAD] = False
    states = np.flatnonzero(found)
    return states, other[states], differs


def tree_of(texts: Mapping[int, tuple[int, ...]], size: int) -> Tree:
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
    return Tree(*columns, np.asarray(leaves, np.int32)[order], of_token, texts_found)


def walk(
    following: np.ndarray,
    states: np.ndarray,
    tree: Tree,
    budget: Budget,
    begins: np.ndarray | None = None,
    places: np.ndarray | None = None,
) -> Edges:
    """Where the texts of a tree lead from some states.

    Args:
        begins: symbols that texts must begin with [S, SYMBOLS].
        places: states to begin in instead of these.
    """
    places = states if places is None else places
    none = np.zeros(0, np.int64)
    found, edges = [(none, none, none)], 0
    begin, each = 0, 32
    while begin < len(states):
        origin, at = states[begin : begin + each], places[begin : begin + each]
        begin += each
        node = np.zeros(len(origin), np.int64)
        most, allowed = 1, begins
        while node.size:
            budget.check()
            counts = tree.children[node]
            total = int(counts.sum())
            most = max(most, total)
            ends = np.cumsum(counts)
            child = np.repeat(tree.child[node] - (ends - counts), counts) + np.arange(total)
            to = following[np.repeat(at, counts), tree.symbol[child]]
            if allowed is not None:
                to = np.where(allowed[np.repeat(origin, counts), tree.symbol[child]], to, DEAD)
                allowed = None
            alive = np.flatnonzero(to)
            node, at, origin = child[alive], to[alive], np.repeat(origin, counts)[alive]
            here = np.flatnonzero(tree.leaf[node] >= 0)
            edges += len(here)
            if edges > MOST_EDGES:
                why = "the constraint allows too many tokens in too many states; make it smaller"
                raise ConstraintError("constraint_too_large", why)
            found.append((origin[here], tree.leaf[node[here]], at[here]))
        each = max(1, min(4 * each, each * TOGETHER // most))
    return Edges(tree, *(np.concatenate(column) for column in zip(*found, strict=True)))


def runs(following: np.ndarray) -> np.ndarray:
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
    ascii = [b for b in range(0x20, 0x80) if b not in b'"\\<']
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
