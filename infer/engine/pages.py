"""Which pages of the caches are whose: what a row needs is held for it, and comes back when it leaves.

Pure host code: `Slots` brings the table to the device.
"""

import numpy as np

from dflash_jax.cache import Pages


class PageTable:
    """The table of all rows, and the pages that nobody has.

    Args:
        pages: room for all rows.
        rows: of the caches.
        parts: of the mesh, each of which has pages and rows of its own.

    Attributes:
        table: as the device reads it (see `cache.pages`).
        changed: whether the device has to be given it again.
    """

    def __init__(self, pages: Pages, rows: int, parts: int = 1):
        self.pages, self._rows_of_part = pages, rows // parts
        self.table, self.changed = pages.empty(rows, parts), False
        self._nobody, of_part = self.table[:, 0].copy(), pages.total // parts
        self._free = [list(range((part + 1) * of_part - 1, part * of_part, -1)) for part in range(parts)]
        self._held = [0] * rows

    @property
    def free(self) -> int:
        """Tokens that there is room for."""
        return self.pages.size * sum(map(len, self._free))

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.free + self.pages.size * sum(self._held)

    def on_device(self) -> tuple[np.ndarray, np.ndarray]:
        """The table and the positions that each row's pages hold, as caches have them."""
        return self.table.copy(), self.pages.size * np.asarray(self._held, np.int32)

    def part(self, row: int) -> int:
        """The part of the mesh that a row belongs to."""
        return row // self._rows_of_part

    def hold(self, row: int, tokens: int) -> bool:
        """Holds pages for so many tokens of a row, besides those that it has; false, and nothing changes, if there are
        too few."""
        free, held = self._free[self.part(row)], self._held[row]
        needed = min(-(-tokens // self.pages.size), self.pages.of_row)
        if needed - held > len(free):
            return False
        for place in range(held, needed):
            self.table[row, place] = free.pop()
        self._held[row], self.changed = max(held, needed), self.changed or needed > held
        return True

    def drop(self, row: int) -> None:
        """Gives back what a row has."""
        held = self._held[row]
        self._free[self.part(row)] += reversed(self.table[row, :held].tolist())
        self.table[row] = self._nobody[row]
        self._held[row], self.changed = 0, self.changed or held > 0
