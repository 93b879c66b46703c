"""How rows decode: visits to the device, one after the other, of which the next may begin before one is collected."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.calls import Beside
from dflash_jax.infer.engine.drafts import PLAIN, Drafts
from dflash_jax.infer.engine.memory import Memory
from dflash_jax.infer.engine.pacing import NextVisit, Pacing
from dflash_jax.infer.engine.reading import Reading
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.engine.visits import Visit, expected, is_ready


class Decoding:
    """The rows of an engine that decode.

    Args:
        give_back: called with a slot whose request has to give back its memory.

    Attributes:
        ahead: the visit in flight.
    """

    def __init__(
        self,
        batch: Slots,
        drafts: Drafts,
        admission: Admission,
        pacing: Pacing,
        memory: Memory,
        reading: Reading,
        stats: Stats,
        give_back: Callable[[int], object],
    ):
        self._batch, self._drafts, self._admission, self._pacing = batch, drafts, admission, pacing
        self._memory, self._reading, self._stats, self._give_back = memory, reading, stats, give_back
        self.ahead: Visit | None = None

    def wait(self) -> None:
        """Waits for the device, which may still work on the visit in flight."""
        self._batch.wait()
        if self.ahead and self.ahead.end is None:
            self.ahead = self.ahead._replace(end=time.perf_counter())

    def advance(self, decoding: Mapping[int, ActiveRequest], how: NextVisit) -> list[ActiveRequest]:
        """One visit to the device; returns the rows that got tokens.

        Where the next visit depends on none of them, it begins before they are collected.
        """
        visit, self.ahead = self.ahead, None
        if visit is None:
            begin = time.perf_counter()
            self._batch.wait()
            self._stats.prefill_seconds += time.perf_counter() - begin
            visit = self._begin(decoding, how)
            assert visit is not None
        if how.overlap and not (visit.chooser and visit.chooser.trying):
            self.ahead = self._begin(decoding, how, behind=visit)
        return self._collect(visit)

    def _begin(
        self, decoding: Mapping[int, ActiveRequest], how: NextVisit, behind: Visit | None = None
    ) -> Visit | None:
        """Asks the device for a visit; None if there is no memory for what it may commit after the one in flight
        (`behind`)."""
        steps = how.steps + (behind.steps if behind else 0)
        if not self._memory.holds(decoding, steps, None if behind else self._give_back):
            return None
        decoding = self._admission.decoding
        filling = self._reading.begin() if behind is None and self._batch.reads_beside else {}
        reads = self._batch.plan(filling, how.steps) if filling else []
        slots = self._batch.idle(self._batch.widths[-1]) if reads else self._batch.some(list(decoding))
        rows = decoding.values()
        begun = [filling[read.slot] for plan in reads for read in plan.reads if plan.batch.last[read.place]]
        limits = (row.request.max_block_size for row in (*rows, *begun))
        most = min((limit for limit in limits if limit is not None), default=None)
        draft, chooser = self._drafts.choose((row.ticket for row in rows), len(slots), most)
        steps = min(chooser.try_steps, how.steps) if chooser and chooser.trying else how.steps
        steps = min(steps, len(reads)) if reads else steps
        begin = time.perf_counter()
        leave_below = min(how.leave_below, len(decoding))  # some may have given their slots back
        beside = Beside(reads, filling) if reads else None
        trace = self._batch.decode(self._drafts.program(draft), steps, leave_below, slots, beside)
        end = time.perf_counter() if is_ready(trace) else None  # small programs on CPU may run at once
        of_slot = dict(enumerate(self._admission.rows))
        return Visit(draft, trace, [(slot, of_slot.get(slot)) for slot in slots], begin, chooser, steps, end, reads)

    def _collect(self, visit: Visit) -> list[ActiveRequest]:
        """Waits for a visit and hands its tokens to the rows, which are returned."""
        timed = visit.end is not None or not is_ready(visit.trace)  # or it has been done for who knows how long
        trace = jax.device_get(visit.trace)
        steps, end = int(np.sum(trace.count.any(axis=1))), visit.end or time.perf_counter()
        seconds = self._pacing.visited(visit.begin, end, steps, timed=timed) if steps else 0.0
        self._stats.decode_seconds += seconds
        self._stats.steps += steps
        if visit.chooser is None and visit.draft == PLAIN:
            self._drafts.limited_steps += steps
        self._reading.beside(visit, trace, steps)
        committed = np.arange(trace.tokens.shape[2]) < trace.count[:, :, None]
        proposed = self._drafts.proposed(visit.draft) if self._drafts.drafter else None
        advanced, outcomes, page = [], {}, self._batch.pages and self._batch.pages.pages.size
        for at, (slot, row) in enumerate(visit.rows):
            if row is None or row is not self._admission.rows[slot] or not row.decoding:
                continue
            advanced.append(row)
            if row.completion.finish_reason:  # with its first token
                self._batch.release(slot)
                continue
            if (taken := row.advance(trace, at, committed[:, at], proposed, page)) is None:
                continue
            row.completion.draft = visit.draft, proposed or 0
            counts, outcomes[row.ticket] = taken
            self._stats.decode_tokens += sum(counts)
            self._stats.row_steps += len(counts)
            if row.completion.finish_reason and row.request.find_stop:
                self._batch.release(slot)
        if visit.chooser:
            promised = expected(trace, visit.draft)
            alone = timed and not visit.reads
            visit.chooser.observe(visit.draft, steps, seconds if alone else None, outcomes, promised)
        return advanced
