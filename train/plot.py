"""Loss and tau over the steps of a run, and tau of ablations."""

import math
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.train import metrics
from dflash_jax.train.arguments import PlotOptions
from dflash_jax.train.metrics import Metrics


def read_metrics(run: str | Path) -> list[Metrics]:
    """The lines of a run's `metrics.jsonl`; raises ValueError if there are none."""
    path = Path(run) / "metrics.jsonl"
    try:
        lines = metrics.read_metrics(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{run} must be a directory that `fit` wrote, with metrics.jsonl: {error}") from error
    if not lines:
        raise ValueError(f"{path} is empty: the run has not logged a step yet")
    return lines


def plot(run: str | Path, output: str | Path) -> None:
    """Writes the plot: loss above, teacher-forced and decoded tau below."""
    from matplotlib.figure import Figure

    lines = read_metrics(run)
    steps = [line for line in lines if "loss" in line]
    decoded = [line for line in lines if "tau" in line]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = [line["step"] for line in steps]
    above.plot(numbers, [line["loss"] for line in steps], linewidth=1)
    above.set_ylabel("loss")
    forced = [line.get("teacher_forced_tau") or math.nan for line in steps]
    below.plot(numbers, forced, linewidth=1, label="teacher-forced")
    if decoded:
        below.plot([line["step"] for line in decoded], [line["tau"] for line in decoded], "o-", label="decoded")
    below.set_ylabel("tau")
    below.set_xlabel("step")
    below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=120, format="png")


def plot_ablations(results: Sequence[Metrics], output: str | Path) -> None:
    """Writes tau of each row, with its standard error over prompts; the file's name decides the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.8 + 0.35 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{line['row']}, decoded at {line['decoded_block']}" for line in results]
    errors = [line["tau_deviation_over_prompts"] / line["samples"] ** 0.5 for line in results]
    axes.barh(names, [line["tau"] for line in results], xerr=errors, capsize=2, color="#1f6feb", height=0.65)
    axes.invert_yaxis()
    axes.set_xlabel("tau")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(output)


def main(options: PlotOptions) -> int:
    """The stage `plot`; returns its exit status."""
    plot(options.run, options.output)
    return 0
