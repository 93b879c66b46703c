"""Whole jobs, prompts included, at every block size: `python -m dflash_jax.benchmark jobs`."""

import time
from dataclasses import replace

import numpy as np
import scipy

from dflash_jax.benchmarks.arguments import Figures, JobsOptions
from dflash_jax.benchmarks.official import Official
from dflash_jax.benchmarks.pairs import Asked, ask
from dflash_jax.benchmarks.turns import side_by_side, warm_up
from dflash_jax.cli import BlockSize, EngineOptions
from dflash_jax.infer.engine.chooser import Candidate, Chooser, Draft, block_sizes
from dflash_jax.infer.engine.engine import Engine


def measure(options: JobsOptions) -> Figures:
    """The figures of `benchmark jobs`: throughput of whole jobs, prompts included. In every round each engine answers
    all requests once, side by side; the official implementation, one at a time and after the others.

    Of each: the tokens per second over all rounds, their ratio to the first engine's in the same round (geometric
    mean), the lower end of its one-sided 95% confidence interval, and the steps at each block size.
    """
    if options.official and options.generation.temperature > 0:
        raise ValueError("--official compares greedy decoding only")
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}")
    asked, rounds = ask(options), options.rounds
    official = Official(asked.loaded.target.directory, asked.source) if options.official else None
    compared, block_size = engines(asked, options), asked.drafter.config.block_size
    warm_up(compared, asked.requests)
    if official:
        official.dflash(asked.requests[0], block_size)
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        turns = side_by_side(compared, asked.requests)
        round_rates = {name: side.tokens_per_second for name, side in turns.items()}
        if official:
            begin = time.perf_counter()
            tokens = sum(len(official.dflash(request, block_size)[0]) for request in asked.requests)
            round_rates["official, one at a time"] = tokens / (time.perf_counter() - begin)
        for name, rate in round_rates.items():
            rates.setdefault(name, []).append(rate)
    first = np.log(next(iter(rates.values())))
    sides: dict[str, Figures] = {}
    for name, measured in rates.items():
        ratio = np.log(measured) - first
        error = scipy.stats.t.ppf(0.95, rounds - 1) * scipy.stats.sem(ratio) if rounds > 1 else float("nan")
        sides[name] = {
            "tokens_per_second": float(np.mean(measured)),
            "ratio": float(np.exp(ratio.mean())),
            "lower_bound": float(np.exp(ratio.mean() - error)),
        }
        if engine := compared.get(name):
            sides[name] |= {"tau": engine.stats.tau, "steps_by_block_size": engine.steps_by_block_size}
    return asked.settings | {"rounds": rounds, "engines": sides}


def engines(asked: Asked, options: JobsOptions) -> dict[str, Engine]:
    """Those that are compared, by name: the first is autoregressive decoding."""
    most, generation = asked.drafter.config.block_size, options.generation
    engine_options, one = EngineOptions(seed=options.seed), options.generation.block_size

    def engine(size: BlockSize, batch_size: int = generation.rows) -> Engine:
        changed = replace(generation, block_size=size, batch_size=batch_size)
        return asked.engine(changed, engine_options, speculative=size != 1)

    sizes: tuple[BlockSize, ...] = (*block_sizes(most), "auto") if one is None else (1, one)
    names: dict[BlockSize, str] = {1: "autoregressive", "auto": "auto"}
    found = {names.get(size, f"block {size}"): engine(size) for size in sizes}
    if generation.rows > 1 and one is None:
        found["one at a time, autoregressive"] = engine(1, batch_size=1)
        found["one at a time"] = engine(most, batch_size=1)
    if one == "auto":  # what `auto` pays for being able to speculate, where speculation does not pay
        kept = found["draft state kept, unused"] = engine("auto")
        kept.warm_up()
        kept.choosers.update({rows: Chooser({Draft(1): Candidate(0, 1.0)}) for rows in kept.choosers})
    return found


def text(figures: Figures) -> str:
    """The figures as text."""
    what = f"{figures['samples']} prompts of {figures['dataset']}, {figures['batch_size']} at a time"
    lines = [
        f"{what}, {figures['rounds']} rounds",
        f"{'':32}{'tokens/s':>10}{'ratio':>8}{'at least':>10}{'tau':>7}   steps by block size",
    ]
    for name, side in figures["engines"].items():
        steps = " ".join(f"{size}:{count}" for size, count in side.get("steps_by_block_size", {}).items())
        lines.append(
            f"{name:32}{side['tokens_per_second']:10.1f}{side['ratio']:8.3f}{side['lower_bound']:10.3f}"
            f"{side.get('tau') or float('nan'):7.2f}   {steps}"
        )
    return "\n".join([*lines, "ratio: of tokens per second to the first line's, with its one-sided 95% bound"])
