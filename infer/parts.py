"""One job by several processes on shared storage: each answers its share of the lines into a part of its own.

No process waits for another. Whoever finds every line answered merges the parts in input order. What a process that
died has left, any later number of processes finishes.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_jax.files import write_text
from dflash_jax.infer.jobs import record_id
from dflash_jax.infer.lines import Line

SETTINGS = ".settings.json"


def part_path(output: Path, process: int, processes: int) -> Path:
    """Where one of several processes writes."""
    return output.with_name(f"{output.name}.part-{process}-of-{processes}")


def found_parts(output: Path) -> list[Path]:
    """Parts of this output that are there, of this number of processes or another."""
    return sorted(path for path in output.parent.glob(output.name + ".part-*-of-*") if path.suffix != ".json")


def answered(output: Path) -> dict[str, str]:
    """Records of the output and its parts by the id they answer, as lines; those being written are left out.

    Raises:
        ValueError: a file is damaged other than at its end.
    """
    records: dict[str, str] = {}
    for path in (output, *found_parts(output)):
        if path.exists():
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith("\n"):
                        break
                    try:
                        records.setdefault(record_id(json.loads(line)), line)
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(f"{path} is damaged in line {number}: {error!s:.100}") from error
    return records


def check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Raises ValueError if a part was made with other settings."""
    settings = json.loads(json.dumps(settings))
    for part in found_parts(output):
        beside = part.with_name(part.name + SETTINGS)
        found = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else None
        if found is not None and found != settings:
            differ = ", ".join(name for name in settings if found.get(name) != settings[name])
            raise ValueError(f"{part} was made with other settings: {differ}")


def merge(output: Path, lines: Sequence[Line]) -> bool:
    """Joins the parts into the output, in input order, if every line is answered; returns whether that is so."""
    with _alone(output):
        records = answered(output)
        if any(str(line.id) not in records for line in lines):
            return False
        parts = found_parts(output)
        write_text(output, "".join(records[str(line.id)] for line in lines))
        for part in parts:
            beside = part.with_name(part.name + SETTINGS)
            if beside.exists():
                beside.replace(output.with_name(output.name + SETTINGS))
            part.unlink()
    return True


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Only one process at a time; a lock ends with the process that holds it."""
    path = output.with_name(output.name + ".lock")
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)
