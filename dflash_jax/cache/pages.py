"""Rows of a cache in pages: who has which ones stands in a table, one for the caches of target and drafter.

What a row holds lies in pages of so many positions each, anywhere among those of all rows: the table says where. So a
row takes the memory that its tokens need, and grows without being moved. The host decides (see `infer.engine.pages`);
the device reads the table. A mesh splits pages as it splits rows, and the first page of every part is nobody's: where a
table has no page yet, it has this one.
"""

from typing import NamedTuple

import numpy as np

PAGE = 128  # positions of a page: a chunk of every kernel, or several; and a TPU's tile of the scales of codes


class Pages(NamedTuple):
    """Room for rows in pages.

    Attributes:
        total: pages of all rows together, with those that are nobody's.
        of_row: the most of a row.
        size: positions of a page.
    """

    total: int
    of_row: int
    size: int

    @classmethod
    def room(cls, tokens: int, longest: int, parts: int = 1) -> "Pages":
        """Pages for so many tokens of all rows, of which one has `longest` at most, in the parts of a mesh."""
        size = PAGE
        return cls((-(-tokens // (size * parts)) + 1) * parts, -(-longest // size), size)

    @property
    def longest(self) -> int:
        """The most positions of a row."""
        return self.of_row * self.size

    def empty(self, rows: int, parts: int) -> np.ndarray:
        """The table [rows, of_row] of rows that have nothing."""
        nobody = np.arange(parts, dtype=np.int32) * (self.total // parts)
        return np.tile(np.repeat(nobody, rows // parts)[:, None], (1, self.of_row))


class Recent(NamedTuple):
    """Room for the first page and the last positions of every row, in pages of its own.

    Attributes:
        longest: the most positions of a row.
        window: how many of the last ones are there at least.
    """

    longest: int
    window: int

    @property
    def size(self) -> int:
        """Positions of a page."""
        return PAGE

    @property
    def seen(self) -> int:
        """Pages that the last positions may lie in."""
        return -(-(self.window - 1) // PAGE) + 1

    def ring(self, widest: int) -> int:
        """Pages that take turns to hold the last positions, where so many are written at once."""
        return max(self.seen, -(-widest // PAGE) + 1)

    def table(self, rows: int, widest: int) -> np.ndarray:
        """The table [rows, pages of `longest`]: the first page, then those that take turns, of every row."""
        ring, pages = self.ring(widest), np.arange(-(-self.longest // PAGE), dtype=np.int32)
        within = np.where(pages == 0, 0, 1 + (pages - 1) % ring)
        return np.arange(rows, dtype=np.int32)[:, None] * (1 + ring) + within[None].astype(np.int32)


Capacity = int | Pages | Recent  # positions of every row, pages that rows share, or the last positions


class Windowed(NamedTuple):
    """Room for a target, and for a drafter that sees the first page and the last positions alone (see `Recent`).

    Attributes:
        slots: of the target.
        window: of the drafter.
    """

    slots: int | Pages
    window: int

    @property
    def longest(self) -> int:
        """The most positions of a row."""
        return self.slots if isinstance(self.slots, int) else self.slots.longest

    @property
    def of_drafter(self) -> Recent:
        """The drafter's room."""
        return Recent(self.longest, self.window)
