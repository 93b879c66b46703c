"""Several drafters of one target, compared fairly: the same prompts in turns in one process, and the same answers.

A cell of the table is one drafter on one task at one temperature. Nothing is kept of one prompt for another, what was
answered to warm up does not count, and every answer is compared with plain decoding's.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from dflash_jax import drafters as kinds
from dflash_jax.benchmarks.step_times import PARTS, StepTimes, samples_due
from dflash_jax.checkpoint import read_json, resolve
from dflash_jax.cli import EngineOptions
from dflash_jax.config import Raw
from dflash_jax.drafters.loading import load_drafter
from dflash_jax.engines import engine_config, make_engine, needs_of
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs.records import acceptance_summary
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
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}")
    if options.generation.block_size == "auto":
        raise ValueError("--drafters compares drafters, not --block-size auto; give a number or leave it out")
    source, _ = pair_sources(options.models)
    models = replace(options.models, target=source)
    loaded = load(models, options.generation.at(0.0), speculative=False)
    names = [name for name, _ in options.drafters]
    depth = loaded.target.config.num_hidden_layers
    sources = {name: resolve(source, "drafter") for name, source in options.drafters}
    where = {"dtype": models.dtype, "mesh": loaded.target.mesh, "num_target_layers": depth}
    where |= {"target": loaded.target.directory, "overrides": models.drafter_config}
    loaded_drafters = {name: load_drafter(source, **where) for name, source in options.drafters}
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
    found = compare_drafters(names, engine, tasks, temperatures, options.rounds)
    gigabytes = {}
    for cell in found["cells"][: len(names)]:
        raw = read_json(sources[cell["drafter"]] / "config.json")
        gigabytes[cell["drafter"]] = bytes_per_step(raw, cell["block_size"], cell["nodes"])
    settings = {
        "tasks": {name: len(samples) for name, samples in asked.items()},
        "rounds": options.rounds,
        "dtype": loaded.target.dtype.name,
        "seed": options.seed,
        "max_new_tokens": options.generation.max_new_tokens,
        "batch_size": options.generation.batch_size,
        "chat_template_kwargs": text.template_arguments,
    }
    return settings | found | {"qwen3_8b": gigabytes}


def compare_drafters(
    names: Sequence[str],
    make_engine: MakeEngine,
    tasks: Callable[[float], Mapping[str, Sequence[Request]]],
    temperatures: Sequence[float],
    rounds: int,
) -> dict[str, Any]:
    """The `cells` of the table, and the `steps`: what a step of each drafter costs at each temperature.

    Times of a step depend on shapes and on the length of the rows, not on the text. So they are measured once for all
    tasks of a temperature, at the mean length of their rows.

    Args:
        tasks: requests of each task at a temperature.
        rounds: how often all of them are answered.

    Raises:
        ValueError: nothing was decoded.
    """
    cells, steps = [], []
    for temperature in temperatures:
        each = tasks(temperature)
        together = [request for requests in each.values() for request in requests]
        engines = {name: make_engine(name, temperature, together) for name in (PLAIN, *names)}
        for engine in engines.values():
            engine.warm_up()
            engine.generate(together[: engine.slots])
        length = sum(len(r.prompt_token_ids) + r.params.max_new_tokens // 2 for r in together) // len(together)
        parts = {name: StepTimes(engines[PLAIN], engines[name], length, temperature=temperature) for name in names}
        for task, requests in each.items():
            answered = _answered(engines, requests, rounds, parts)
            cells += [{"task": task, "temperature": temperature} | cell for cell in _cells(task, engines, answered)]
        for name, times in parts.items():
            seconds = times.seconds()
            steps.append(
                {
                    "drafter": name,
                    "temperature": temperature,
                    "length": length,
                    "ms": {part: 1e3 * seconds[part] for part in (*PARTS, "speculative", PLAIN)},
                    "fused_step_over_parts": times.fused_over_parts(),
                }
            )
    return {"cells": cells, "steps": steps}


class Answered(NamedTuple):
    """What an engine made of the requests of a task.

    Attributes:
        answers: of each round.
        tokens, seconds: of decoding, by round and batch of requests.
    """

    answers: list[list[Completion]]
    tokens: np.ndarray
    seconds: np.ndarray


def _answered(
    engines: Mapping[str, Engine], requests: Sequence[Request], rounds: int, parts: Mapping[str, StepTimes]
) -> dict[str, Answered]:
    """The engines take turns on batches of the requests; between these, the parts of a step are timed."""
    slots = engines[PLAIN].slots
    starts = range(0, len(requests), slots)
    shape = rounds, len(starts)
    found = {name: Answered([[] for _ in range(rounds)], np.zeros(shape), np.zeros(shape)) for name in engines}
    for turn in range(rounds):
        for batch, start in enumerate(starts):
            for name, engine in engines.items():
                engine.stats.reset()
                found[name].answers[turn] += engine.generate(requests[start : start + slots])
                found[name].tokens[turn, batch] = engine.stats.decode_tokens
                found[name].seconds[turn, batch] = engine.stats.decode_seconds
            for _ in range(samples_due(turn * len(starts) + batch, rounds * len(starts))):
                for times in parts.values():
                    times.sample()
    return found


def _cells(task: str, engines: Mapping[str, Engine], answered: Mapping[str, Answered]) -> list[dict[str, Any]]:
    """Cells of one task.

    Raises:
        ValueError: nothing was decoded.
    """
    if not all(one.tokens.any() for one in answered.values()):
        raise ValueError(f"{task}: nothing was decoded; raise --max-new-tokens")
    rate = lambda one: float(one.tokens.sum() / one.seconds.sum())
    plain, cells = answered[PLAIN], []
    for name, own in answered.items():
        if name == PLAIN:
            continue
        answers = [answer for each in own.answers for answer in each]
        lengths = Counter(n for answer in answers for n in answer.acceptance_lengths)
        figures, speedup = acceptance_summary(lengths, engines[name].width), rate(own) / rate(plain)
        equal = [
            all(turn[i].token_ids == plain.answers[0][i].token_ids for turn in own.answers)
            for i in range(len(own.answers[0]))
        ]
        cells.append(
            {
                "drafter": name,
                "samples": len(equal),
                "equal_outputs": sum(equal),
                "proposals": engines[name].width - 1,
                "block_size": engines[name].block_size,
                "nodes": engines[name].tree,
                "tau": figures["tau"],
                "tau_error": tau_error(own.answers),
                "acceptance_per_position": figures["acceptance_per_position"],
                "tokens_per_second": rate(own),
                "tokens_per_second_error": rate(own) * relative_error([own.tokens], [own.seconds]),
                "autoregressive_tokens_per_second": rate(plain),
                "speedup": speedup,
                "speedup_error": speedup * relative_error([own.tokens, plain.seconds], [own.seconds, plain.tokens]),
                "omega": figures["tau"] / speedup - 1,
            }
        )
    return cells


def relative_error(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> float:
    """Relative standard error of a product of sums over another, batches of prompts and rounds being drawn by chance.

    The errors over batches and over rounds, to first order in each sum, are added in squares; where there is only one
    batch or one round, its error is left out.

    Args:
        above, below: of each sum what it is of, by round and batch.
    """
    squares = []
    for axis in (0, 1):
        sums = [(x.sum(axis=axis), sign) for terms, sign in ((above, 1), (below, -1)) for x in terms]
        if (n := len(sums[0][0])) > 1 and all(x.sum() for x, _ in sums):
            influence = sum(sign * x / x.sum() for x, sign in sums)
            squares.append(float(np.sum(influence**2)) * n / (n - 1))
    return math.sqrt(sum(squares)) if squares else math.nan


def tau_error(answers: Sequence[Sequence[Completion]]) -> float:
    """Standard error of the mean acceptance length over prompts, the columns, and over rounds."""
    of = lambda measure: np.array([[measure(x.acceptance_lengths) for x in turn] for turn in answers], float)
    tokens, steps = of(sum), of(len)
    return float(tokens.sum() / steps.sum()) * relative_error([tokens], [steps]) if steps.sum() else math.nan


def unequal(figures: Mapping[str, Any]) -> str | None:
    """What is wrong with the answers: in float32 all must be those of plain decoding. Rounding may change those of
    other types, which are only counted."""
    wrong = [cell for cell in figures["cells"] if cell["equal_outputs"] < cell["samples"]]
    if figures["dtype"] != "float32" or not wrong:
        return None
    counts = (f"{c['samples'] - c['equal_outputs']} of {c['drafter']} on {c['task']}" for c in wrong)
    return f"answers in float32 differ from those of plain decoding: {', '.join(counts)}"


def bytes_per_step(raw: Raw, block_size: int, nodes: int = 0) -> dict[str, float]:
    """GB that products of a drafter of this kind and depth would read per step of a Qwen3-8B, in bfloat16 at batch 1
    after 1,024 tokens: what bounds a step on an accelerator. A reduced vocabulary has 32,000 tokens there.

    Args:
        raw: `config.json` of the drafter.
        block_size: that it drafts with.
        nodes: of its tree; 0 is a chain.
    """
    from dflash_jax.benchmarks.planning import traced
    from dflash_jax.benchmarks.presets import PAIRS

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


def markdown(cells: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    """The cells as a Markdown table."""
    head = ["drafter", "task", "T", "tau", "speedup", "tokens/s", "omega", *PARTS[:-1], "commit ms", "equal"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    times = {(each["drafter"], each["temperature"]): each["ms"] for each in steps}
    for cell in cells:
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
    return "\n".join(lines)
