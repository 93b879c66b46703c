"""The options of `python -m dflash_jax.benchmark MODE ...` and of `python -m dflash_jax.plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg, subcommand

from dflash_jax.cli import GenerationOptions, ModelOptions, Overrides, Quantization, optional, parsed

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
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", "the bundled pair")] = None


@dataclass(frozen=True)
class BenchmarkTarget(BenchmarkModels):
    """The target, and where it runs; its drafters have an option of their own."""

    drafter: str | None = field(default=None, init=False)


@dataclass(frozen=True)
class GenerationAtAnyTemperature(GenerationOptions):
    """How answers are generated; temperatures have an option of their own."""

    temperature: float = field(default=0.0, init=False)

    def at(self, temperature: float) -> GenerationOptions:
        """These options with a temperature."""
        given: dict[str, Any] = vars(self) | {"temperature": temperature}
        return GenerationOptions(**given)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What all modes of `python -m dflash_jax.benchmark` share.

    Attributes:
        dataset: problems (held-out ones of the bundled pair, and its default), gsm8k (default for other targets),
            math500, aime25, humaneval, mbpp, livecodebench, mt-bench or a local FILE.jsonl
        max_samples: prompts, after the official shuffle
        json: write all figures
        seed: sampling noise
    """

    dataset: Annotated[str | None, optional(str, "NAME|FILE.jsonl")] = None
    max_samples: int = 24
    json: Annotated[str | None, optional(str, "FILE")] = None
    seed: Annotated[int, arg(metavar="N")] = 0
    models: BenchmarkModels = field(default_factory=BenchmarkModels)

    @property
    def questions(self) -> str:
        """The name of the dataset."""
        return self.dataset or ("gsm8k" if self.models.target else "problems")


@dataclass(frozen=True, kw_only=True)
class PairOptions(MeasureOptions):
    """What the modes share that measure one pair.

    Attributes:
        untrained: random weights in the drafter's place: nothing it proposes is right
    """

    untrained: bool = False
    generation: GenerationOptions = field(default_factory=GenerationOptions)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PairOptions):
    """Speedup, tau and the cost of a step of a pair.

    Attributes:
        official: also run the official torch implementation (greedy, batch 1, CPU)
    """

    official: bool = False


@dataclass(frozen=True, kw_only=True)
class JobsOptions(CompareOptions):
    """Whole jobs, prefill included: plain decoding, each block size, auto, and one prompt at a time. With --block-size
    N: only plain decoding and N. With --block-size auto: plain decoding, auto, and plain decoding that keeps the
    drafter's state up to date.

    Attributes:
        rounds: how often all prompts are answered
    """

    rounds: Annotated[int, arg(metavar="N")] = 2


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PairOptions):
    """So many requests at the same time: plain decoding, the block size and auto, at each number.

    Attributes:
        concurrency: the numbers
        plot: tokens per second against tokens per second and user (a file that matplotlib can write)
    """

    concurrency: Annotated[
        tuple[int, ...], parsed(_numbers(int, 1), "N[,N...]"), arg(help_behavior_hint="(default: 1,2,4,8)")
    ] = (1, 2, 4, 8)
    plot: Plot = None


@dataclass(frozen=True, kw_only=True)
class DraftersOptions(MeasureOptions):
    """Drafters of one target side by side: tau, speedup, times and bytes of a step, on each of the --tasks at each
    --temperature.

    Attributes:
        drafters: their names and checkpoints
        tasks: datasets, like gsm8k,mt-bench (default: the one of --dataset)
        temperature: 0 is greedy; several are measured one after another
        rounds: how often all prompts are answered
        plot: speedups, acceptance by position, and tau over the time of a draft (a file that matplotlib can write)
    """

    drafters: Annotated[tuple[tuple[str, str], ...], parsed(_named, "NAME=DIR,...")]
    tasks: Annotated[str | None, optional(str, "NAME,...")] = None
    temperature: Annotated[
        tuple[float, ...], parsed(_numbers(float, 0), "T[,T...]"), arg(help_behavior_hint="(default: 0)")
    ] = (0.0,)
    rounds: Annotated[int, arg(metavar="N")] = 2
    plot: Plot = None
    models: BenchmarkTarget = field(default_factory=BenchmarkTarget)
    generation: GenerationAtAnyTemperature = field(default_factory=GenerationAtAnyTemperature)


Mode = (
    Annotated[CompareOptions, subcommand("compare")]
    | Annotated[JobsOptions, subcommand("jobs")]
    | Annotated[SweepOptions, subcommand("sweep")]
    | Annotated[DraftersOptions, subcommand("drafters")]
)


@dataclass(frozen=True)
class PlanOptions:
    """Memory, operations, collectives and the least time of a step, per device.

    Attributes:
        target: a name such as qwen3-8b (an unknown one lists all), config.json or its folder
        topology: TPU, like v5e-4 or v5e:2x2, or GPU and number, like h100:4
        drafter: config.json or its folder
        target_config: fields of the target's config.json to replace, a JSON object
        drafter_config: fields of the drafter's config.json to replace
        quantize: what is quantised as it is loaded, like target=int8,drafter=int8,head=int8 (see serve)
        mesh: like data=2,model=4 (see serve)
        batch_size: rows; of training, packed rows of a step
        max_length: tokens of a row
        cache_tokens: tokens that all rows hold together, in pages that they share (see serve)
        block_size: positions of a block, the anchor included
        tree: nodes of a tree that is verified instead of a chain; also says which trees cost no time
        cache_dtype: int8 keeps the target's keys and values in 8 bits (see serve)
        draft_window: positions that the drafter sees, the last ones, besides the first 128 (see serve)
        verify_budget: positions that are verified of a row on average, the likeliest of all rows (see serve); 0 is all
        parts: also compile draft, verify (also of one token), accept and commit, each alone, for the bytes they move
        tau: tokens a step commits
        training: the training step of the drafter instead
        row_anchors: blocks of a packed row, for --training
        tokens: tokens of the training data, for the hours that an epoch takes
        largest: also find the most rows and the longest rows that fit, for --training (compiles ten programs or so)
        json: write the figures, too
    """

    target: Annotated[str, arg(metavar="CONFIG")]
    topology: Annotated[str, arg(metavar="CHIP:SHAPE")]
    drafter: Annotated[str | None, optional(str, "CONFIG", "the published one of a target given by name")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    quantize: Quantization = field(default_factory=dict)
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    batch_size: int = 8
    max_length: int = 8192
    cache_tokens: Annotated[int | None, optional(int, "N", "--max-length for each row")] = None
    block_size: Annotated[int | None, optional(int, "N", "the drafter's")] = None
    tree: int = 0
    cache_dtype: Literal["auto", "int8"] = "auto"
    draft_window: Annotated[int | None, optional(int, "N", "all")] = None
    verify_budget: int = 0
    parts: bool = False
    tau: float = 6.49
    training: bool = False
    row_anchors: int = 512
    tokens: int = 0
    largest: bool = False
    json: Annotated[Path | None, optional(Path, "FILE")] = None
