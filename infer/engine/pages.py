"""Which pages of the caches are whose: what a row needs is held for it, and comes back when it leaves.

Rows whose prompts begin alike have the same full pages there, and so may an index of prompts: a page is free once
nobody has it. Nothing is written to a full page. Pure host code: `Slots` brings the table to the device.
"""

from collections.abc import Callable, Sequence

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
        reclaim: frees some of the pages that are kept for later and that no row has; called where there are any.
    """

    def __init__(self, pages: Pages, rows: int, parts: int = 1):
        self.pages, self._rows_of_part = pages, rows // parts
        self.table, self.changed = pages.empty(rows, parts), False
        self.reclaim: Callable[[], object] = lambda: None
        self._nobody, self._of_part = self.table[:, 0].copy(), pages.total // parts
        self._free = [list(range((p + 1) * self._of_part - 1, p * self._of_part, -1)) for p in range(parts)]
        self._users, self._kept, self._held = *np.zeros((2, pages.total), np.int32), [0] * rows

    @property
    def free(self) -> int:
        """Tokens that there is room for, what is kept for later alone not counted."""
        return self.pages.size * sum(map(len, self._free))

    @property
    def available(self) -> int:
        """The same with what is kept for later alone, which gives way."""
        return self.free + self.pages.size * int(np.sum(self.only_kept(slice(None))))

    def only_kept(self, pages: Sequence[int] | slice) -> np.ndarray:
        """Which of these pages are kept for later, and no row has."""
        return (self._kept[pages] > 0) & (self._users[pages] == self._kept[pages])

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.free + self.pages.size * int(np.sum(self._users > 0))

    def on_device(self) -> tuple[np.ndarray, np.ndarray]:
        """The table and the positions that each row's pages hold, as caches have them."""
        return self.table.copy(), self.pages.size * np.asarray(self._held, np.int32)

    def part(self, row: int) -> int:
        """The part of the mesh that a row belongs to."""
        return row // self._rows_of_part

    def has(self, row: int, tokens: int) -> bool:
        """Whether a row has pages for so many tokens."""
        return tokens <= self.pages.size * self._held[row]

    def of(self, row: int, start: int, end: int) -> list[int]:
        """The pages of a row that hold these positions, full ones."""
        return self.table[row, start // self.pages.size : end // self.pages.size].tolist()

    def missing(self, row: int, tokens: int) -> int:
        """Pages that a row needs for so many tokens, besides those that it has."""
        return max(0, min(-(-tokens // self.pages.size), self.pages.of_row) - self._held[row])

    def fits(self, row: int, tokens: int, shared: Sequence[int] = (), others: int = 0) -> bool:
        """Whether there are pages for so many tokens of a row, some of which it may share, and so many for others."""
        part = self.part(row)
        kept = int(np.sum(self.only_kept(slice(part * self._of_part, (part + 1) * self._of_part))))
        kept -= int(np.sum(self.only_kept(list(shared))))
        return self.missing(row, tokens) - len(shared) + others <= len(self._free[part]) + kept

    def hold(self, row: int, tokens: int, *, reclaim: bool = True) -> bool:
        """Holds pages for so many tokens of a row, besides those that it has; false, and nothing changes, if there are
        too few. Pages that are kept for later give way (`reclaim`)."""
        free, missing = self._free[self.part(row)], self.missing(row, tokens)
        if missing > len(free) and not (reclaim and self.fits(row, tokens)):
            return False
        while missing > len(free):
            self.reclaim()
        for place in range(self._held[row], self._held[row] + missing):
            self._put(row, place, free.pop())
        return True

    def share(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Gives a row pages that another one has filled, for its positions from `start` on, in the place of its own.
        Where it has none yet, these come next."""
        first = start // self.pages.size
        assert start % self.pages.size == 0
        assert first <= self._held[row]
        for place, page in enumerate(pages, first):
            assert self.part(row) == page // self._of_part, "pages of another part of the mesh"
            had = [int(self.table[row, place])] if place < self._held[row] else []
            self._put(row, place, page)
            self._let_go(had)

    def keep(self, pages: Sequence[int]) -> None:
        """Keeps pages for later, whatever becomes of their rows."""
        for page in pages:
            self._users[page] += 1
            self._kept[page] += 1

    def give_up(self, pages: Sequence[int]) -> None:
        """Ends a `keep`."""
        for page in pages:
            self._kept[page] -= 1
        self._let_go(pages)

    def _let_go(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page // self._of_part].append(page)

    def drop(self, row: int) -> None:
        """Gives back what a row has."""
        held = self._held[row]
        self._let_go(self.table[row, :held][::-1].tolist())
        self.table[row], self._held[row] = self._nobody[row], 0
        self.changed |= held > 0

    def _put(self, row: int, place: int, page: int) -> None:
        self._users[page] += 1
        self.table[row, place], self._held[row], self.changed = page, max(self._held[row], place + 1), True
