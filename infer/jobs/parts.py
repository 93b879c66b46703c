"""One job by several processes on shared storage: each answers its share of the lines into a part of its own.

No process waits for another. Whoever finds every line answered merges the parts in input order. What a process that
died has left, any later number of processes finishes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax import files
from dflash_jax.files import Json
from dflash_jax.infer.jobs import journal
from dflash_jax.infer.jobs.records import record_id


def part_path(output: Path, process: int, processes: int) -> Path:
    """The part of the output that one of several processes writes."""
    return output.with_name(f"{output.name}.part-{process}-of-{processes}")


def lock_path(output: Path) -> Path:
    """The file that a process locks to read or merge all parts."""
    return output.with_name(output.name + ".lock")


def found_parts(output: Path) -> list[Path]:
    """Parts of this output that are there, of this number of processes or another; not their settings files."""
    name = re.compile(re.escape(output.name) + r"\.part-\d+-of-\d+")
    return sorted(path for path in output.parent.iterdir() if name.fullmatch(path.name))


@dataclass(frozen=True)
class Found:
    """Where the records of a job are, by the places of their lines.

    Attributes:
        paths: files with records.
        file: which of them has a line's record; -1 if none has.
        start, size: of the record there, in bytes.
        failed: whether it is an error.
    """

    paths: Sequence[Path]
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    failed: np.ndarray

    @property
    def there(self) -> np.ndarray:
        """Whether a line has a record."""
        return self.file >= 0

    def read(self) -> Iterator[bytes]:
        """The record of every line, in order."""
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) if path.exists() else None for path in self.paths]
            for which, start, size in zip(self.file.tolist(), self.start.tolist(), self.size.tolist(), strict=True):
                file = files[which]
                assert file is not None
                file.seek(start)
                yield file.read(size)


def answered(output: Path, lines: int, place: Callable[[str], int | None]) -> Found:
    """The records of the output and its parts; those being written, and those of other lines, are left out.

    Args:
        lines: how many there are.
        place: the place of an id among them, if it has one.

    Raises:
        ValueError: a file is damaged other than at its end.
    """
    found = Found(
        [output, *found_parts(output)],
        np.full(lines, -1, np.int32),
        np.zeros(lines, np.int64),
        np.zeros(lines, np.int64),
        np.zeros(lines, bool),
    )
    read = lambda record: (record_id(record), bool(record.get("error")))
    for which, path in enumerate(found.paths):
        start = 0
        for line, (name, failed) in files.read_json_lines(path, read) if path.exists() else ():
            if (at := place(name)) is not None and found.file[at] < 0:
                found.file[at], found.start[at], found.size[at], found.failed[at] = which, start, len(line), failed
            start += len(line)
    return found


def check_settings(output: Path, settings: Json) -> None:
    """Raises ValueError if the output or a part was made with other settings, or nobody can tell."""
    with _alone(output):
        for path in (output, *found_parts(output)):
            if path.exists() and path.stat().st_size:  # a process that begins has saved nothing yet
                journal.check_settings(path, settings)


def merge(output: Path, lines: int, place: Callable[[str], int | None]) -> bool:
    """Joins the parts into the output, in input order, if every line is answered; returns whether that is so.

    Args:
        lines, place: see `answered`.
    """
    with _alone(output):
        found = answered(output, lines, place)
        if not found.there.all():
            return False
        parts = found_parts(output)
        saved = [path for path in map(journal.settings_path, parts) if path.exists()]
        if saved:
            settings, data = journal.settings_path(output), saved[-1].read_bytes()
            journal.when_there_is_room(settings, lambda: files.write(settings, data))
        journal.when_there_is_room(output, lambda: files.replace_by(output, found.read()))
        for part in parts:
            part.unlink()
            journal.settings_path(part).unlink(missing_ok=True)
    return True


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Only one process at a time; a lock ends with the process that holds it."""
    path = lock_path(output)
    with journal.when_there_is_room(path, lambda: journal.open_locked(path, wait=True)):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while we hold it: those who wait find it gone and begin anew
