"""How prompts are read: alone, between visits of rows that decode, or beside them, in the same steps."""

import time
from collections.abc import Mapping

import jax

from dflash_jax.decoding.step import Committed
from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.pacing import Pacing
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.engine.visits import Visit


class Reading:
    """The prompts of an engine's rows."""

    def __init__(self, batch: Slots, admission: Admission, pacing: Pacing, stats: Stats):
        self._batch, self._admission, self._pacing, self._stats = batch, admission, pacing, stats

    def copied(self, row: ActiveRequest, tokens: int) -> None:
        """So many more tokens of a prompt are there, which another one has in common."""
        row.filled += tokens
        row.completion.cached_tokens += 0 if row.left_slots else tokens
        self._stats.prefix_tokens += tokens
        self._stats.prompt_tokens += tokens

    def alone(self, filling: Mapping[int, ActiveRequest]) -> list[ActiveRequest]:
        """Reads some of these prompts, until one ends or rows that decode have waited long enough; returns the rows
        that got a first token."""
        begin, left, events, goes_on = time.perf_counter(), dict(filling), list[ActiveRequest](), True
        while left and not events and goes_on:
            plan, first = self._batch.read(self._admission.in_turn(left))
            self._stats.prompt_programs += 1
            goes_on = self._pacing.read(len(filling), plan.seconds)
            for read in plan.reads:
                row = left[read.slot]
                self.copied(row, read.copied)
                self._stats.prompt_tokens += read.filled - row.filled
                row.filled = read.filled
                if not row.left:
                    del left[read.slot]
                    row.extend(jax.device_get(first), (read.place, slice(1)))
                    if row.completion.finish_reason:
                        self._batch.release(read.slot)
                    events.append(row)
        self._stats.prefill_seconds += time.perf_counter() - begin
        return events

    def begin(self) -> dict[int, ActiveRequest]:
        """The prompts that are not read to their end, by slot, with what is kept of others copied to them."""
        filling = self._admission.in_turn(self._admission.filling)
        for slot, tokens in self._batch.copy(filling).items():
            self.copied(filling[slot], tokens)
        return filling

    def beside(self, visit: Visit, trace: Committed, steps: int) -> None:
        """Takes what the first steps of a visit have read of prompts."""
        still = {slot: row for slot, row in visit.rows if row is not None and row is self._admission.rows[slot]}
        for step, plan in enumerate(visit.reads[:steps]):
            for read in plan.reads:
                if (row := still.get(read.slot)) is None:
                    continue
                self._stats.prompt_tokens += read.filled - row.filled
                self._stats.beside_tokens += read.filled - row.filled
                row.filled = read.filled
                if not row.left:
                    assert trace.first is not None
                    row.extend(trace.first, (step, read.place, slice(1)))
            self._batch.keep(plan, still)
