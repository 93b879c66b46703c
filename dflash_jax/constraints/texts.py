"""The texts of all tokens as a tree, and where they lead in an automaton over bytes.

Shapes: V tokens, N nodes of the tree, S states, M moves.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.automaton import DEAD, Budget
from dflash_jax.constraints.errors import ConstraintError

MOST = 2**24  # states times moves: twice the transitions that the tables of an engine have
NOWHERE = 0  # the move of texts that no state allows


class Tree(NamedTuple):
    """Texts of tokens as a tree; node 0 is its root, and the children of a node follow one another.

    Attributes:
        byte: that leads to each node.
        child, children: of each node, the first one and how many.
        leaf: number of the text that ends at each node; -1 where none does.
        of_token: which text each token is; -1 for those that are not in the tree.
        texts: how many there are.
    """

    byte: np.ndarray
    child: np.ndarray
    children: np.ndarray
    leaf: np.ndarray
    of_token: np.ndarray
    texts: int


def tree_of(texts: Mapping[int, bytes], size: int) -> Tree:
    """The tree of the texts of some tokens, of `size` in all."""
    parents, bytes_, leaves, path, before = [-1], [0], [-1], [0], b""
    of_token, texts_found = np.full(size, -1, np.int32), 0
    for i in sorted(texts, key=texts.__getitem__):
        text, shared = texts[i], 0
        for one, other in zip(before, text, strict=False):
            if one != other:
                break
            shared += 1
        del path[shared + 1 :]
        for byte in text[shared:]:
            parents.append(path[-1])
            bytes_.append(byte)
            leaves.append(-1)
            path.append(len(bytes_) - 1)
        if leaves[path[-1]] < 0:
            leaves[path[-1]] = texts_found
            texts_found += 1
        of_token[i], before = leaves[path[-1]], text
    order = np.argsort(np.asarray(parents), kind="stable")  # children of a node side by side, the root first
    begin = np.searchsorted(np.asarray(parents)[order], np.arange(len(order) + 1))
    columns = np.asarray(bytes_, np.int32)[order], begin[:-1][order], np.diff(begin)[order]
    return Tree(*columns, np.asarray(leaves, np.int32)[order], of_token, texts_found)


class Moves:
    """Where texts lead every state, as moves: all texts that lead every state to the same one are the same move, and so
    are their beginnings. There are few, though there are many tokens: a word does to most states what any other word of
    its length does.

    Args:
        following: of a state by a byte [S, bytes].

    Raises:
        ConstraintError: there are more states than its numbers have room for.

    Attributes:
        to: of each move, where it leads each state; the first leads nowhere, and the second one stays.
    """

    def __init__(self, following: np.ndarray):
        size = len(following)
        if size > np.iinfo(np.int16).max:
            raise ConstraintError("constraint_too_large", f"the constraint needs {size} states")
        self.to = [np.full(size, DEAD, np.int16), np.arange(size, dtype=np.int16)]
        self._weights, self._names = np.random.default_rng(1).integers(1, 2**63, (2, size), dtype=np.uint64)
        self._weights |= np.uint64(1)
        self._names[DEAD] = 0
        # Moves with equal sums are one: others have equal ones by a chance of 2**-60 only.
        sums = (self._weights[:, None] * self._names[following]).sum(axis=0, dtype=np.uint64)
        _, first, self._classes = np.unique(sums, return_index=True, return_inverse=True)
        self._step = np.ascontiguousarray(following[:, first].T.astype(np.int16))  # by bytes that no state tells apart
        self._stepped = self._names[following[:, first]]
        self._sums, self._known = dict[int, np.ndarray](), {0: NOWHERE}
        self._after = np.full((64, len(first)), -1, np.int32)
        self._after[NOWHERE] = NOWHERE

    def of_texts(self, tree: Tree, budget: Budget) -> np.ndarray:
        """The move of each text of a tree.

        Raises:
            ConstraintError: there are too many, or it takes too long.
        """
        found = np.full(tree.texts, NOWHERE, np.int32)
        node, move = np.zeros(1, np.int64), np.ones(1, np.int64)
        while node.size:
            counts = tree.children[node]
            ends = np.cumsum(counts)
            node = np.repeat(tree.child[node] - (ends - counts), counts) + np.arange(ends[-1])
            before, by = np.repeat(move, counts), self._classes[tree.byte[node]]
            new = self._after[before, by] < 0
            for pair in np.unique(before[new] * len(self._step) + by[new]).tolist():
                self._append(pair // len(self._step), pair % len(self._step), budget)
            move = self._after[before, by]
            alive = np.flatnonzero(move)
            node, move = node[alive], move[alive]
            here = tree.leaf[node] >= 0
            found[tree.leaf[node[here]]] = move[here]
        return found

    def _append(self, move: int, by: int, budget: Budget) -> None:
        """Finds which move a move and a byte after it are."""
        budget.check()
        if move not in self._sums:
            weights = np.zeros(len(self._weights), np.uint64)
            np.add.at(weights, self.to[move], self._weights)
            weights[DEAD] = 0
            reached = np.flatnonzero(weights)
            self._sums[move] = (weights[reached, None] * self._stepped[reached]).sum(axis=0, dtype=np.uint64)
        both = int(self._sums[move][by])
        if both not in self._known:
            if len(self.to) * len(self._weights) > MOST:
                why = "the constraint allows too many tokens in too many states; make it smaller"
                raise ConstraintError("constraint_too_large", why)
            self._known[both] = len(self.to)
            self.to.append(self._step[by][self.to[move]])
            if len(self.to) > len(self._after):
                self._after = np.concatenate([self._after, np.full_like(self._after, -1)])
        self._after[move, by] = self._known[both]
