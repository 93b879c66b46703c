"""A batch job from files to files: what is done already, what is left, figures on the way, the summary at the end."""

import contextlib
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Protocol

import numpy as np

from dflash_jax import files
from dflash_jax.files import Json, write_json
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.stats import Stats, total
from dflash_jax.infer.interrupt import INTERRUPTED, stop_signals
from dflash_jax.infer.jobs import parts
from dflash_jax.infer.jobs.answering import Answering, Event, Outgrown, outgrows
from dflash_jax.infer.jobs.inputs import input_paths
from dflash_jax.infer.jobs.job_input import Answered, JobInput
from dflash_jax.infer.jobs.journal import Journal, settings_path, when_there_is_room
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.jobs.records import Tally, answer_record, only, record_id, rewrite_in_order, summarise
from dflash_jax.infer.jobs.tables import check_arrow, write_parquet
from dflash_jax.infer.progress import Reporter, Working, counted, engine_rates, memory_mib, warm_up
from dflash_jax.infer.text import Text

_log = logging.getLogger("dflash_jax")


@dataclass(frozen=True)
class JobFiles:
    """The files of a job.

    Attributes:
        input: paths, globs, or `-`.
        output, force, ordered: see `ServeOptions`. The output is JSON lines.
        summary: of the run; None writes none.
        table: Parquet file that is written of the finished output; None writes none.
        process, processes: this one of how many that share the job.
    """

    input: Sequence[str]
    output: Path
    summary: Path | None = None
    force: bool = False
    ordered: bool = False
    process: int = 0
    processes: int = 1
    table: Path | None = None

    @property
    def in_parts(self) -> bool:
        """Whether this process writes a part of the output: several share the job, or did."""
        return self.processes > 1 or bool(parts.found_parts(self.output))

    @property
    def part(self) -> Path:
        """The part of this process."""
        return parts.part_path(self.output, self.process, self.processes)

    @property
    def summary_file(self) -> Path | None:
        """The summary of this process."""
        if self.summary is None or self.processes == 1:
            return self.summary
        return self.summary.with_name(f"{self.summary.name}.{self.process}")

    @property
    def not_input(self) -> frozenset[Path]:
        """Files of the job itself, links followed, which a glob of inputs does not mean."""
        found = [self.output, *([self.table] if self.table else []), *self._beside()]
        if self.summary:
            found += [self.summary, *self.summary.parent.glob(f"{escape(self.summary.name)}.*")]
        return frozenset(Path(os.path.realpath(path)) for path in found)

    def _beside(self) -> list[Path]:
        """Files that lie beside the output, or will."""
        found = [self.part, *parts.found_parts(self.output)]
        return [*found, *map(settings_path, (self.output, *found)), parts.lock_path(self.output)]

    def check(self) -> None:
        """Raises ValueError or OSError if the results cannot be written, or would replace one another or the input:
        before hours of work, not after."""
        summary, beside = self.summary_file, self._beside()
        outputs = [self.output, *([self.table] if self.table else [])]
        results = [*outputs, *([summary] if summary else [])]
        if summary and (same := next((path for path in outputs if _same(path, summary)), None)):
            raise ValueError(f"--output and --summary are both {same}; choose two files")
        if self.table is not None:
            check_arrow()
            begun = self.output.exists() or bool(parts.found_parts(self.output))
            if self.table.exists() and not (self.force or begun):
                raise ValueError(
                    f"{self.table} is there without {self.output.name}, which has its answers; choose another output, "
                    "or replace it by --force"
                )
        for path in results:
            if kept := next((other for other in beside if _same(path, other)), None):
                raise ValueError(f"{path} is {kept.name}, which the job keeps beside its output; choose another file")
        for source in input_paths(self.input, self.not_input):
            for path in (*results, *beside):
                if source != "-" and _same(Path(source), path):
                    raise ValueError(f"{path} is the input; choose another file for the results")
        written = self.part if self.in_parts else self.output
        for path in (*results, written, settings_path(written)):
            files.check_writable(path)
        for path, what in ((summary, "--summary"), (self.output if self.ordered else None, "--output with --ordered")):
            # One with a name, which may have no reader; `/dev/stdout` has one.
            if path and path.is_fifo() and Path(os.path.realpath(path)).exists():
                raise ValueError(f"{path} is a pipe; {what} needs a file")


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one file, or would be: by links of both kinds, or because neither is there yet."""
    if files.followed(one) == files.followed(other):
        return True
    return one.exists() and other.exists() and one.is_file() and one.samefile(other)


Again = Callable[[Container[int]], Generator[Line, None, None]]


class Backend(Working, Protocol):
    """Who answers the lines of a job: an engine in this process, or others."""

    def done(self) -> tuple[Stats, int, dict[str, int]]:
        """What was done so far, the most tokens that a step can commit for a row, and the steps with each draft."""
        ...

    def dtype(self) -> str:
        """The dtype of the target's weights."""
        ...

    def answers(
        self, left: Iterator[Line], count: int, admit: Callable[[], bool], again: Again
    ) -> Generator[Event, None, None]:
        """Answers the lines, so many of them; see `Answering.run`. `again` reads lines with some indices once more,
        when all were read."""
        ...

    def begin(self, count: int, admit: Callable[[], bool]) -> None:
        """Gets ready for so many lines, once the output is known to be usable.

        Raises:
            KeyboardInterrupt: `admit` is false, which is asked meanwhile.
        """

    def close(self) -> None:
        """Ends it; nothing is asked of it afterwards."""


class LocalEngine(Backend):
    """An engine of this process.

    Args:
        make: the engine for the lines of a job, as far as these are known.
        text: the target's tokenizer.
        dtype: of its weights.
        longer: an engine for lines that are longer than those known before, by a sample of them; None if no other is to
            be made.
    """

    engine: Engine  # from `begin` on

    def __init__(
        self,
        make: Callable[[], Engine],
        text: Text,
        dtype: str,
        longer: Callable[[Sequence[Line]], Engine] | None = None,
    ):
        self._make, self._text, self._dtype, self._longer = make, text, dtype, longer
        self._before: list[tuple[Stats, dict[str, int]]] = []  # of an engine that another has followed

    def done(self) -> tuple[Stats, int, dict[str, int]]:
        used = Counter[str]()
        for steps in [*(of for _, of in self._before), self.engine.steps_by_block_size]:
            used.update(steps)
        return self._stats(), self.engine.width, dict(used)

    def _stats(self) -> Stats:
        return total([*(of for of, _ in self._before), self.engine.stats]) if self._before else self.engine.stats

    def dtype(self) -> str:
        return self._dtype

    def begin(self, count: int, admit: Callable[[], bool]) -> None:
        self.engine = self._make()
        if count:
            warm_up(self.engine, admit)

    def answers(
        self, left: Iterator[Line], count: int, admit: Callable[[], bool], again: Again
    ) -> Generator[Event, None, None]:
        record, outgrown = partial(answer_record, text=self._text), Outgrown()
        config = self.engine.target.config

        def fitting() -> Iterator[Line]:
            for line in left:
                if not admit():
                    return
                if self._longer is not None and outgrows(line.request, self.engine.max_length, config):
                    outgrown.add(line)
                else:
                    yield line

        later = None if self._longer is None else outgrown.add
        yield from Answering(self.engine, record, self._text, later).run(fitting(), admit)
        if outgrown and self._longer is not None and admit():
            _log.info("%s longer than the others; loading another engine", counted(len(outgrown), "line"))
            self._before.append((self.engine.stats, self.engine.steps_by_block_size))
            del self.engine  # there may be no memory for two
            gc.collect()
            self.engine = self._longer([*outgrown.sample])
            warm_up(self.engine, admit)
            with contextlib.closing(again(outgrown)) as lines:
                yield from Answering(self.engine, record, self._text).run(lines, admit)

    def rates(self) -> str:
        return engine_rates(self.engine, self._stats())

    def state(self) -> str:
        engine = self.engine
        return f"slots {engine.busy}/{engine.slots}   waiting {engine.waiting}   memory {memory_mib():.0f} MiB"


class Job:
    """Answers the lines of a job that no run before has answered.

    Args:
        files: checked.
        lines: the input.
        settings: see `answering.job_settings`.
        notes: what else the summary tells.
        begin: when the run began, by `time.perf_counter`.
        fields: that records have besides those of every record; None are all.
        max_errors: lines with an error record at which the exit status is still 0.

    Raises:
        ValueError: the output is a table, and has no columns for the lines.
    """

    def __init__(
        self,
        files: JobFiles,
        lines: JobInput,
        settings: Json,
        notes: Json,
        begin: float,
        fields: Sequence[str] | None = None,
        max_errors: int = 0,
    ):
        if files.table is not None and lines.batches:
            raise ValueError(f"{files.table}: OpenAI batch lines are answered in JSON lines; choose an output .jsonl")
        self.files, self.lines, self.settings, self.notes = files, lines, settings, notes
        self._begin, self._fields, self._max_errors = begin, fields, max_errors
        self._in_parts = files.in_parts
        self._tally = Tally()

    def run(self, backend: Backend, interval: float | None) -> int:
        """Answers what is left and returns the exit status. `interval` is that of a `Reporter`."""
        files, answered = self.files, Answered(self.lines)
        if self._in_parts and not files.force:
            parts.check_settings(files.output, self.settings)
        with (
            stop_signals() as stopping,
            Journal(
                files.part if self._in_parts else files.output,
                self.settings,
                self._key,
                force=files.force,
                stopping=lambda: stopping,
                merged=self._in_parts,
                done=answered,
            ) as journal,
        ):
            left, resumed, failed = self._left(answered, journal.failed)
            admit = lambda: not stopping
            count = int(np.count_nonzero(left))
            backend.begin(count, admit)
            failed_before = failed
            report = Reporter(backend, count, interval)
            failed += self._answer(backend, left, journal, report, admit)
        unfinished = count - report.finished
        if not unfinished:
            self._finish()
        if path := files.summary_file:
            summary = self._summary(backend, resumed, failed, unfinished)
            when_there_is_room(path, lambda: write_json(path, summary))
        rate = backend.rates()
        _log.info(
            "%d answered, %s%s -> %s",
            report.finished - (failed - failed_before),
            counted(failed - failed_before, "error"),
            f", {rate}" if rate else "",
            files.part if self._in_parts else files.output if unfinished else files.table or files.output,
        )
        if unfinished:
            _log.warning("stopped; %s left, with which the same command continues", counted(unfinished, "line"))
            return INTERRUPTED
        return 1 if failed > self._max_errors else 0

    def _key(self, record: Json) -> str:
        if self.lines.place(name := record_id(record)) is None:
            raise ValueError(f"id {name!r:.60} is not in the input")
        return name

    def _left(self, answered: Answered, failed: int) -> tuple[np.ndarray, int, int]:
        """Which lines this process is to answer, how many of its own are done, and how many of these failed."""
        done, errors = answered.flags, None
        if self._in_parts:  # whoever answered a line of ours
            found = parts.answered(self.files.output, self.lines.count, self.lines.place)
            done, errors = found.there, found.failed
        mine = np.zeros(self.lines.count, bool)
        mine[self.files.process :: self.files.processes] = True
        left, resumed = mine & ~done, int(np.count_nonzero(mine & done))
        if resumed:
            _log.info("%s done, %d left", counted(resumed, "line"), np.count_nonzero(left))
        return left, resumed, failed if errors is None else int(np.count_nonzero(mine & errors))

    def _answer(
        self,
        backend: Backend,
        left: np.ndarray,
        journal: Journal,
        report: Reporter,
        admit: Callable[[], bool],
    ) -> int:
        """Writes a record for every line that is left as it is finished; returns how many failed."""
        failed, read = 0, self.lines.lines
        lines = read(lambda index, name: bool(left[index]))
        again = lambda places: read(lambda index, name: index in places)
        answers = backend.answers(lines, int(np.count_nonzero(left)), admit, again)
        with contextlib.closing(report), contextlib.closing(lines), contextlib.closing(answers) as records:
            for record, turns in records:
                if record is not None:
                    journal.append(record if self._fields is None else only(record, self._fields))
                    failed += bool(record.get("error"))
                    for completion in turns:
                        self._tally.add(completion)
                report.update(record is not None)
        return failed

    def _finish(self) -> None:
        """Merges or sorts the output, where it is complete, and makes a table of it."""
        files = self.files
        if self._in_parts:
            if not parts.merge(files.output, self.lines.count, self.lines.place):
                _log.info("this process is done; the job ends with the last one")
                return
        elif files.ordered:
            rewrite_in_order(files.output, self.lines.place)
        if files.table is not None:
            write_parquet(files.table, files.output, self._fields)

    def _summary(self, backend: Backend, done: int, failed: int, unfinished: int) -> Json:
        wall, process, processes = time.perf_counter() - self._begin, self.files.process, self.files.processes
        stats, width, used = backend.done()
        summary = summarise(self._tally, self.lines.count, failed, stats, width, wall)
        more = {"steps_by_block_size": used, "process": process, "processes": processes}
        return summary | {"resumed": done, "unfinished": unfinished} | more | self.notes
