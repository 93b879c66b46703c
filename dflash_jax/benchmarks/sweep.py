"""Throughput against interactivity: `python -m dflash_jax.benchmark sweep`.

The same requests at several concurrencies, with and without speculation.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash_jax.benchmarks import plots
from dflash_jax.benchmarks.arguments import Figures, SweepOptions
from dflash_jax.benchmarks.pairs import ask
from dflash_jax.benchmarks.turns import PLAIN, side_by_side, warm_up
from dflash_jax.cli import BlockSize, EngineOptions

LEAST = 4  # requests per row, at least: the rows are full for most of the time


def measure(options: SweepOptions) -> Figures:
    """The figures of `benchmark sweep`: of each engine at each concurrency, tokens per second, tokens per second and
    user (one answer, after its first token), seconds to the first token (median and 99th percentile) and tau.

    So many requests are in progress at any time: when one is answered, the next is sent. They are asked again where
    they are too few. Nothing is kept of one prompt for another: who comes second would be faster.
    """
    asked, generation = ask(options), options.generation
    engine_options = EngineOptions(seed=options.seed, prefix_chunks=0)
    size = asked.drafter.config.block_size if generation.block_size in (None, "auto") else generation.block_size
    sizes: dict[str, BlockSize] = {PLAIN: 1, f"block {size}": size, "auto": "auto"}
    rows = []
    for concurrency in options.concurrency:
        engines = {}
        for name, size in sizes.items():
            changed = replace(generation, block_size=size, batch_size=concurrency)
            engines[name] = asked.engine(changed, engine_options, speculative=size != 1)
        requests = [*asked.requests] * max(1, -(-LEAST * concurrency // len(asked.requests)))
        warm_up(engines, requests)
        for name, turns in side_by_side(engines, requests, concurrency).items():
            rows.append(
                {
                    "concurrency": concurrency,
                    "engine": name,
                    "tokens_per_second": turns.tokens_per_second,
                    "tokens_per_second_and_user": turns.tokens_per_second_and_user,
                    "first_token_p50": turns.first_token_seconds(50),
                    "first_token_p99": turns.first_token_seconds(99),
                    "tau": turns.tau,
                }
            )
    return asked.settings | {"sweep": rows}


def at_fixed_interactivity(rows: Sequence[Figures], than: str) -> list[Figures]:
    """For each point of the engine `than`: the most tokens per second that each engine makes while every user gets at
    least as many as there; None for one that is nowhere so fast."""
    user, all_users = "tokens_per_second_and_user", "tokens_per_second"
    found = []
    for point in (row for row in rows if row["engine"] == than and row[user]):
        line: Figures = {user: point[user]}
        for name in dict.fromkeys(row["engine"] for row in rows):
            fast = [row[all_users] for row in rows if row["engine"] == name and (row[user] or 0) >= point[user]]
            line[name] = max(fast, default=None)
        found.append(line)
    return found


def text(figures: Figures) -> str:
    """The figures as text."""
    lines = [f"{'concurrency':>12}  {'':16}{'tokens/s':>10}{'per user':>10}{'first p50':>11}{'p99, ms':>9}{'tau':>7}"]
    number = lambda value, width, places: f"{value:{width}.{places}f}" if value is not None else f"{'-':>{width}}"
    for row in figures["sweep"]:
        lines.append(
            f"{row['concurrency']:12}  {row['engine']:16}{row['tokens_per_second']:10.1f}"
            + number(row["tokens_per_second_and_user"], 10, 1)
            + f"{1e3 * row['first_token_p50']:11.1f}{1e3 * row['first_token_p99']:9.1f}"
            + number(row["tau"], 7, 2)
        )
    fixed = at_fixed_interactivity(figures["sweep"], PLAIN)
    engines = [name for name in (fixed[0] if fixed else {}) if name != "tokens_per_second_and_user"]
    lines += ["", "most tokens/s at no fewer tokens/s and user", f"{'':>12}  " + "".join(f"{e:>16}" for e in engines)]
    for line in fixed:
        cells = "".join(number(line[name], 16, 1) for name in engines)
        lines.append(f"{line['tokens_per_second_and_user']:12.1f}  {cells}")
    return "\n".join(lines)


def draw(figures: Figures, path: Path) -> None:
    """Draws the figures; see `plots`."""
    plots.plot_sweep(figures["sweep"], path)
