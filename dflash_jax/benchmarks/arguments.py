"""The options of `python -m dflash_jax.benchmark MODE ...` and of `python -m dflash_jax.plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Suppress, arg, subcommand

from dflash_jax.cli import GENERATION, MODEL, GenerationOptions, ModelOptions, Overrides, Quantization, optional, parsed

Figures = dict[str, Any]  # what is measured or planned, as it is written to a JSON file
Plot = Annotated[Path | None, optional(Path, "FILE.svg")]


def _numbers(kind: type[int] | type[float], least: int) -> Callable[[Sequence[str]], tuple[float, ...]]:
    def read(given: Sequence[str]) -> tuple[float, ...]:
        try:
            numbers = tuple(map(kind, given[0].split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(least <= number < float("inf") for number in numbers):
            raise ValueError(f"must be numbers of at least {least} like {least},2,4, got {given[0]!r:.60}")
        return numbers

    return read


def _named(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = [pair.partition("=") for pair in given[0].split(",")]
    names = [name for name, _, source in pairs if name and source]
    if len(set(names)) != len(pairs):
        raise ValueError(f"must be different names of drafters like a=DIR,b=DIR, got {given[0]!r:.80}")
    return tuple((name, source) for name, _, source in pairs)


@dataclass(frozen=True)
class BenchmarkModels(ModelOptions):
    """Models and devices.

    Attributes:
        target: target model: a directory, a GGUF file of the Llama family, or a Hugging Face id
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", "the bundled pair")] = None


@dataclass(frozen=True)
class BenchmarkTarget(BenchmarkModels):
    """Model and devices; the drafters are those of --drafters."""

    drafter: Suppress[str | None] = field(default=None, init=False)


@dataclass(frozen=True)
class GenerationAtAnyTemperature(GenerationOptions):
    """Sampling, draft length and number of concurrent requests, at each --temperature."""

    temperature: Suppress[float] = field(default=0.0, init=False)

    def at(self, temperature: float) -> GenerationOptions:
        """These options with a temperature."""
        given: dict[str, Any] = vars(self) | {"temperature": temperature}
        return GenerationOptions(**given)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What all modes of `python -m dflash_jax.benchmark` share.

    Attributes:
        dataset: problems (held out from the bundled pair, and its default), gsm8k (default for other targets), math500,
            aime25, humaneval, mbpp, livecodebench, mt-bench or a local FILE.jsonl
        max_samples: number of prompts, after the official shuffle
        json: write all results
        seed: random seed
    """

    dataset: Annotated[str | None, optional(str, "NAME|FILE.jsonl")] = None
    max_samples: int = 24
    json: Annotated[str | None, optional(str, "FILE")] = None
    seed: Annotated[int, arg(metavar="N")] = 0
    models: Annotated[BenchmarkModels, MODEL] = field(default_factory=BenchmarkModels)

    @property
    def questions(self) -> str:
        """The name of the dataset."""
        return self.dataset or ("gsm8k" if self.models.target else "problems")


@dataclass(frozen=True, kw_only=True)
class PairOptions(MeasureOptions):
    """What the modes share that measure one pair.

    Attributes:
        untrained: use a drafter with random weights, none of whose tokens is accepted: the overhead of speculation
    """

    untrained: bool = False
    generation: Annotated[GenerationOptions, GENERATION] = field(default_factory=GenerationOptions)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PairOptions):
    """Speedup, tau (mean accepted length) and time of a decoding step, with and without a drafter.

    Attributes:
        official: also run the authors' PyTorch implementation (greedy, batch size 1, CPU)
    """

    official: bool = False


@dataclass(frozen=True, kw_only=True)
class JobsOptions(CompareOptions):
    """Whole jobs, prefill included: without speculation, with each block size, with auto, and one prompt at a time.
    Given --block-size N: without speculation, and N. Given --block-size auto: without speculation, auto, and without
    speculation while the cache of the drafter is kept up to date.

    Attributes:
        rounds: how often all prompts are answered
    """

    rounds: Annotated[int, arg(metavar="N")] = 2


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PairOptions):
    """Throughput by the number of concurrent requests: without speculation, with the block size and with auto.

    Attributes:
        concurrency: numbers of concurrent requests
        plot: plot tokens per second against tokens per second and user (a file type that matplotlib can write)
    """

    concurrency: Annotated[
        tuple[int, ...], parsed(_numbers(int, 1), "N[,N...]"), arg(help_behavior_hint="(default: 1,2,4,8)")
    ] = (1, 2, 4, 8)
    plot: Plot = None


@dataclass(frozen=True, kw_only=True)
class DraftersOptions(MeasureOptions):
    """Compares drafters of one target: tau, speedup, time and memory traffic of a step, on each of the --tasks, at
    each --temperature.

    Attributes:
        drafters: names and checkpoints of the drafters; ngram and module:Name are understood as in --drafter
        tasks: datasets, like gsm8k,mt-bench (default: the one of --dataset)
        temperature: sampling temperatures, measured one after another; 0 is greedy
        rounds: how often all prompts are answered
        plot: plot speedup, acceptance by position, and tau against draft time (a file type that matplotlib can write)
    """

    drafters: Annotated[tuple[tuple[str, str], ...], parsed(_named, "NAME=DIR,...")]
    tasks: Annotated[str | None, optional(str, "NAME,...")] = None
    temperature: Annotated[
        tuple[float, ...], parsed(_numbers(float, 0), "T[,T...]"), arg(help_behavior_hint="(default: 0)")
    ] = (0.0,)
    rounds: Annotated[int, arg(metavar="N")] = 2
    plot: Plot = None
    models: Annotated[BenchmarkTarget, MODEL] = field(default_factory=BenchmarkTarget)
    generation: Annotated[GenerationAtAnyTemperature, GENERATION] = field(default_factory=GenerationAtAnyTemperature)


Mode = (
    Annotated[CompareOptions, subcommand("compare")]
    | Annotated[JobsOptions, subcommand("jobs")]
    | Annotated[SweepOptions, subcommand("sweep")]
    | Annotated[DraftersOptions, subcommand("drafters")]
)


@dataclass(frozen=True)
class PlanOptions:
    """Memory, operations, communication and least time of a step, per device.

    Attributes:
        target: a name such as qwen3-8b (an unknown one lists all), a config.json or its directory
        topology: TPU slice, like v5e-4 or v5e:2x2, or GPU and number, like h100:4
        drafter: a config.json or its directory
        target_config: fields of the target's config.json to override, a JSON object
        drafter_config: fields of the drafter's config.json to override
        quantize: weights that are quantized while loading, like target=int8,drafter=int8,head=int8 (see serve)
        mesh: device mesh, like data=2,model=4 (see serve)
        batch_size: concurrent sequences; with --training, packed sequences per step
        max_length: maximum length of a sequence in tokens; with --training, of a packed one
        cache_tokens: size of the KV cache in tokens, which all sequences share in pages (see serve)
        block_size: draft length plus 1
        tree: nodes of a draft tree to verify instead of a chain; also says which trees cost no time
        cache_dtype: int8 keeps the target's KV cache in 8 bits (see serve)
        draft_window: window of the drafter's attention in tokens, besides the first 128 (see serve)
        verify_budget: draft positions to verify in a step, per sequence on average (see serve); 0 is all
        prefill_budget: tokens of prompts that a step also reads (see serve)
        parts: also compile draft, verify (also of one token), accept and cache update by themselves, for their memory
            traffic
        tau: accepted tokens per step, the bonus token included
        training: plan a training step of the drafter instead
        row_anchors: draft blocks per packed sequence, for --training
        tokens: tokens of the training data, for the hours of an epoch
        largest: also find the largest batch and the longest sequences that fit, for --training (compiles about ten
            programs)
        json: write the results
    """

    target: Annotated[str, arg(metavar="CONFIG")]
    topology: Annotated[str, arg(metavar="CHIP:SHAPE")]
    drafter: Annotated[str | None, optional(str, "CONFIG", "the published one, if the target is given by name")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    quantize: Quantization = field(default_factory=dict)
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    batch_size: int = 8
    max_length: int = 8192
    cache_tokens: Annotated[int | None, optional(int, "N", "--max-length per sequence")] = None
    block_size: Annotated[int | None, optional(int, "N", "the drafter's")] = None
    tree: int = 0
    cache_dtype: Literal["auto", "int8"] = "auto"
    draft_window: Annotated[int | None, optional(int, "N", "all")] = None
    verify_budget: int = 0
    prefill_budget: int = 0
    parts: bool = False
    tau: float = 6.49
    training: bool = False
    row_anchors: int = 512
    tokens: int = 0
    largest: bool = False
    json: Annotated[Path | None, optional(Path, "FILE")] = None
