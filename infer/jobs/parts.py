"""One job by several processes on shared storage: each answers its share of the lines into a part of its own.

No process waits for another. Whoever finds every line answered merges the parts in input order. What a process that
died has left, any later number of processes finishes.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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


class Found(NamedTuple):
    """Where a record is, in bytes of a file, and whether it is an error."""

    path: Path
    start: int
    size: int
    failed: bool

    def read(self) -> bytes:
        """Its line."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def answered(output: Path) -> dict[str, Found]:
    """Records of the output and its parts, by the id they answer; those being written are left out.

    Raises:
        ValueError: a file is damaged other than at its end.
    """
    records: dict[str, Found] = {}
    read = lambda record: (record_id(record), bool(record.get("error")))
    for path in (output, *found_parts(output)):
        start = 0
        for line, (name, failed) in files.read_json_lines(path, read) if path.exists() else ():
            records.setdefault(name, Found(path, start, len(line), failed))
            start += len(line)
    return records


def check_settings(output: Path, settings: Json) -> None:
    """Raises ValueError if the output or a part was made with other settings, or nobody can tell."""
    with _alone(output):
        for path in (output, *found_parts(output)):
            if path.exists() and path.stat().st_size:  # a process that begins has saved nothing yet
                journal.check_settings(path, settings)


def merge(output: Path, lines: int, place: Callable[[str], int | None]) -> bool:
    """Joins the parts into the output, in input order, if every line is answered; returns whether that is so.

    Args:
        lines: how many there are.
        place: the place of an id among them, if it has one.
    """
    with _alone(output):
        records = {at: found for name, found in answered(output).items() if (at := place(name)) is not None}
        if len(records) < lines:
            return False
        parts = found_parts(output)
        saved = [path for path in map(journal.settings_path, parts) if path.exists()]
        if saved:
            settings, data = journal.settings_path(output), saved[-1].read_bytes()
            journal.when_there_is_room(settings, lambda: files.write(settings, data))
        pieces = lambda: (records[at].read() for at in range(lines))
        journal.when_there_is_room(output, lambda: files.replace_by(output, pieces()))
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
