"""Which program reads the next of the prompts: how many rows of them, and how many tokens of each.

A program reads the weights once, whatever it reads of the prompts, and holds up the rows that decode for as long as it
runs. So it reads several short pieces at once, but not more than `TOKENS`, or one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SHORT, HALVES = 32, 128  # tokens of the smallest program; halves of a chunk have at least 128
TOKENS = 256  # of a program of several rows
BESIDE_ROWS = 4  # prompts that a step of other rows reads at most
TOGETHER = 0.8  # several rows must be so much faster than one, which is read sooner and decodes sooner


class PrefillShape(NamedTuple):
    """The shape of a program.

    Attributes:
        rows: prompts that it reads of each part of the mesh.
        tokens: of each of them, at most.
    """

    rows: int
    tokens: int


class PrefillCost(NamedTuple):
    """What a program costs: for rows without a committed position, and for each position of the longest one."""

    empty: float
    per_position: float = 0.0

    def at(self, longest: int) -> float:
        return self.empty + self.per_position * longest


class BesideShape(NamedTuple):
    """The shape of what a step reads of prompts beside rows that decode.

    Attributes:
        rows: prompts that it reads of each part of the mesh.
        tokens: of each of them, at most.
        total: tokens of all prompts of a part, at most: a multiple of the rows.
    """

    rows: int
    tokens: int
    total: int

    @classmethod
    def of(cls, budget: int, slots: int, parts: int, chunk: int) -> "BesideShape":
        """For a budget of all parts of the mesh, and prompts that are read in chunks."""
        of_part = budget // parts
        rows = min(BESIDE_ROWS, slots // parts, of_part)
        total = min(of_part, rows * chunk) // rows * rows
        return cls(rows, min(total, chunk), total)

    @property
    def block(self) -> PrefillShape:
        """That of the block, whose positions are not all used at once."""
        return PrefillShape(self.rows, self.tokens)


def modelled(shape: PrefillShape) -> PrefillCost:
    """The cost where none was measured, in tokens: reading the weights is taken to cost as much as 64."""
    return PrefillCost(64.0 + shape.rows * shape.tokens)


class PrefillBatch(NamedTuple):
    """Rows of a program: those it reads, and others, of which it reads nothing, that fill its shape. `last` says
    whether the prompt ends there."""

    rows: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class Prefills:
    """The programs of an engine that read prompts.

    Attributes:
        chunk: tokens after which a chunk ends.
        slots: rows of the cache.
        parts: of the mesh that they are split over.
        fixed: whether the choice follows from a single row alone.
        costs: of each program in seconds, once measured; from then on those that were measured are used.
    """

    chunk: int
    slots: int
    parts: int = 1
    fixed: bool = False
    costs: dict[PrefillShape, PrefillCost] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[PrefillShape, ...]:
        """A whole chunk, halves of it and a short piece; of one row, and of as many rows of a part of the mesh as are
        worth a program."""
        sizes, most = [self.chunk], self.slots // self.parts
        while sizes[0] >= 2 * HALVES:
            sizes.insert(0, sizes[0] // 2)
        sizes = [SHORT, *sizes] if self.chunk >= HALVES else sizes
        return tuple(PrefillShape(rows, n) for n in sizes for rows in sorted({1, min(most, max(1, TOKENS // n))}))

    @property
    def first(self) -> PrefillShape:
        """The one that is compiled first: it reads any prompt, of one row, in pieces of middle size."""
        single = [shape for shape in self.shapes if shape.rows == 1]
        return next((shape for shape in single if shape.tokens >= HALVES), single[-1])

    def shape(self, selected: PrefillBatch) -> PrefillShape:
        """Of the program that takes this batch."""
        rows, tokens = selected.tokens.shape
        return PrefillShape(rows // self.parts, tokens)

    def part(self, slot: int) -> int:
        """The part of the mesh that has a row."""
        return slot * self.parts // self.slots

    def choose(self, left: Sequence[Sequence[tuple[int, int]]]) -> tuple[PrefillShape, float | None]:
        """The program that reads most tokens for its cost, and its seconds, if they were measured; with `fixed`, the
        smallest for one row that reads all that is left.

        Args:
            left: for each part of the mesh, how many tokens of each prompt are committed and how many more could be
                read now, the first in turn first.
        """
        if self.fixed:
            (count,) = (n for part in left for _, n in part)
            single = [shape for shape in self.shapes if shape.rows == 1]
            return next((shape for shape in single if shape.tokens >= count), single[-1]), None
        rates: dict[PrefillShape, tuple[float, float]] = {}
        for shape in self.costs or self.shapes:
            taken = [prompt for part in left for prompt in part[: shape.rows]]
            cost = self.costs.get(shape, modelled(shape)).at(max(start for start, _ in taken))
            rate = sum(min(n, shape.tokens) for _, n in taken) / cost
            rates[shape] = (rate if shape.rows == 1 else TOGETHER * rate), cost
        shape = max(rates, key=lambda shape: rates[shape][0])
        return shape, rates[shape][1] if self.costs else None

    def batch(self, shape: PrefillShape, parts: Sequence[Sequence[tuple[int, Sequence[int]]]] = ()) -> PrefillBatch:
        """The arguments of a program, which reads nothing without `parts`.

        Args:
            parts: for each part of the mesh, cache row and next tokens of each prompt, the first in turn first.
        """
        parts, of_part = parts or [[]] * self.parts, self.slots // self.parts
        count = len(parts) * shape.rows
        zeros = lambda *size: np.zeros(size, np.int32)
        chosen = PrefillBatch(zeros(count), zeros(count, shape.tokens), zeros(count), np.zeros(count, np.bool_))
        for p, part in enumerate(parts):
            taken = [(row, tokens[: shape.tokens]) for row, tokens in part[: shape.rows]]
            busy = {row for row, _ in taken}
            idle = [(row, ()) for row in range(p * of_part, (p + 1) * of_part) if row not in busy]
            for at, (row, tokens) in enumerate([*taken, *idle][: shape.rows], p * shape.rows):
                chosen.rows[at], chosen.counts[at] = row, len(tokens)
                chosen.tokens[at, : len(tokens)] = tokens
        return chosen
