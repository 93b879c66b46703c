"""Automata over bytes: the states that the derivatives of an expression lead to, as a table.

Shapes: S states, C classes of bytes that no state tells apart.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import SYMBOLS, Expression, Expressions, Set

DEAD = 0  # the state from which nothing is matched any more


class Budget(NamedTuple):
    """What a constraint may take.

    Attributes:
        states: of its automaton over bytes.
        until: by `time.thread_time`: on a busy machine nothing is refused for that.
    """

    states: int = 2**13
    until: float = float("inf")

    def check(self) -> None:
        """Raises ConstraintError when the time is over."""
        if time.thread_time() > self.until:
            raise ConstraintError("constraint_timeout", "the constraint takes too long to prepare; make it smaller")


class Automaton(NamedTuple):
    """An automaton over bytes; state 0 is dead, state 1 the first.

    Attributes:
        next: of a state by a byte, or a symbol of special tokens [S, SYMBOLS].
        final: whether what was read is matched [S].
    """

    next: np.ndarray
    final: np.ndarray

    def matches(self, text: bytes) -> bool:
        """Whether it matches a text."""
        state = 1
        for byte in text:
            state = self.next[state, byte]
        return bool(self.final[state])


def automaton(made: Expressions, expression: Expression, budget: Budget | None = None) -> Automaton:
    """The automaton of an expression.

    Raises:
        ConstraintError: it has too many states, takes too long, or matches nothing.
    """
    budget = budget or Budget()
    numbers, rows, final = {made.nothing: DEAD, expression: 1}, [np.zeros(SYMBOLS, np.int32)], [False]
    if expression is made.nothing:
        raise unsatisfiable()
    members, waiting = dict[Set, np.ndarray](), [expression]
    for state in waiting:
        budget.check()
        row = np.zeros(SYMBOLS, np.int32)
        for of in made.classes(state):
            following = made.derivative(state, of)
            number = numbers.get(following)
            if number is None:
                number = numbers[following] = len(numbers)
                waiting.append(following)
                if number >= budget.states or len(made) > 64 * budget.states:
                    raise ConstraintError(
                        "constraint_too_large",
                        f"the constraint needs more than {budget.states} states; give it shorter lengths, fewer "
                        "alternatives or less nesting",
                    )
            if number:
                if of not in members:
                    members[of] = np.fromiter(_bits(of), np.int32)
                row[members[of]] = number
        rows.append(row)
        final.append(state.empty)
    return _smallest(np.stack(rows), np.asarray(final), budget, plain=made.plain)


def unsatisfiable(why: str = "no text does") -> ConstraintError:
    return ConstraintError("unsatisfiable", f"nothing satisfies the constraint: {why}")


def _bits(of: Set) -> Iterator[int]:
    while of:
        lowest = of & -of
        yield lowest.bit_length() - 1
        of ^= lowest


def leading_to(following: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which states lead to one of those wanted, or are one."""
    columns = np.unique(following, axis=1)  # each class of bytes once
    states, to = np.repeat(np.arange(len(columns)), columns.shape[1]), columns.reshape(-1)
    order = np.argsort(to, kind="stable")
    begin = np.searchsorted(to[order], np.arange(len(columns) + 1))
    found, frontier = wanted.copy(), np.flatnonzero(wanted)
    while frontier.size:
        before = np.concatenate([states[order[begin[s] : begin[s + 1]]] for s in frontier])
        frontier = np.unique(before[~found[before]])
        found[frontier] = True
    found[DEAD] = False
    return found


def _smallest(following: np.ndarray, final: np.ndarray, budget: Budget, *, plain: bool) -> Automaton:
    """Without states that lead nowhere, and with equal ones merged."""
    if not plain:
        alive = leading_to(following, final)
        budget.check()
        if not alive[1]:
            raise unsatisfiable()
        following, final = np.where(alive[following], following, DEAD), final & alive
    weights = np.random.default_rng(0).integers(1, 2**63, SYMBOLS, dtype=np.uint64) | np.uint64(1)
    while True:  # states with equal rows are one, until all differ
        budget.check()
        # Equal sums are equal rows, but by a chance of 2**-40; what is merged is compared.
        sums = (following.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64) * np.uint64(2) + final
        _, first, block = np.unique(sums, return_index=True, return_inverse=True)
        if len(first) == len(following):
            break
        same = first[block.reshape(-1)]
        if not ((following == following[same]).all() and (final == final[same]).all()):
            break
        kept = np.unique(same)  # in order: state 0 is dead, state 1 the first one, as before
        number = np.searchsorted(kept, same)
        following, final = number[following[kept]], final[kept]
    return Automaton(following.astype(np.int32), final)
