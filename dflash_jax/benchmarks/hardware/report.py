"""The items of a report in turn: what is measured, skipped or fails, kept in a file after every row; as text, too."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_jax import files
from dflash_jax.benchmarks.arguments import Figures


class SkippedError(Exception):
    """Why an item cannot be measured here."""


class Item(NamedTuple):
    """A part of the report.

    Attributes:
        title: of its table.
        minutes: that it takes on an accelerator which has compiled nothing before, roughly.
        rows: measures, and yields a row of figures whenever it has one.
    """

    title: str
    minutes: float
    rows: Callable[[], Iterator[Figures]]


def measure(items: Mapping[str, Item], report: Figures, path: Path | None, minutes: float) -> Figures:
    """Goes through the items that the report does not have yet, and writes it after every row.

    Args:
        report: what an earlier run found: `items` by name.
        minutes: in all. What would take longer than is left is skipped.
    """
    begin = time.perf_counter()
    found = report.setdefault("items", {})
    for name, item in items.items():
        if found.get(name, {}).get("done"):
            continue
        entry: Figures = {"title": item.title, "estimated_minutes": item.minutes, "rows": []}
        found[name] = entry
        left = minutes - (time.perf_counter() - begin) / 60
        if left < item.minutes:
            entry["skipped"] = f"it takes about {item.minutes:g} minutes, and {max(0.0, left):.1f} were left"
            print(f"{name}: skipped, {entry['skipped']}", flush=True)
            _write(path, report)
            continue
        print(f"{name}: {item.title}", flush=True)
        started = time.perf_counter()
        try:
            for row in item.rows():
                entry["rows"].append(row)
                print("  " + line(row), flush=True)
                _write(path, report)
            entry["done"] = True
        except SkippedError as why:
            entry["skipped"] = str(why)
            print(f"  skipped: {why}", flush=True)
        except Exception as error:  # a device fails in ways of its own; the other items go on
            entry["failed"] = f"{type(error).__name__}: {files.one_line(str(error))}"
            print(f"  failed: {entry['failed']}", flush=True)
        entry["seconds"] = round(time.perf_counter() - started, 1)
        _write(path, report)
    return report


def _write(path: Path | None, report: Figures) -> None:
    if path is not None:
        files.write_json(path, report)


def line(row: Figures) -> str:
    """A row of figures as text."""
    return "   ".join(f"{key} {_cell(value)}" for key, value in row.items())


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(report: Figures) -> str:
    """The report as Markdown: a table for every item, and what is missing."""
    lines = ["# Hardware report", ""]
    lines += [f"- {key}: {_cell(value)}" for key, value in report.items() if key != "items"]
    missing = []
    for name, entry in report["items"].items():
        if entry["rows"]:
            lines += ["", f"## {entry['title']}", "", *_table(entry["rows"])]
        if why := entry.get("skipped") or entry.get("failed"):
            missing.append(f"- {name}: {'failed: ' if 'failed' in entry else ''}{why}")
    if missing:
        lines += ["", "## Not measured", "", *missing]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Figures]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]
