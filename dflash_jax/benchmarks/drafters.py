"""Several drafters of one target, compared fairly: the same prompts in turns in one process, and the same answers.

A cell of the table is one drafter on one task at one temperature. Nothing is kept of one prompt for another, what was
answered to warm up does not count, and every answer is compared with plain decoding's.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_jax import drafters as kinds
from dflash_jax.benchmarks.step_times import StepTimes
from dflash_jax.checkpoint import read_json, resolve
from dflash_jax.cli import EngineOptions
from dflash_jax.config import Raw
from dflash_jax.drafters.loading import load_drafter
from dflash_jax.engines import engine_config, make_engine, needs_of
from dflash_jax.infer.engine import Engine
from dflash_jax.infer.jobs import acceptance_summary
from dflash_jax.infer.requests import Completion, Request
from dflash_jax.loading import load, pair_sources

PLAIN = "autoregressive"
MakeEngine = Callable[[str, float, Sequence[Request]], Engine]  # of a drafter or PLAIN, at a temperature


def measure_drafters(options: Any, questions: Callable[[str, int], Any]) -> dict[str, Any]:
    """The figures of `--drafters`.

    Args:
        options: `benchmark.BenchmarkOptions`.
        questions: samples of a dataset.

    Raises:
        ValueError: options that exclude each other, a drafter of another target, or one that cannot propose so many
            tokens.
    """
    if options.jobs or options.sweep or options.official or options.models.drafter or options.untrained:
        raise ValueError("--drafters is a measurement of its own; leave --drafter, --jobs, --sweep and others out")
    if options.generation.block_size == "auto":
        raise ValueError("--drafters compares drafters, not --block-size auto; give a number or leave it out")
    source, _ = pair_sources(options.models)
    models = replace(options.models, target=source)
    loaded = load(models, options.generation.at(0.0), speculative=False)
    names = [name for name, _ in options.drafters]
    depth = loaded.target.config.num_hidden_layers
    sources = {name: resolve(source, "drafter") for name, source in options.drafters}
    where = {"dtype": models.dtype, "mesh": loaded.target.mesh, "num_target_layers": depth}
    loaded_drafters = {name: load_drafter(directory, **where) for name, directory in sources.items()}
    for drafter in loaded_drafters.values():
        drafter.config.check_pair(loaded.target.config)
    task = options.dataset or ("gsm8k" if options.models.target else "problems")
    asked = {name: questions(name, options.max_samples)[0] for name in (options.tasks or task).split(",")}
    text = loaded.text

    def tasks(temperature: float) -> dict[str, list[Request]]:
        params = replace(loaded.defaults, temperature=temperature)
        prompts = {
            name: [
                text.encode_chat([{"role": "user", "content": sample.turns[0]}])
                if text.has_chat_template
                else text.encode(sample.turns[0])
                for sample in samples
            ]
            for name, samples in asked.items()
        }
        return {
            name: [Request(prompt, params, id=f"{name}-{i}") for i, prompt in enumerate(each)]
            for name, each in prompts.items()
        }

    def engine(name: str, temperature: float, requests: Sequence[Request]) -> Engine:
        generation = options.generation.at(temperature)
        engine_options = EngineOptions(seed=options.seed, prefix_chunks=0)
        needs = needs_of(loaded.target.config, requests, engine_options)
        config = engine_config(loaded.target, needs, generation, engine_options)
        if name == PLAIN:
            return make_engine(loaded.target, None, replace(config, block_size=None))
        given, drafter = generation.block_size, loaded_drafters[name]
        proposals = given - 1 if isinstance(given, int) else None
        sizes = range(1, drafter.config.block_size + 1)
        size = next((size for size in sizes if drafter.depth(size) == proposals), None)
        if proposals is not None and size is None:
            raise ValueError(f"{name} cannot propose {proposals} tokens; its block size is {drafter.config.block_size}")
        return make_engine(loaded.target, drafter, replace(config, block_size=size))

    temperatures = options.generation.temperature
    cells = compare_drafters(names, engine, tasks, temperatures)
    rounds = {}
    for cell in cells[: len(names)]:
        raw = read_json(sources[cell["drafter"]] / "config.json")
        rounds[cell["drafter"]] = bytes_per_round(raw, cell["proposals"])
    settings = {
        "tasks": {name: len(samples) for name, samples in asked.items()},
        "seed": options.seed,
        "max_new_tokens": options.generation.max_new_tokens,
        "batch_size": options.generation.batch_size,
        "chat_template_kwargs": text.template_arguments,
    }
    return settings | {"cells": cells, "qwen3_8b": rounds}


def compare_drafters(
    names: Sequence[str],
    make_engine: MakeEngine,
    tasks: Callable[[float], Mapping[str, Sequence[Request]]],
    temperatures: Sequence[float],
) -> list[dict[str, Any]]:
    """The cells of the table.

    Args:
        tasks: requests of each task at a temperature.

    Raises:
        ValueError: nothing was decoded, or a drafter answers otherwise than plain decoding.
    """
    cells = []
    for temperature in temperatures:
        each = tasks(temperature)
        together = [request for requests in each.values() for request in requests]
        engines = {name: make_engine(name, temperature, together) for name in (PLAIN, *names)}
        for engine in engines.values():
            engine.warm_up()
            engine.generate(together[: engine.slots])
        length = sum(len(r.prompt_token_ids) + r.params.max_new_tokens // 2 for r in together) // len(together)
        parts = {name: StepTimes(engines[PLAIN], engines[name], length, temperature=temperature) for name in names}
        found = []
        for task, requests in each.items():
            found += _task(task, temperature, engines, parts, requests)
        seconds = {name: times.seconds() for name, times in parts.items()}
        for cell in found:
            own = seconds[cell["drafter"]]
            cell["step_ms"] = {part: 1e3 * own[part] for part in ("draft", "verify", "commit", "speculative")}
            cell["step_ms"][PLAIN] = 1e3 * own[PLAIN]
            cell["fused_step_over_parts"] = own["speculative"] / sum(own[p] for p in ("draft", "verify", "commit"))
        cells += found
    expected = len(names) * sum(len(tasks(temperature)) for temperature in temperatures)
    if len(cells) != expected:
        raise ValueError(f"{len(cells)} cells were measured of {expected}")
    return cells


def _task(
    task: str,
    temperature: float,
    engines: Mapping[str, Engine],
    parts: Mapping[str, StepTimes],
    requests: Sequence[Request],
) -> list[dict[str, Any]]:
    """Cells of one task; the engines take turns on batches of its requests."""
    answers: dict[str, list[Completion]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.stats.reset()
    slots = engines[PLAIN].slots
    for start in range(0, len(requests), slots):
        for name, engine in engines.items():
            answers[name] += engine.generate(requests[start : start + slots])
        for times in parts.values():
            times.sample()
    rates = {name: engine.stats.tokens_per_second for name, engine in engines.items()}
    if not all(rates.values()):
        raise ValueError(f"{task}: nothing was decoded; raise --max-new-tokens")
    cells = []
    for name in parts:
        pairs = list(zip(answers[name], answers[PLAIN], strict=True))
        lengths = Counter(n for answer in answers[name] for n in answer.acceptance_lengths)
        figures, speedup = acceptance_summary(lengths, engines[name].width), rates[name] / rates[PLAIN]  # type: ignore
        cells.append(
            {
                "drafter": name,
                "task": task,
                "temperature": temperature,
                "samples": len(requests),
                "equal_outputs": sum(ours.token_ids == plain.token_ids for ours, plain in pairs),
                "proposals": engines[name].width - 1,
                "tau": figures["tau"],
                "tau_error": tau_error(answers[name]),
                "acceptance_per_position": figures["acceptance_per_position"],
                "tokens_per_second": rates[name],
                "autoregressive_tokens_per_second": rates[PLAIN],
                "speedup": speedup,
                "omega": figures["tau"] / speedup - 1,
            }
        )
    return cells


def tau_error(answers: Sequence[Completion]) -> float:
    """Standard error of the mean acceptance length, prompts being drawn by chance (a ratio of means)."""
    steps = np.array([len(answer.acceptance_lengths) for answer in answers], float)
    tokens = np.array([sum(answer.acceptance_lengths) for answer in answers], float)
    if len(answers) < 2 or not steps.sum():
        return math.nan
    tau = tokens.sum() / steps.sum()
    return float(np.sqrt(np.sum((tokens - tau * steps) ** 2) * len(answers) / (len(answers) - 1)) / steps.sum())


def bytes_per_round(raw: Raw, depth: int) -> dict[str, float]:
    """GB that products of a drafter of this kind and depth would read per round of a Qwen3-8B, in bfloat16 at batch 1
    behind 1,024 tokens: what bounds a round on an accelerator. A reduced vocabulary has 32,000 tokens there.

    Args:
        raw: `config.json` of the drafter.
        depth: tokens that it proposes.
    """
    from dflash_jax.benchmarks.planning import traced
    from dflash_jax.benchmarks.presets import PAIRS

    raw = kinds.flattened(raw)
    config, name = kinds.drafter_config(raw), kinds.kind_of(raw)
    target, common = PAIRS["qwen3-8b"]
    layers = config.num_hidden_layers
    common = {**common, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    size = depth + 1
    common["block_size"] = size
    settings = SimpleNamespace(block_size=size, target_layer_ids=(), conv_group_size=16, selector_rank=256)
    settings.selector_top_k, settings.markov_rank = 16, 256
    settings.markov_head_type = getattr(config, "markov_head_type", "vanilla")
    if name == "dspark" and getattr(config, "anchor_predicts", False):
        common["block_size"] = depth
    else:
        common["sample_from_anchor"] = False
    fresh = dict(kinds.KINDS[name].fresh(common, settings))
    fresh.pop("sample_from_anchor" if name == "eagle3" else "", None)
    if config.draft_vocab_size != config.vocab_size:
        fresh["draft_vocab_size"] = 32000
    figures = traced((target, fresh), {"data": 1}, 1, 1024, None)
    return {"round_gb": figures["bytes_accessed"] / 1e9, "draft_gb": figures["draft_bytes"] / 1e9}


def markdown(cells: Sequence[Mapping[str, Any]]) -> str:
    """The cells as a Markdown table."""
    head = ["drafter", "task", "T", "tau", "speedup", "tokens/s", "omega", "draft", "verify", "commit ms", "equal"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in cells:
        ms = cell["step_ms"]
        row = [
            cell["drafter"],
            cell["task"],
            f"{cell['temperature']:g}",
            f"{cell['tau']:.2f} ± {cell['tau_error']:.2f}",
            f"{cell['speedup']:.2f}",
            f"{cell['tokens_per_second']:.0f}",
            f"{cell['omega']:.2f}",
            *(f"{ms[part]:.2f}" for part in ("draft", "verify", "commit")),
            f"{cell['equal_outputs']}/{cell['samples']}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def plot(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws speedups as bars, acceptance by position, and tau over the time of a draft.

    Raises:
        ValueError: matplotlib is missing, or does not know this kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"{error}; a plot needs matplotlib: pip install matplotlib") from error
    names = list(dict.fromkeys(cell["drafter"] for cell in cells))
    groups = list(dict.fromkeys((cell["task"], cell["temperature"]) for cell in cells))
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    bars, positions, times = figure.subplots(1, 3)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = {(cell["task"], cell["temperature"]): cell for cell in cells if cell["drafter"] == name}
        at = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        bars.bar(at, [own[group]["speedup"] for group in groups], width, label=name)
        rates = [cell["acceptance_per_position"] for cell in own.values()]
        positions.plot(range(1, len(rates[0]) + 1), np.mean(rates, axis=0), marker="o", label=name)
        times.scatter([c["step_ms"]["draft"] for c in own.values()], [c["tau"] for c in own.values()], label=name)
    bars.axhline(1, color="gray", linewidth=0.8)
    bars.set_xticks(range(len(groups)), [f"{task}\nT = {temperature:g}" for task, temperature in groups])
    bars.set_ylabel("speedup over autoregressive decoding")
    positions.set_xlabel("position behind the anchor")
    positions.set_ylabel("share of rounds that accept it")
    positions.set_ylim(0, 1)
    times.set_xlabel("draft, ms")
    times.set_ylabel("tau")
    for axes in (bars, positions, times):
        axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
