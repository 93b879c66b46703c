"""One job by several processes on shared storage: each answers its share of the lines into a part of its own.

No process waits for another. Whoever finds every line answered merges the parts in input order. What a process that
died has left, any later number of processes finishes.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash_jax import files
from dflash_jax.files import Json
from dflash_jax.infer.jobs import journal
from dflash_jax.infer.jobs.lines import Line
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


def answered(output: Path) -> dict[str, str]:
    """Records of the output and its parts by the id they answer, as lines; those being written are left out.

    Raises:
        ValueError: a file is damaged other than at its end.
    """
    records: dict[str, str] = {}
    for path in (output, *found_parts(output)):
        if path.exists():
            for line, name in files.read_json_lines(path, record_id):
                records.setdefault(name, line.decode())
    return records


def check_settings(output: Path, settings: Json) -> None:
    """Raises ValueError if the output or a part was made with other settings, or nobody can tell."""
    with _alone(output):
        for path in (output, *found_parts(output)):
            if path.exists() and path.stat().st_size:  # a process that begins has saved nothing yet
                journal.check_settings(path, settings)


def merge(output: Path, lines: Sequence[Line]) -> bool:
    """Joins the parts into the output, in input order, if every line is answered; returns whether that is so."""
    with _alone(output):
        records = answered(output)
        if any(str(line.id) not in records for line in lines):
            return False
        parts = found_parts(output)
        saved = [path for path in map(journal.settings_path, parts) if path.exists()]
        if saved:
            settings, data = journal.settings_path(output), saved[-1].read_bytes()
            journal.when_there_is_room(settings, lambda: files.write(settings, data))
        text = "".join(records[str(line.id)] for line in lines)
        journal.when_there_is_room(output, lambda: files.write_text(output, text))
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
