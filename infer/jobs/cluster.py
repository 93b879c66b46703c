"""A batch job on a Ray cluster: lines go to workers, each with an engine of its own, and their records come back.

A worker is a Ray actor on the devices that it asks for: a TPU host, some GPUs, or CPU cores. Workers may die, and new
ones may come, at any time; what a lost worker had not finished is given to others. One process, the driver, reads the
input, turns prompts into tokens, and writes the output; a worker gets the lines that it is to answer.
"""

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dflash_jax.config import TargetConfig
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.stats import Stats, total
from dflash_jax.infer.jobs.answering import Answering, Event, Outgrown, outgrows
from dflash_jax.infer.jobs.batch_job import Again, Backend
from dflash_jax.infer.jobs.lines import Line, attached, detached
from dflash_jax.infer.jobs.records import answer_record, error_record, record_id
from dflash_jax.infer.progress import memory_mib
from dflash_jax.infer.text import Text

REPORT = 1.0  # seconds after which a worker reports, even if no line is finished
LOOK = 0.5  # seconds between two looks at an interrupt
GROW = 5.0  # seconds between two looks for nodes that came
AHEAD = 2  # lines a worker has, in engines full of them
DEATHS = 3  # of workers one after the other, without a line finished in between, that end the job
ACCELERATORS = ("TPU", "GPU")
MakeEngine = Callable[[], tuple[Engine, Text]]


class Ready(NamedTuple):
    """A worker whose programs are compiled."""

    slots: int
    width: int
    dtype: str
    max_length: int
    config: TargetConfig


class Report(NamedTuple):
    """The result of `EngineWorker.work`; requests are in slots (`busy`) or without one (`waiting`)."""

    finished: list[Event]
    busy: int
    waiting: int
    stats: Stats
    steps_by_block_size: dict[str, int]
    memory_mib: float


class EngineWorker:
    """Answers lines with an engine; runs as a Ray actor.

    Args:
        make: loads the models and makes the engine for the lines of the job, and its tokenizer.
    """

    def __init__(self, make: MakeEngine):
        self._engine, self._text = make()
        self._engine.warm_up()
        self._answering = Answering(self._engine, partial(answer_record, text=self._text), self._text)

    def ready(self) -> Ready:
        engine = self._engine
        target = engine.target
        return Ready(engine.slots, engine.width, target.dtype.name, engine.max_length, target.config)

    def work(self, lines: Sequence[Line], admit: bool) -> Report:
        """Takes these lines, which are `detached`, and works until some line is finished, or for a while. Waiting
        requests begin if `admit`."""
        end = time.perf_counter() + REPORT
        finished = [event for line in lines for event in self._answering.add(attached(line, self._text))]
        engine = self._engine
        while not finished and (engine.busy or (admit and engine.waiting)) and time.perf_counter() < end:
            finished = [event for event in self._answering.step(admit) if event[0] is not None]
        stats, used = engine.stats, engine.steps_by_block_size
        return Report(finished, engine.busy, engine.waiting, stats, used, memory_mib())


@dataclass(eq=False)
class Remote:
    """A worker as the driver sees it.

    Attributes:
        call: that it works on; None if it is idle.
        lines: what it has, by id.
        report: its last one.
    """

    actor: Any
    call: Any
    ready: Ready | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    report: Report | None = None


class RayWorkers(Backend):
    """Workers on a Ray cluster, which begin when there is work for them.

    Args:
        address: of the cluster; None is the one that the environment names or that runs here, or a new one of this
            machine alone.
        make: see `EngineWorker`; it is sent to the workers.
        resources: of each worker, by Ray's names; empty is all accelerators of a node, or one CPU where there are none.
        most: workers at a time; None is as many as the nodes have resources for.
        longer: what makes engines for lines that are longer than those known before, by a sample of them; None if no
            others are to be made.

    Raises:
        ValueError: no cluster at the address, or Ray is not installed.
    """

    def __init__(
        self,
        address: str | None,
        make: MakeEngine,
        resources: Mapping[str, float],
        most: int | None,
        longer: Callable[[Sequence[Line]], MakeEngine] | None = None,
    ):
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"{error}; --ray needs another package: pip install '.[ray]' in the checkout") from error

        self._ray, self._most = ray, most
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="dflash_jax")
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}") from error
        self._needed = dict(resources) or self._default_resources()
        self._make, self._longer = ray.put(make), longer
        self._workers: list[Remote] = []
        self._lost: list[Report] = []  # the last ones of workers that are gone
        self._looked, self._deaths, self._began, self._width = 0.0, 0, time.perf_counter(), 1

    def done(self) -> tuple[Stats, int, dict[str, int]]:
        known = [*self._lost, *(w.report for w in self._workers if w.report)]
        stats = total(report.stats for report in known)
        used = Counter[str]()  # seconds of `stats` and these are sums over all workers
        for report in known:
            used.update(report.steps_by_block_size)
        return stats, self._width, dict(used)

    def dtype(self) -> str:
        """The dtype of the target, as the first worker that is ready says.

        Raises:
            ValueError: the workers cannot begin.
        """
        if not self._workers:
            self._grow(1)
        while not (ready := [w.ready for w in self._workers if w.ready]):
            self._receive(deque())
        return ready[0].dtype

    def rates(self) -> str:
        stats, _, _ = self.done()
        if not stats.steps:
            return ""
        return f"{stats.decode_tokens / (time.perf_counter() - self._began):.0f} tok/s tau {stats.tau:.2f}"

    def state(self) -> str:
        ready = [w for w in self._workers if w.ready]
        reports = [w.report for w in ready if w.report]
        slots = f"slots {sum(r.busy for r in reports)}/{sum(w.ready.slots for w in ready if w.ready)}"
        memory = max((r.memory_mib for r in reports), default=math.nan)
        waiting = sum(r.waiting for r in reports)
        return f"workers {len(ready)}/{len(self._workers)}   {slots}   waiting {waiting}   memory {memory:.0f} MiB"

    def answers(
        self, left: Iterator[Line], count: int, admit: Callable[[], bool], again: Again
    ) -> Generator[Event, None, None]:
        """See `Backend.answers`.

        Raises:
            ValueError: workers cannot begin, or die one after the other.
        """
        outgrown = Outgrown()
        try:
            yield from self._answers(left, count, admit, outgrown if self._longer else None)
            if outgrown and self._longer is not None and admit():
                for worker in self._workers:
                    self._end(worker)
                self._workers.clear()
                self._looked, self._make = 0.0, self._ray.put(self._longer([*outgrown.sample]))
                with contextlib.closing(again(outgrown)) as lines:
                    yield from self._answers(lines, len(outgrown), admit, None)
        finally:
            self.close()

    def _answers(
        self, left: Iterator[Line], count: int, admit: Callable[[], bool], outgrown: Outgrown | None
    ) -> Generator[Event, None, None]:
        """The same with the workers that there are; lines that are too long for them are added to `outgrown`, if that
        is given."""
        waiting, ended = deque[Line](), False  # lines that were read
        while not ended or waiting or any(w.lines for w in self._workers):
            slots = sum(w.ready.slots for w in self._workers if w.ready)
            while not ended and len(waiting) < max(AHEAD * slots, 1):
                line = next(left, None)
                if line is None:
                    ended = True
                elif line.error is not None:
                    count -= 1
                    yield error_record(line), []
                elif outgrown is not None and self._outgrows(line):
                    count -= 1
                    outgrown.add(line)
                else:
                    waiting.append(line)
            if going := admit():
                self._grow(len(waiting) if ended else count)
            elif not any(w.lines and (w.report is None or w.report.busy) for w in self._workers):
                return
            yield None, []
            events = self._receive(waiting)
            count -= len(events)
            yield from events
            self._send(waiting, going)

    def _outgrows(self, line: Line) -> bool:
        """Whether a line is too long for the engines of the workers, as far as one of these is known."""
        ready = next((w.ready for w in self._workers if w.ready), None)
        return ready is not None and outgrows(line.request, ready.max_length, ready.config)

    def close(self) -> None:
        """Ends all workers and leaves the cluster."""
        for worker in self._workers:
            self._end(worker)
        self._workers.clear()
        self._ray.shutdown()

    def _default_resources(self) -> dict[str, float]:
        for name in ACCELERATORS:
            if counts := [n for node in self._nodes() if (n := node.get(name, 0))]:
                return {name: min(counts)}
        return {"CPU": 1}

    def _nodes(self) -> list[dict[str, float]]:
        """Resources of the nodes that are there."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _grow(self, lines: int) -> None:
        """Makes workers as far as there are lines and room for them; one where there is no room yet, which asks a
        cluster that grows by itself for a node."""
        now = time.perf_counter()
        if self._workers and now - self._looked < GROW:
            return
        self._looked = now
        places = sum(int(min(node.get(name, 0) // n for name, n in self._needed.items())) for node in self._nodes())
        most = max(1, places if self._most is None else min(places, self._most))
        needed = dict(self._needed)
        how = {"num_cpus": needed.pop("CPU", 0), "num_gpus": needed.pop("GPU", 0), "resources": needed}
        for _ in range(min(most - len(self._workers), lines)):
            actor = self._ray.remote(EngineWorker).options(**how).remote(self._make)
            self._workers.append(Remote(actor, actor.ready.remote()))

    def _receive(self, waiting: deque[Line]) -> list[Event]:
        """Records that came; lines of lost workers go back to the front of those that wait."""
        calls = {w.call: w for w in self._workers if w.call is not None}
        done, _ = self._ray.wait(list(calls), num_returns=1, timeout=LOOK) if calls else ([], [])
        events: list[Event] = []
        for call in done:
            worker = calls[call]
            worker.call = None
            try:
                result = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self._lose(worker, waiting, error)
                continue
            if isinstance(result, Ready):
                worker.ready, self._width = result, max(self._width, result.width)
                continue
            worker.report = result
            for record, answers in result.finished:
                assert record is not None
                if worker.lines.pop(record_id(record), None) is not None:
                    events.append((record, answers))
                    self._deaths = 0
        return events

    def _send(self, waiting: deque[Line], going: bool) -> None:
        """Gives idle workers lines, and time to work on them."""
        for worker in self._workers:
            if worker.call is not None or worker.ready is None:
                continue
            new: list[Line] = []
            while going and waiting and len(worker.lines) < AHEAD * worker.ready.slots:
                new.append(detached(line := waiting.popleft()))
                worker.lines[str(line.id)] = line
            if worker.lines and (going or worker.report is None or worker.report.busy):
                worker.call = worker.actor.work.remote(new, going)

    def _lose(self, worker: Remote, waiting: deque[Line], error: Exception) -> None:
        """Gives up a worker that died, or whose call failed: its device may be out of memory, its node out of disk."""
        self._end(worker)
        self._workers.remove(worker)
        waiting.extendleft(reversed(worker.lines.values()))
        self._looked, self._deaths = 0.0, self._deaths + 1
        cause = getattr(error, "cause", None)  # of what a call raised
        said = str(error) if cause is None else repr(cause)
        why = " ".join(line.strip() for line in said.splitlines() if line.strip())
        if worker.ready is None and "creation task" in why:  # it would fail again
            raise ValueError(f"a worker cannot start: {why[-400:]}") from error
        if self._deaths >= DEATHS * max(1, len(self._workers)):
            raise ValueError(
                f"{self._deaths} workers failed without finishing a line, the last one so: {why[:400]}"
            ) from error

    def _end(self, worker: Remote) -> None:
        """Ends a worker, and keeps its figures."""
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)
        if worker.report:
            self._lost.append(worker.report._replace(finished=[]))
