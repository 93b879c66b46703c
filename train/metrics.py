"""The lines of a run's `metrics.jsonl`."""

from pathlib import Path
from typing import Any

from dflash_jax.files import read_json_lines

NUMBERS = ("step", "loss", "teacher_forced_tau", "tau")  # what is read of a line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines; what a killed run left of the last one is left out.

    Raises:
        ValueError: another line is damaged; the message names the file and the line.
        OSError: the file cannot be read.
    """
    return [line for _, line in read_json_lines(path, _checked)]


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    if type(line["step"]) is not int:
        raise ValueError(f"step must be a whole number, got {line['step']!r:.60}")
    for name in NUMBERS:
        if not isinstance(line.get(name), int | float | None):
            raise ValueError(f"{name} must be a number, got {line[name]!r:.60}")
    return line
