"""Which request goes where: those that wait, those in slots, and those that move to a longer slot. Pure host code."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflash_jax.infer.engine.rows import ActiveRequest


class Admission:
    """Requests and their slots.

    Args:
        lengths: tokens that each slot holds.
        max_length: of the long ones, at least; shorter ones all have the same length.

    Attributes:
        waiting: requests that have no slot yet, the first in turn first.
        rows: the request of each slot; None if it is free.
    """

    def __init__(self, lengths: Sequence[int], max_length: int):
        self._lengths, self._max_length = lengths, max_length
        self._short = next((length for length in lengths if length < max_length), None)
        self.waiting: deque[ActiveRequest] = deque()
        self.rows: list[ActiveRequest | None] = [None] * len(lengths)
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
        self, admit: bool, ready: Callable[[ActiveRequest, int], bool] = lambda row, slot: True
    ) -> list[tuple[ActiveRequest, int, int | None]]:
        """Gives free slots to rows that have outgrown theirs, and to waiting requests if they may have them (`admit`).
        A slot that a row has left is free from the next call on.

        Args:
            ready: asked of a waiting request and a slot that it would get; it waits on where the answer is no for all.

        Returns:
            Each request that got a slot, which one, and which it has left; None if it begins.
        """
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        if not free:
            return []
        long = deque(slot for slot in free if self._lengths[slot] >= self._max_length)
        short = deque(slot for slot in free if self._lengths[slot] < self._max_length)
        placed: list[tuple[ActiveRequest, int, int | None]] = []
        outgrown = ((row.ticket, slot, row) for slot, row in enumerate(self.rows) if row and row.outgrown)
        for _, slot, row in sorted(outgrown)[: len(long)]:
            self.rows[slot] = None
            placed.append((row, self._give(row, long.popleft()), slot))
        for_long, passed = any(row and row.outgrown for row in self.rows), list[ActiveRequest]()
        while admit and self.waiting and (short or long):
            row = self.waiting.popleft()
            fits = self._short is not None and row.begins_in(self._short)
            slots = short if fits and short else long if not (fits and for_long) else deque[int]()
            if (slot := next((slot for slot in slots if ready(row, slot)), None)) is not None:
                slots.remove(slot)
                placed.append((row, self._give(row, slot), None))
            else:
                passed.append(row)
                for_long |= not fits and not slots
        self.waiting.extendleft(reversed(passed))
        return placed

    def _give(self, row: ActiveRequest, slot: int) -> int:
        self.rows[slot] = row
        row.room = min(row.budget, self._lengths[slot] - len(row.request.prompt_token_ids))
        return slot

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
