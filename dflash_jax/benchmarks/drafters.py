"""Several drafters of one target, compared fairly: `python -m dflash_jax.benchmark drafters`.

All answer the same prompts, in turns in one process, and give the same answers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from jax.sharding import AbstractMesh

from dflash_jax import drafters as kinds
from dflash_jax.benchmarks import plots
from dflash_jax.benchmarks.arguments import DraftersOptions, Figures
from dflash_jax.benchmarks.cells import compare_drafters
from dflash_jax.benchmarks.pairs import encoded, questions
from dflash_jax.benchmarks.planning import traced
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.step_times import PARTS
from dflash_jax.benchmarks.turns import PLAIN
from dflash_jax.checkpoint import read_json, resolve
from dflash_jax.cli import EngineOptions
from dflash_jax.config import Raw
from dflash_jax.decoding.state import DraftModel
from dflash_jax.drafters.loading import checkpoint_of, drafter_named
from dflash_jax.engines import engine_config, make_engine, needs_of
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Request
from dflash_jax.loading import load, pair_sources
from dflash_jax.target import Target


def measure(options: DraftersOptions) -> Figures:
    """The figures of `benchmark drafters`."""
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}")
    if options.generation.block_size == "auto":
        raise ValueError("drafters are compared at one block size; give --block-size a number, or leave it out")
    models = options.models
    source, _ = pair_sources(models)
    loaded = load(replace(models, target=source), options.generation.at(0.0), speculative=False)
    target, networks = loaded.target, {name: checkpoint_of(source) for name, source in options.drafters}
    sources = {name: resolve(source, "drafter") for name, source in networks.items() if source}
    assert not isinstance(target.mesh, AbstractMesh)  # there are devices to decode on
    where = {"num_target_layers": target.config.num_hidden_layers, "target": target.directory, "mesh": target.mesh}
    drafters: dict[str, DraftModel | None] = {PLAIN: None}
    for name, source in options.drafters:
        drafter = drafter_named(
            source, dtype=models.dtype, overrides=models.drafter_config, quantize=models.quantize, **where
        )
        drafter.config.check_pair(target.config)
        drafters[name] = drafter
    names = (options.tasks or options.questions).split(",")
    prompts = {name: encoded(loaded.text, questions(name, options.max_samples)[0]) for name in names}
    cells, steps = [], []
    for temperature in options.temperature:
        params = replace(loaded.defaults, temperature=temperature)
        tasks = {
            name: [Request(prompt, params, id=f"{name}-{i}") for i, prompt in enumerate(asked)]
            for name, asked in prompts.items()
        }
        make = partial(_engine, options, target, temperature, [r for requests in tasks.values() for r in requests])
        engines = {name: make(name, drafter) for name, drafter in drafters.items()}
        found = compare_drafters(engines, tasks, temperature, options.rounds)
        cells += found[0]
        steps += found[1]
    gigabytes = {}
    for cell in cells[: len(networks)]:
        if cell["drafter"] not in sources:
            continue
        raw = read_json(sources[cell["drafter"]] / "config.json")
        gigabytes[cell["drafter"]] = bytes_per_step(raw, cell["block_size"], cell["nodes"])
    return {
        "tasks": {name: len(asked) for name, asked in prompts.items()},
        "rounds": options.rounds,
        "dtype": target.dtype.name,
        "seed": options.seed,
        "max_new_tokens": options.generation.max_new_tokens,
        "batch_size": options.generation.rows,
        "chat_template_kwargs": loaded.text.template_arguments,
        "cells": cells,
        "steps": steps,
        "qwen3_8b": gigabytes,
    }


def _engine(
    options: DraftersOptions,
    target: Target,
    temperature: float,
    requests: Sequence[Request],
    name: str,
    drafter: DraftModel | None,
) -> Engine:
    """An engine for the requests, which proposes as many tokens as `--block-size` says, whatever the kind of drafter;
    raises ValueError if that cannot. Without a drafter it decodes plainly."""
    engine_options = EngineOptions(seed=options.seed, prefix_chunks=0)
    needs = needs_of(target.config, requests, engine_options)
    config = engine_config(target, needs, options.generation.at(temperature), engine_options)
    if drafter is None:
        return make_engine(target, None, replace(config, block_size=None))
    given = options.generation.block_size
    proposals = given - 1 if isinstance(given, int) else None
    sizes = range(1, drafter.config.block_size + 1)
    size = next((size for size in sizes if drafter.depth(size) == proposals), None)
    if proposals is not None and size is None:
        raise ValueError(f"{name} cannot propose {proposals} tokens; its block size is {drafter.config.block_size}")
    return make_engine(target, drafter, replace(config, block_size=size))


def text(figures: Figures) -> str:
    """The figures as text: a Markdown table, and what a step would read of a Qwen3-8B."""
    head = ["drafter", "task", "T", "tau", "speedup", "tokens/s", "omega", *PARTS[:-1], "commit ms", "equal"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    times = {(step["drafter"], step["temperature"]): step["ms"] for step in figures["steps"]}
    for cell in figures["cells"]:
        ms = times[cell["drafter"], cell["temperature"]]
        row = [
            cell["drafter"],
            cell["task"],
            f"{cell['temperature']:g}",
            f"{cell['tau']:.2f} ± {cell['tau_error']:.2f}",
            f"{cell['speedup']:.2f} ± {cell['speedup_error']:.2f}",
            f"{cell['tokens_per_second']:.0f} ± {cell['tokens_per_second_error']:.0f}",
            f"{cell['omega']:.2f}",
            *(f"{ms[part]:.2f}" for part in PARTS),
            f"{cell['equal_outputs']}/{cell['samples']}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "on a Qwen3-8B in bfloat16, batch 1"]
    lines += [f"{name}: {one['step_gb']:.2f} GB a step" for name, one in figures["qwen3_8b"].items()]
    return "\n".join(lines)


def draw(figures: Figures, path: Path) -> None:
    """Draws the figures; see `plots`."""
    plots.plot_drafters(figures["cells"], figures["steps"], path)


def unequal(figures: Figures) -> str | None:
    """What is wrong with the answers: in float32 all must be those of autoregressive decoding. Rounding may change
    those of other types, which are only counted."""
    wrong = [cell for cell in figures["cells"] if cell["equal_outputs"] < cell["samples"]]
    if figures["dtype"] != "float32" or not wrong:
        return None
    counts = (f"{c['samples'] - c['equal_outputs']} of {c['drafter']} on {c['task']}" for c in wrong)
    return f"answers in float32 differ from those of autoregressive decoding: {', '.join(counts)}"


def bytes_per_step(raw: Raw, block_size: int, nodes: int = 0) -> dict[str, float]:
    """GB that products of a drafter of this kind and depth would read per step of a Qwen3-8B, in bfloat16 at batch 1
    after 1,024 tokens: what bounds a step on an accelerator. A reduced vocabulary has 32,000 tokens there.

    Args:
        raw: `config.json` of the drafter.
        block_size: that it drafts with.
        nodes: of its tree; 0 is a chain.
    """
    raw = kinds.laid_out(raw)
    config = kinds.drafter_config(raw)
    target, common = PAIRS["qwen3-8b"]
    layers = config.num_hidden_layers
    common = {**common, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    common["block_size"] = block_size
    common["sample_from_anchor"] = getattr(config, "anchor_predicts", False)
    kind = kinds.KINDS[kinds.kind_of(raw)]
    # Of its hyper-parameters, sizes are those of the paper, and the rest is its own.
    named = {field.name: getattr(config, field.name, None) for field in fields(kind.settings)}
    settings = kind.settings(**{name: value for name, value in named.items() if isinstance(value, str)})
    new = dict(kind.new_config(common, settings))
    if config.draft_vocab_size != config.vocab_size:
        new["draft_vocab_size"] = 32000
    figures = traced((target, new), {"data": 1}, 1, 1024, None, nodes)
    return {"step_gb": figures["bytes_accessed"] / 1e9, "draft_gb": figures["draft_bytes"] / 1e9}
