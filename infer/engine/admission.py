"""Which request goes where: those that wait, and those in slots. Pure host code."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from dflash_jax.infer.engine.rows import ActiveRequest


class Admission:
    """Requests and their slots.

    Attributes:
        waiting: requests that have no slot yet, the first in turn first.
        rows: the request of each slot; None if it is free.
    """

    def __init__(self, slots: int):
        self.waiting: deque[ActiveRequest] = deque()
        self.rows: list[ActiveRequest | None] = [None] * slots
        self._shortest_first = True

    @property
    def busy(self) -> int:
        """Requests in a slot."""
        return sum(row is not None for row in self.rows)

    @property
    def taken(self) -> list[tuple[int, ActiveRequest]]:
        """Slots that have a request, and which."""
        return [(slot, row) for slot, row in enumerate(self.rows) if row is not None]

    @property
    def filling(self) -> dict[int, ActiveRequest]:
        """Requests, by slot, whose prompt is not read to its end."""
        return {slot: row for slot, row in enumerate(self.rows) if row and row.left}

    @property
    def decoding(self) -> dict[int, ActiveRequest]:
        """Requests, by slot, that decode."""
        return {slot: row for slot, row in enumerate(self.rows) if row and row.decoding}

    def place(
        self,
        ready: Callable[[ActiveRequest, int], bool] = lambda row, slot: True,
        full: Callable[[], bool] = lambda: False,
    ) -> list[tuple[ActiveRequest, int]]:
        """Gives free slots to waiting requests.

        Args:
            ready: asked of a request and a slot that it would get; it waits on where the answer is no for all.
            full: whether none of the others would get one either.

        Returns:
            Each request that got a slot, and which one.
        """
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        placed, passed = list[tuple[ActiveRequest, int]](), list[ActiveRequest]()
        while self.waiting and free and not full():
            row = self.waiting.popleft()
            if (slot := next((slot for slot in free if ready(row, slot)), None)) is None:
                passed.append(row)
            else:
                free.remove(slot)
                self.rows[slot] = row
                placed.append((row, slot))
        self.waiting.extendleft(reversed(passed))
        return placed

    def put_back(self, slot: int) -> ActiveRequest:
        """The request of a slot waits again, in its turn."""
        row, self.rows[slot] = self.rows[slot], None
        assert row is not None
        self.waiting = deque(sorted([*self.waiting, row], key=lambda row: row.ticket))
        return row

    def in_turn(self, filling: Mapping[int, ActiveRequest]) -> dict[int, ActiveRequest]:
        """The order in which prompts are read. The oldest and the shortest take turns to be the first: neither waits
        long for a lot of others."""
        self._shortest_first = not self._shortest_first
        first = (lambda row: row.left) if self._shortest_first else (lambda row: row.ticket)
        return dict(sorted(filling.items(), key=lambda item: (first(item[1]), item[1].ticket)))

    def finish(self, row: ActiveRequest) -> int:
        """Frees the slot of a request, and returns it."""
        slot = self.rows.index(row)
        self.rows[slot] = None
        return slot

    def cancel(self, tickets: Iterable[int]) -> list[int]:
        """Drops requests, waiting or in a slot; returns the slots that were theirs."""
        gone = set(tickets)
        self.waiting = deque(row for row in self.waiting if row.ticket not in gone)
        slots = [slot for slot, row in enumerate(self.rows) if row and row.ticket in gone]
        for slot in slots:
            self.rows[slot] = None
        return slots
