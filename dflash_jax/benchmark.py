"""Autoregressive against speculative decoding in one run: `python -m dflash_jax.benchmark`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dflash_jax import files
from dflash_jax.cli import (
    BlockSize,
    EngineOptions,
    GenerationOptions,
    ModelOptions,
    optional,
    parse,
    parsed,
)
from dflash_jax.engines import engine_for, needs_of
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.loading import Loaded, load, pair_sources

if TYPE_CHECKING:
    from dflash_jax.benchmarks.official import Official
    from dflash_jax.data.datasets import Sample
    from dflash_jax.drafters.base import Drafter
    from dflash_jax.infer.engine import Engine
    from dflash_jax.infer.requests import Completion, Request

DESCRIPTION = """\
Measures speedup, tau and the cost of a step; autoregressive and speculative decoding take turns on the same prompts,
both warmed up.

  examples      (none: the bundled pair, on held-out problems)
                --target DIR --drafter DIR --dataset gsm8k --max-samples 24 --json figures.json
                --sweep 1,2,4,8 --plot sweep.svg
                --target DIR --drafters a=DIR,b=DIR --temperature 0,1 --plot drafters.svg

  exit status   0 measured, 1 measured, but answers in float32 differed (--drafters), 2
                unusable arguments or files, 130 interrupted
"""
PROBLEM_SEED = 2  # of the held-out problems; any other asks other questions


def _concurrencies(given: Sequence[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, given[0].split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"must be numbers of at least 1 like 1,2,4, got {given[0]!r:.60}")
    return numbers


def _temperatures(given: Sequence[str]) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, given[0].split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < float("inf") for number in numbers):
        raise ValueError(f"must be numbers of at least 0 (several only for --drafters) like 0,1, got {given[0]!r:.60}")
    return numbers


def _named(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [each.partition("=") for each in given[0].split(",")]
    names = [name for name, _, source in pairs if name and source]
    if len(set(names)) != len(pairs):
        raise ValueError(f"must be different names of drafters like a=DIR,b=DIR, got {given[0]!r:.80}")
    return tuple((name, source) for name, _, source in pairs)


@dataclass(frozen=True)
class BenchmarkGeneration(GenerationOptions):
    """How answers are generated.

    Attributes:
        temperature: 0 is greedy; for --drafters several, like 0,1
    """

    temperature: Annotated[Any, parsed(_temperatures, "T[,T...]"), arg(help_behavior_hint="(default: 0)")] = (0.0,)

    def at(self, temperature: float) -> GenerationOptions:
        """At one of the temperatures."""
        given: dict[str, Any] = vars(self) | {"temperature": temperature}
        return GenerationOptions(**given)


@dataclass(frozen=True)
class BenchmarkModels(ModelOptions):
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", "the bundled pair")] = None


@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of `python -m dflash_jax.benchmark`.

    Attributes:
        dataset: problems (held-out ones of the bundled pair, and its default), gsm8k (default for other targets),
            math500, aime25, humaneval, mbpp, livecodebench, mt-bench or a local FILE.jsonl
        max_samples: prompts, after the official shuffle
        jobs: instead: answer all prompts as one job, prefill included, so many times. Compares plain decoding, each
            block size, auto, and one prompt at a time. With --block-size N: only plain decoding and N. With
            --block-size auto: plain decoding, auto, and plain decoding that keeps the drafter's state up to date
        sweep: instead: for each of these numbers, so many requests at the same time; compares plain decoding, the block
            size and auto
        drafters: instead: these drafters of the target side by side: tau, speedup, times and bytes of a step, on each
            of the --tasks at each --temperature
        tasks: of --drafters: datasets, like gsm8k,mt-bench (default: the one of --dataset)
        rounds: of --drafters: how often all prompts are answered
        plot: of --sweep, tokens per second against tokens per second and user; of --drafters, speedups, acceptance by
            position, and tau over the time of a draft (a file that matplotlib can write)
        untrained: random weights in the drafter's place: nothing it proposes is right
        json: write all figures
        seed: sampling noise
        official: also run the official torch implementation (greedy, batch 1, CPU)
    """

    dataset: Annotated[str | None, optional(str, "NAME|FILE.jsonl")] = None
    max_samples: int = 24
    jobs: Annotated[int | None, optional(int, "ROUNDS")] = None
    sweep: Annotated[tuple[int, ...] | None, parsed(_concurrencies, "N,N,..."), arg(help_behavior_hint="")] = None
    drafters: Annotated[tuple[tuple[str, str], ...], parsed(_named, "NAME=DIR,..."), arg(help_behavior_hint="")] = ()
    tasks: Annotated[str | None, optional(str, "NAME,...")] = None
    rounds: Annotated[int, arg(metavar="N")] = 2
    plot: Annotated[Path | None, optional(Path, "FILE.svg")] = None
    untrained: bool = False
    json: Annotated[str | None, optional(str, "FILE")] = None
    seed: Annotated[int, arg(metavar="N")] = 0
    official: bool = False
    models: BenchmarkModels = field(default_factory=BenchmarkModels)
    generation: BenchmarkGeneration = field(default_factory=BenchmarkGeneration)


def parse_options(argv: Sequence[str] | None = None) -> BenchmarkOptions:
    """The options of a command line."""
    return parse(BenchmarkOptions, argv, prog="python -m dflash_jax.benchmark", description=DESCRIPTION)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    return exit_status(lambda: _measured(options))


def _measured(options: BenchmarkOptions) -> int:
    if options.json:
        files.check_writable(Path(options.json))
    if options.plot:
        _check_plot(options)
    figures = measure(options)
    if options.json:  # before all else that may fail
        files.write_json(Path(options.json), figures)
    print(_shown(options, figures))
    if options.plot:
        _plot(options, figures)
    if wrong := _wrong(options, figures):
        print(f"error: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def _shown(options: BenchmarkOptions, figures: dict[str, Any]) -> str:
    """The figures as text."""
    if options.drafters:
        from dflash_jax.benchmarks.drafters import markdown

        lines = [f"{name}: {one['step_gb']:.2f} GB a step" for name, one in figures["qwen3_8b"].items()]
        cells = markdown(figures["cells"], figures["steps"])
        return "\n".join([cells, "", "on a Qwen3-8B in bfloat16, batch 1", *lines])
    from dflash_jax.benchmarks.sweep import sweep_table
    from dflash_jax.benchmarks.tables import job_table, table

    if not options.sweep:
        return job_table(figures) if options.jobs else table(figures)

    return sweep_table(figures["sweep"], "autoregressive")


def _check_plot(options: BenchmarkOptions) -> None:
    """Raises ValueError or OSError if `_plot` could not draw."""
    from dflash_jax.benchmarks.plots import check_plot

    if not options.sweep and not options.drafters:
        raise ValueError("--plot needs --sweep or --drafters, whose figures it draws")
    assert options.plot
    check_plot(options.plot)


def _plot(options: BenchmarkOptions, figures: dict[str, Any]) -> None:
    from dflash_jax.benchmarks.plots import plot_drafters, plot_sweep

    assert options.plot
    if options.drafters:
        plot_drafters(figures["cells"], figures["steps"], options.plot)
    else:
        plot_sweep(figures["sweep"], options.plot)


def _wrong(options: BenchmarkOptions, figures: dict[str, Any]) -> str | None:
    """What the figures prove to be wrong."""
    from dflash_jax.benchmarks.drafters import unequal

    return unequal(figures) if options.drafters else None


def measure(options: BenchmarkOptions) -> dict[str, Any]:
    """Runs everything; see `benchmarks.tables` for what the figures mean."""
    if options.drafters:
        from dflash_jax.benchmarks.drafters import measure_drafters

        return measure_drafters(options, questions)
    if len(options.generation.temperature) > 1 or options.tasks:
        raise ValueError("several temperatures and --tasks are for --drafters")
    generation = options.generation.at(options.generation.temperature[0])
    if options.official and (generation.temperature > 0 or (generation.batch_size != 1 and not options.jobs)):
        raise ValueError("--official compares greedy decoding at batch size 1 only")
    source, draft_source = pair_sources(options.models)
    if not draft_source:
        raise ValueError("--drafter is needed: benchmark compares decoding with it and without")
    dataset = options.dataset or ("gsm8k" if options.models.target else "problems")
    samples, is_correct = questions(dataset, options.max_samples)
    if options.sweep and (options.jobs or options.official):
        raise ValueError("--sweep is a measurement of its own; leave --jobs and --official out")
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs needs at least one round, got {options.jobs}")
    loaded = load(replace(options.models, target=source, drafter=draft_source), generation)
    text = loaded.text
    if options.untrained and loaded.drafter:
        loaded = loaded._replace(drafter=untrained(loaded.drafter))
    from dflash_jax.infer.requests import Request

    prompts = [
        text.encode_chat([{"role": "user", "content": question}]) if text.has_chat_template else text.encode(question)
        for question in (sample.turns[0] for sample in samples)
    ]
    requests = [Request(prompt, loaded.defaults, id=str(i)) for i, prompt in enumerate(prompts)]
    settings = {
        "dataset": dataset,
        "samples": len(requests),
        "temperature": generation.temperature,
        "batch_size": generation.batch_size,
        "max_new_tokens": generation.max_new_tokens,
        "chat_template_kwargs": text.template_arguments,
    }
    official = None
    if options.official:
        from dflash_jax.benchmarks.official import Official

        assert draft_source
        official = Official(loaded.target.directory, draft_source)
    if options.sweep:
        return settings | {"sweep": _sweep(options.sweep, loaded, generation, options.seed, requests)}
    if options.jobs:
        return settings | _jobs(options.jobs, loaded, generation, options.seed, requests, official)
    engines = {
        "autoregressive": _engine(loaded, generation, options.seed, requests, speculative=False),
        "speculative": _engine(loaded, generation, options.seed, requests),
    }
    for name, changed in _variants(generation).items():
        engines[name] = _engine(loaded, changed, options.seed, requests)
    if engines["speculative"].drafter is None:
        raise ValueError(f"--block-size {generation.block_size} proposes nothing; choose a larger one to compare")
    from dflash_jax.benchmarks.compare import compare
    from dflash_jax.infer.chooser import Draft

    length = sum(map(len, prompts)) // len(prompts) + generation.max_new_tokens // 2
    figures, answers = compare(engines, requests, official, length)
    if is_correct is not None:
        figures["correct"] = {
            name: sum(is_correct(i, text.decode(done.token_ids) or "") for i, done in enumerate(side))
            for name, side in answers.items()
        }
    categories = [sample.category for sample in samples]
    if any(categories):
        figures["acceptance_by_category"] = by_category(categories, answers["speculative"])
    ours = engines["speculative"]
    draft = Draft(ours.block_size, ours.tree)
    return {**settings, "block_size": draft.block_size, "tree": draft.nodes, "draft": draft.label, **figures}


def _variants(generation: GenerationOptions) -> dict[str, GenerationOptions]:
    """Other ways to propose, whose tau is compared with what was asked for."""
    kinds = ("argmax", "coupled") if generation.temperature > 0 else ()
    changed = {f"{kind}_proposals": replace(generation, proposals=kind) for kind in kinds}
    if generation.tree:
        chain = replace(generation, tree=0)
        changed["chain"] = chain
        changed |= {f"chain_{kind}_proposals": replace(chain, proposals=kind) for kind in kinds}
    asked = (generation.proposals, generation.tree)
    return {name: each for name, each in changed.items() if (each.proposals, each.tree) != asked}


def _engine(
    loaded: Loaded, generation: GenerationOptions, seed: int, requests: "Sequence[Request]", *, speculative: bool = True
) -> "Engine":
    options, loaded = EngineOptions(seed=seed), loaded if speculative else loaded._replace(drafter=None)
    return engine_for(loaded, needs_of(loaded.target.config, requests, options), generation, options)


def _jobs(
    rounds: int,
    loaded: Loaded,
    generation: GenerationOptions,
    seed: int,
    requests: "Sequence[Request]",
    official: "Official | None",
) -> dict[str, Any]:
    """The figures of `--jobs`."""
    from dflash_jax.benchmarks.compare import compare_jobs
    from dflash_jax.infer.chooser import Chooser, Draft, block_sizes

    assert loaded.drafter is not None
    most, one = loaded.drafter.config.block_size, generation.block_size

    def engine(size: BlockSize, **changes: Any) -> "Engine":
        changed = replace(generation, block_size=size, **changes)
        return _engine(loaded, changed, seed, requests, speculative=size != 1)

    sizes: tuple[BlockSize, ...] = (*block_sizes(most), "auto") if one is None else (1, one)
    names: dict[BlockSize, str] = {1: "autoregressive", "auto": "auto"}
    engines = {names.get(size, f"block {size}"): engine(size) for size in sizes}
    if generation.batch_size > 1 and one is None:
        engines["one at a time, autoregressive"] = engine(1, batch_size=1)
        engines["one at a time"] = engine(most, batch_size=1)
    if one == "auto":  # what `auto` pays for being able to speculate, where speculation does not pay
        kept = engines["draft state kept, unused"] = engine("auto")
        kept.warm_up()
        kept.choosers = {width: Chooser({Draft(1): 1.0}, lambda draft: 0) for width in kept.choosers}
    return {"rounds": rounds, "engines": compare_jobs(engines, requests, rounds, official, most)}


def _sweep(
    concurrencies: Sequence[int],
    loaded: Loaded,
    generation: GenerationOptions,
    seed: int,
    requests: "Sequence[Request]",
) -> list[dict[str, Any]]:
    """The figures of `--sweep`. Nothing is kept of one prompt for another: who comes second would be faster."""
    from dflash_jax.benchmarks.sweep import sweep

    assert loaded.drafter is not None
    size = loaded.drafter.config.block_size if generation.block_size in (None, "auto") else generation.block_size
    options = EngineOptions(seed=seed, prefix_chunks=0)
    needs = needs_of(loaded.target.config, requests, options)

    def engines(concurrency: int) -> "dict[str, Engine]":
        def engine(block_size: BlockSize) -> "Engine":
            changed = replace(generation, block_size=block_size, batch_size=concurrency)
            pair = loaded._replace(drafter=None) if block_size == 1 else loaded
            return engine_for(pair, needs, changed, options)

        return {"autoregressive": engine(1), f"block {size}": engine(size), "auto": engine("auto")}

    return sweep(engines, requests, concurrencies)


def by_category(categories: Sequence[str], answers: "Sequence[Completion]") -> dict[str, dict[str, Any]]:
    """Samples and mean acceptance length of each kind of task."""
    found: dict[str, dict[str, Any]] = {}
    for category in sorted(set(categories)):
        own = [answer for answer, its in zip(answers, categories, strict=True) if its == category]
        lengths = [n for answer in own for n in answer.acceptance_lengths]
        found[category] = {"samples": len(own), "tau": sum(lengths) / len(lengths) if lengths else None}
    return found


def untrained(drafter: "Drafter") -> "Drafter":
    """The drafter with random weights in the place of its matrices."""
    import jax

    leaves, tree = jax.tree.flatten(drafter.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = lambda x, key: jax.random.normal(key, x.shape, x.dtype) / x.shape[-1] ** 0.5 if x.ndim > 1 else x
    return drafter.replace(params=jax.tree.unflatten(tree, map(noise, leaves, keys)))


def questions(dataset: str, count: int) -> "tuple[list[Sample], Callable[[int, str], bool] | None]":
    """Samples of a dataset, and, for made problems, whether a text answers the i-th."""
    from dflash_jax.data.datasets import Sample, load_dataset

    if dataset != "problems":
        return load_dataset(dataset, count), None
    from dflash_jax.data.problems import is_correct, problems

    if count < 1:
        raise ValueError(f"max_samples must be at least 1, got {count}")
    chosen = list(islice(problems(PROBLEM_SEED, held_out=True), count))
    return [Sample([problem.question]) for problem in chosen], lambda i, text: is_correct(chosen[i], text)


if __name__ == "__main__":
    exit_quietly(main())
