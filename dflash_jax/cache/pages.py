"""Rows of a cache in pages: who has which ones stands in a table, one for the caches of target and drafter.

What a row holds lies in pages of so many positions each, anywhere among those of all rows: the table says where. So a
row takes the memory that its tokens need, and grows without being moved. The host decides (see `infer.engine.pages`);
the device reads the table. A mesh splits pages as it splits rows, and the first page of every part is nobody's: where a
table has no page yet, it has this one.
"""

from typing import NamedTuple

import numpy as np

PAGE = 128  # positions of a page: a chunk of every kernel, or several


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


Capacity = int | Pages  # positions of every row, or the pages that rows share
