"""When prompts are read and when rows decode, and for how many steps. Pure host code, by the times of earlier visits.

A visit is a call of the device that decodes for some steps.
"""

from collections.abc import Collection
from typing import NamedTuple

from dflash_jax.infer.engine.rows import ActiveRequest

STALL = 4.0  # visits, for which rows wait at most while prompts are read; less where few slots fill


class NextVisit(NamedTuple):
    """How long the next visit may take, and what follows it.

    Attributes:
        steps: it takes at most.
        leave_below: it ends as soon as fewer rows than this decode; 0 lets it go on until none does.
        overlap: whether a further one begins before its tokens are looked at.
    """

    steps: int
    leave_below: int
    overlap: bool


class Pacing:
    """How the device's time is shared between reading prompts and decoding."""

    def __init__(self, slots: int, steps_per_visit: int):
        self._slots, self._steps = slots, steps_per_visit
        self.reading_left = 1.0  # share of the time in which prompts are read before rows decode again
        self.step_seconds = 0.0  # of the last visit
        self._collected = 0.0  # when tokens last came from the device

    def reads(
        self, filling: Collection[object], decoding: Collection[object], *, ahead: bool, beside: bool = False
    ) -> bool:
        """Whether prompts (`filling`) are read next, rather than rows decoded: in turns, where there are both, and
        after the visit that is in flight (`ahead`); only without rows that decode, if their steps can read prompts,
        too (`beside`)."""
        if filling and (not decoding or (not beside and not ahead and self.reading_left > 0)):
            return True
        self.reading_left = 1.0 if decoding else self.reading_left
        return False

    def read(self, prompts: int, seconds: float | None) -> bool:
        """A program read some of so many prompts, in so many seconds, if they are known; returns whether there is time
        for another one before rows decode again.

        Rows that decode wait for `STALL` visits, where all slots fill, and in proportion where few do; or for as many
        programs as there are prompts where their times are not known.
        """
        visit = self._steps * self.step_seconds
        programs = prompts * (1.0 if seconds is None else STALL * visit / self._slots / seconds)
        self.reading_left -= 1 / programs if programs else 1.0
        return self.reading_left > 0

    def next_visit(self, rows: Collection[ActiveRequest], *, filling: bool, waiting: bool, free: bool) -> NextVisit:
        """The next visit of these rows.

        Args:
            filling, waiting: whether prompts are to be read, and whether requests wait that may have a slot: a visit
                then ends as soon as a row has finished.
            free: whether there are free slots.
        """
        # Whether rows whose ends the device finds by itself will need more visits than one. Further steps of rows that
        # end on the host, at a stop string, are for nothing.
        left = (row.budget - len(row.completion.token_ids) for row in rows if not row.request.find_stop)
        overlap = not filling and max(left, default=0) > self._steps
        # Two visits in flight hold up a new request hardly longer than one does, if they are half as long: so where one
        # may come, or a slot may become free without the device knowing.
        halved = overlap and (free or any(row.request.find_stop for row in rows))
        return NextVisit(
            -(-self._steps // 2) if halved else self._steps, len(rows) if filling or waiting else 0, overlap
        )

    def visited(self, begin: float, end: float, steps: int, *, timed: bool) -> float:
        """A visit of so many steps was asked for and ended at these times; returns how many seconds it took.

        Args:
            timed: whether `end` is when the device was done; it may have been so long before.
        """
        seconds, self._collected = end - max(begin, self._collected), end
        seconds = seconds if timed else min(seconds, steps * self.step_seconds)
        self.step_seconds = seconds / max(steps, 1)
        return seconds
