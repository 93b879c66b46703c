"""How long an engine's programs take, found when it starts: which block pays, and which program reads a prompt."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.infer.engine.calls import Beside, Decode, Name
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.prompts import PrefillCost, PrefillShape
from dflash_jax.infer.engine.slots import Slots

BRIEF = 0.2  # seconds of timing steps after which no further round begins


def prefill_costs(
    slots: Slots, took: Mapping[Name, float], check_interrupt: Callable[[], object] = lambda: None, *, brief: bool
) -> Iterator[tuple[PrefillShape, PrefillCost]]:
    """What the programs cost that read prompts, one after the other, if there is a choice.

    Args:
        took: the seconds that each program took for nothing, at its first run, which takes longer than others.
        check_interrupt: called between programs; what it raises ends the work.
        brief: measure empty rows only; and with a single row nothing, because no other row waits meanwhile.
    """
    for name, seconds in took.items():
        if isinstance(name, PrefillShape) and not slots.config.deterministic:
            check_interrupt()
            single = brief and slots.count == 1
            yield name, PrefillCost(seconds) if single else prefill_cost(slots, name, brief=brief)


def prefill_cost(slots: Slots, shape: PrefillShape, *, brief: bool = False) -> PrefillCost:
    """The cost of a program in seconds, by its times for empty rows and, if not `brief`, for such as are half full."""
    arguments, seconds = slots.calls.nothing(shape), []
    for full in (0,) if brief else (0, 1):
        times = []
        for _ in range(1 if brief else 2):
            for slot in arguments[0].rows.tolist():
                slots.place(slot, full * _half(slots))
            slots.wait()
            begin = time.perf_counter()
            slots.prefill(*arguments)
            slots.wait()
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    for slot in arguments[0].rows.tolist():
        slots.release(slot)
    return PrefillCost(seconds[0], max(0.0, seconds[-1] - seconds[0]) / _half(slots))


def step_seconds(
    slots: Slots, check_interrupt: Callable[[], object] = lambda: None, *, brief: bool = False
) -> dict[tuple[Draft, int], float]:
    """Times a step of each kind of draft and number of rows, all of them busy with random tokens and half full: tokens
    that are alike would visit fewer experts than a real block does. Finds out whether prompts are read beside, too.

    Args:
        check_interrupt: called between programs; what it raises ends the work.
        brief: time fewer steps, and long ones once only, for a single answer.
    """
    kept = jax.tree.map(jnp.copy, slots.state.calibration)  # the programs consume the state's own arrays
    try:
        seconds = timed_steps(slots, check_interrupt, brief=brief)
        if slots.to_measure:
            slots.beside = _pays(slots, seconds)
        return {(name.draft, name.rows): time for name, time in seconds.items() if not name.reads}
    finally:  # random tokens are no text to learn from
        slots.state = slots.state.replace(calibration=kept)
        for slot in range(slots.count if slots.pages else 0):
            slots.drop(slot)


def timed_steps(slots: Slots, check_interrupt: Callable[[], object], *, brief: bool) -> dict[Decode, float]:
    """The seconds of a step of each program that decodes."""
    times: dict[Decode, list[float]] = {name: [] for name in slots.used if isinstance(name, Decode)}
    steps = min(slots.config.steps_per_visit, 2 if brief else 4)
    longest = {name: (steps + 1) * (slots.drafts.proposed(name.draft) + 1) + 1 for name in times}
    since, random = time.perf_counter(), np.random.default_rng(0)
    for i in range(3):
        if i and brief and time.perf_counter() - since > BRIEF:
            break
        busy: list[int] = []
        try:
            for name in times:
                check_interrupt()
                rows, nothing = slots.idle(name.rows), Beside([], {}) if name.reads else None
                if not brief or rows != busy:  # else they go on
                    _release(slots, busy)
                    busy = rows
                    _occupy(slots, rows, sum(longest.values()) if brief else longest[name], random)
                if i == 0:  # the first visit of a program takes longer
                    slots.decode(name.draft, 1, 0, rows, nothing)
                slots.wait()
                begin = time.perf_counter()
                trace = jax.device_get(slots.decode(name.draft, steps, 0, rows, nothing))
                times[name].append((time.perf_counter() - begin) / int(np.sum(trace.count.any(axis=1))))
        finally:  # an interrupted one, too
            _release(slots, busy)
    return {name: min(measured) for name, measured in times.items()}


def _occupy(slots: Slots, rows: Sequence[int], more: int, random: np.random.Generator) -> None:
    """Makes rows decode without end, half full, with room for so many tokens more."""
    calls, length = slots.calls, _half(slots)
    shape = next(name for name in slots.used if isinstance(name, PrefillShape))
    endless = calls.neutral._replace(remaining=np.int32(np.iinfo(np.int32).max))
    for slot in rows:
        if slots.pages is not None:
            slots.pages.hold(slot, length)
            slots.pages.hold(slot, length + more)  # if there are so many
        prompt = random.integers(0, calls.target.config.vocab_size, min(shape.tokens, length)).tolist()
        slots.place(slot, length - len(prompt))
        part = calls.prefills.part(slot)
        batch = calls.prefills.batch(shape, [[(slot, prompt)] if p == part else [] for p in range(calls.parts)])
        batch.last[:] = batch.counts > 0
        slots.prefill(batch, (endless,) * len(batch.rows))


def _release(slots: Slots, rows: Sequence[int]) -> None:
    for slot in rows:
        slots.release(slot)


def _pays(slots: Slots, seconds: Mapping[Decode, float]) -> bool:
    """Whether steps that read prompts take less time than others and programs that read as much between them."""
    alone = [cost.empty / (shape.rows * shape.tokens) for shape, cost in slots.calls.prefills.costs.items()]
    if not alone or slots.calls.beside is None:
        return False
    apart = min(alone) * slots.calls.beside.total
    pairs = [(time, seconds[name._replace(reads=False)] + apart) for name, time in seconds.items() if name.reads]
    return sum(beside for beside, _ in pairs) < sum(both for _, both in pairs)


def _half(slots: Slots) -> int:
    """Half of what a row holds, or of what all could at a time."""
    most = slots.max_length if slots.pages is None else min(slots.max_length, slots.pages.tokens // slots.count)
    return max(1, most // 2)
