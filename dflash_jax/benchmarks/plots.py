"""Plots of the benchmark's figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.files import check_writable


def check_plot(path: Path) -> None:
    """Raises ValueError or OSError if nothing could be drawn into this file: before a long run, not after it."""
    figure = new_figure(1, 1)
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot must name a file that ends in {', '.join(f'.{end}' for end in known)}, got {path}")
    check_writable(path)


def new_figure(width: float, height: float) -> Any:
    """An empty figure; raises ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"{error}; a plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot_sweep(rows: Sequence[Figures], path: Path) -> None:
    """Draws tokens per second over tokens per second and user, a line per engine, a point per concurrency."""
    figure = new_figure(7, 5)
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["engine"] for row in rows):
        points = [row for row in rows if row["engine"] == name and row["tokens_per_second_and_user"]]
        x, y = ([row[key] for row in points] for key in ("tokens_per_second_and_user", "tokens_per_second"))
        axes.plot(x, y, marker="o", label=name)
        for row, right, up in zip(points, x, y, strict=True):
            axes.annotate(str(row["concurrency"]), (right, up), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("tokens per second and user")
    axes.set_ylabel("tokens per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(title="points: requests in progress")
    figure.savefig(path)


def plot_drafters(cells: Sequence[Figures], steps: Sequence[Figures], path: Path) -> None:
    """Draws speedups as bars, acceptance by position, and tau over the time of a draft; see `drafters`."""
    names = list(dict.fromkeys(cell["drafter"] for cell in cells))
    groups = list(dict.fromkeys((cell["task"], cell["temperature"]) for cell in cells))
    draft = {(step["drafter"], step["temperature"]): step["ms"]["draft"] for step in steps}
    figure = new_figure(15, 4.5)
    bars, positions, times = figure.subplots(1, 3)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        found = {(cell["task"], cell["temperature"]): cell for cell in cells if cell["drafter"] == name}
        at = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        heights, errors = ([found[group][key] for group in groups] for key in ("speedup", "speedup_error"))
        bars.bar(at, heights, width, yerr=np.nan_to_num(np.asarray(errors, float)), capsize=2, label=name)
        rates = [cell["acceptance_per_position"] for cell in found.values()]
        positions.plot(range(1, len(rates[0]) + 1), np.mean(rates, axis=0), marker="o", label=name)
        times.scatter([draft[name, t] for _, t in found], [cell["tau"] for cell in found.values()], label=name)
    bars.axhline(1, color="gray", linewidth=0.8)
    bars.set_xticks(range(len(groups)), [f"{task}\nT = {temperature:g}" for task, temperature in groups])
    bars.set_ylabel("speedup over autoregressive decoding")
    positions.set_xlabel("position after the anchor")
    positions.set_ylabel("share of rounds that accept it")
    positions.set_ylim(0, 1)
    times.set_xlabel("draft, ms")
    times.set_ylabel("tau")
    for axes in (bars, positions, times):
        axes.legend(fontsize=8)
    figure.savefig(path)
