"""The lines of a run's `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

from dflash_jax.files import read_json_lines, reading, write_text

Metrics = dict[str, Any]  # one line: the step, and figures by name
NUMBERS = ("step", "loss", "teacher_forced_tau", "tau")  # what is read of a line


class MetricsLog:
    """The `metrics.jsonl` of a run.

    Args:
        writes: whether this process does; the others only read.
    """

    def __init__(self, path: Path, writes: bool):
        self._path, self._writes = path, writes

    def lines(self) -> list[Metrics]:
        """What has been logged so far; raises ValueError and OSError as `read_metrics`."""
        return read_metrics(self._path) if self._path.exists() else []

    def cut(self, step: int) -> None:
        """Drops what was logged after the checkpoint of a step, from which the run continues."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step)
        if self._writes:
            write_text(self._path, text)

    def add(self, metrics: Metrics) -> None:
        """Logs a line."""
        if self._writes:
            with reading(self._path) as path, path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")


def read_metrics(path: Path) -> list[Metrics]:
    """The lines; what a killed run left of the last one is left out.

    Raises:
        ValueError: another line is damaged; the message names the file and the line.
        OSError: the file cannot be read.
    """
    return [line for _, line in read_json_lines(path, _checked)]


def _checked(line: Metrics) -> Metrics:
    if type(line["step"]) is not int:
        raise ValueError(f"step must be a whole number, got {line['step']!r:.60}")
    for name in NUMBERS:
        if not isinstance(line.get(name), int | float | None):
            raise ValueError(f"{name} must be a number, got {line[name]!r:.60}")
    return line
