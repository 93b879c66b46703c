"""Which program reads the next of the prompts: how many rows of them, and how many tokens of each.

A program reads the weights once, whatever it reads of the prompts, and holds up the rows that decode for as long as it
runs. So it reads several short pieces at once, but not more than `TOKENS`, or one chunk.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflash_jax.decoding.state import RowSettings

SHORT, HALVES = 32, 128  # tokens of the smallest program; halves of a chunk have at least 128
TOKENS = 256  # of a program of several rows
TOGETHER = 0.8  # several rows must be so much faster than one, which is read sooner and decodes sooner


class Unread(NamedTuple):
    """The prompt of a row that was begun.

    Attributes:
        start: tokens of it that are committed.
        keys: of its whole chunks (see `prefixes.PrefixCache`).
        settings: of the row.
    """

    slot: int
    prompt: Sequence[int]
    start: int
    keys: list[bytes]
    settings: RowSettings


class Shape(NamedTuple):
    """The shape of a program.

    Attributes:
        rows: prompts that it reads of each part of the mesh.
        tokens: of each of them, at most.
    """

    rows: int
    tokens: int


def shapes(chunk: int, slots: int) -> tuple[Shape, ...]:
    """Programs for prompts in chunks of `chunk` tokens: a whole chunk, halves of it and a short piece; of one row, and
    of as many of the `slots` of a part of the mesh as are worth a program."""
    sizes = [chunk]
    while sizes[0] >= 2 * HALVES:
        sizes.insert(0, sizes[0] // 2)
    sizes = [SHORT, *sizes] if chunk >= HALVES else sizes
    return tuple(Shape(rows, n) for n in sizes for rows in sorted({1, min(slots, max(1, TOKENS // n))}))


class Cost(NamedTuple):
    """What a program costs: for rows without a committed position, and for each position of the longest one."""

    empty: float
    per_position: float = 0.0

    def at(self, longest: int) -> float:
        return self.empty + self.per_position * longest


def modelled(shape: Shape) -> Cost:
    """The cost where none was measured, in tokens: reading the weights is taken to cost as much as 64."""
    return Cost(64.0 + shape.rows * shape.tokens)


def cheapest(costs: Mapping[Shape, Cost], left: Sequence[Sequence[tuple[int, int]]]) -> tuple[Shape, float]:
    """The program that reads most tokens for its cost, and that cost.

    Args:
        costs: of each program, in any unit.
        left: for each part of the mesh, how many tokens of each prompt are committed and how many more could be read
            now, the first in turn first.
    """

    def expected(shape: Shape) -> tuple[float, float]:
        taken = [one for part in left for one in part[: shape.rows]]
        cost = costs[shape].at(max(start for start, _ in taken))
        rate = sum(min(n, shape.tokens) for _, n in taken) / cost
        return rate if shape.rows == 1 else TOGETHER * rate, cost

    found = {shape: expected(shape) for shape in costs}
    shape = max(found, key=lambda shape: found[shape][0])
    return shape, found[shape][1]


def fixed(shapes: Sequence[Shape], left: int) -> Shape:
    """The program for one row whose choice follows from the row alone: the smallest that reads all that is left."""
    single = [shape for shape in shapes if shape.rows == 1]
    return next((shape for shape in single if shape.tokens >= left), single[-1])


class Selected(NamedTuple):
    """Rows of a program: those it reads, and others, of which it reads nothing, that fill its shape.

    Attributes:
        rows: of the cache.
        tokens, counts: of the prompts.
    """

    rows: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray


def select(shape: Shape, parts: Sequence[Sequence[tuple[int, Sequence[int]]]], slots: int) -> Selected:
    """The arguments of a program.

    Args:
        parts: for each part of the mesh, cache row and next tokens of each prompt, the first in turn first.
        slots: rows of each part.
    """
    count = len(parts) * shape.rows
    chosen = Selected(*(np.zeros(size, np.int32) for size in (count, (count, shape.tokens), count)))
    for p, part in enumerate(parts):
        taken = part[: shape.rows]
        idle = [row for row in range(p * slots, (p + 1) * slots) if row not in {row for row, _ in taken}]
        for i in range(shape.rows):
            at = p * shape.rows + i
            if i >= len(taken):
                chosen.rows[at] = idle[i - len(taken)]
                continue
            chosen.rows[at], tokens = taken[i]
            chosen.counts[at] = len(tokens := tokens[: shape.tokens])
            chosen.tokens[at, : len(tokens)] = tokens
    return chosen
