"""The options of `python -m dflash_jax.train STAGE ...`."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from tyro.conf import arg, subcommand

from dflash_jax.cli import (
    EngineOptions,
    GenerationOptions,
    Kernels,
    NamedModelOptions,
    Overrides,
    Quantization,
    TemplateArguments,
    optional,
    parsed,
)
from dflash_jax.parsing import parse
from dflash_jax.train.config import TrainConfig, setting, setting_fields

DESCRIPTION = """\
Trains a drafter for a target.

  stages
    regenerate      the target answers prompts itself    prompts -> answers.jsonl
    cache-features  writes its features once (optional)  answers.jsonl -> features/
    fit             trains; continues a run it finds     answers.jsonl -> run/
    evaluate        tau and speedup by real decoding     run/ or drafter, prompts
    export          a Hugging Face directory             run/ -> drafter/
    push            uploads it to the hub                drafter/ -> OWNER/NAME
    plot            loss and tau over the steps          run/ -> plot.png
    pair            the bundled pair, from text on       nothing -> directory/pair/
    ablate          the paper's ablations on that pair   directory/ -> results.jsonl

  examples      regenerate --target DIR --input prompts.jsonl --output answers.jsonl
                fit --target DIR --data answers.jsonl --output run
                export --run run --output drafter

  exit status   0 done, 1 stopped by an infinite loss, or (regenerate) some line has
                an error record; what is done is kept. 2 unusable arguments or
                files, 130 interrupted
"""
# What `--help` shows of the options.
COMMON = frozenset(
    "target drafter data input output run prompts evaluate_prompts init_from config learning_rate epochs batch_size "
    "block_size num_layers length max_new_tokens temperature max_samples features step dtype mesh plot pair rows steps "
    "samples tensorboard tracker license data_name format repo private".split()
)
NOT_GIVEN: Any = object()  # None is a value of settings
Directory = Annotated[str, arg(metavar="DIR")]
JsonLines = Annotated[str, arg(metavar="FILE.jsonl")]


def _setting(name: str) -> Callable[[list[str]], Any]:
    def read(given: list[str]) -> Any:
        import yaml

        values = [yaml.safe_load(word) for word in given]
        return setting(name, values[0] if len(values) == 1 else values)

    return read


def settings_class() -> type:
    """A dataclass with a field for every setting, NOT_GIVEN unless its flag is there; those of the kinds of drafters
    among them, if these are imported."""
    kinds = sys.modules.get("dflash_jax.drafters")
    made, documents = [], [f"    {inspect.cleandoc(TrainConfig.__doc__ or '')}".replace("\n", "\n    ")]
    for kind in kinds.KINDS.values() if kinds else ():
        of_kind = inspect.cleandoc(kind.settings.__doc__ or "").partition("Attributes:\n")[2].splitlines()
        marked = (re.sub(r"^(    \w+: )", rf"\1of {kind.name}: ", line) for line in of_kind)
        documents.append("".join(f"\n    {line}" for line in marked))
    for known in setting_fields(kinds is not None).values():
        hint = "" if known.default in ((), None) else f"(default: {known.default})"
        shown = "|".join(get_args(known.type)) if get_origin(known.type) is Literal else "X"
        if known.name == "drafter" and kinds:
            shown = "|".join(kinds.KINDS)
        read = parsed(_setting(known.name), shown, "*" if known.default == () else 1)
        made.append((known.name, Annotated[Any, read, arg(help_behavior_hint=hint)], field(default=NOT_GIVEN)))
    text = "".join(documents).replace("What `fit` does.", "The paper's recipe by default; flags override --config.")
    return make_dataclass("Settings", made, frozen=True, namespace={"__doc__": text, "__module__": __name__})


SETTINGS = arg(constructor_factory=settings_class)


def settings_given(settings: Any) -> dict[str, Any]:
    """Those that stand on the command line."""
    return {name: value for name, value in vars(settings).items() if value is not NOT_GIVEN}


def _distributed(given: list[str]) -> str:
    if len(given) > 1:
        raise ValueError(f"takes one HOST:PORT,I/N, got {' '.join(given)}")
    return given[0] if given else ""


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and where.

    Attributes:
        target: target checkpoint
        data: made by regenerate
        config: YAML or JSON of settings
        mesh: devices, like data=2,model=4 (axes data, fsdp, model, expert; -1 is the rest); auto: rows and parameters
            over all of them
        distributed: this is process I (from 0) of N that train together, with the first at HOST:PORT; without a value
            as the environment says (TPU pods, Slurm)
        init_from: begin with this drafter, which `export` wrote or others published
        target_config: fields of the target's config.json to replace, a JSON object
        drafter_config: fields to replace in the config.json of the drafter to begin with
        quantize: quantise the target as it is loaded, like target=int8,head=int8, for a drafter of the quantised target
        kernels: which implementation of the kernels runs; auto checks each Pallas kernel against XLA at its first use
            (also DFLASH_KERNELS)
    """

    target: Annotated[str, arg(metavar="DIR|FILE.gguf|ID")]
    data: JsonLines
    config: Annotated[str | None, optional(str, "FILE")] = None
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    distributed: Annotated[str | None, parsed(_distributed, "[HOST:PORT,I/N]", "*"), arg(help_behavior_hint="")] = None
    init_from: Annotated[str | None, optional(str, "DIR|ID")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    quantize: Quantization = field(default_factory=dict)
    kernels: Kernels = None


@dataclass(frozen=True)
class RegenerateOptions:
    """Options of `regenerate`.

    Attributes:
        input: a plain file of JSON lines, in every form `serve` takes; or gsm8k, the training questions of
            that set from the hub
        output: answers; continued if it exists
    """

    input: Annotated[str, arg(metavar="FILE.jsonl|gsm8k")]
    output: JsonLines
    models: NamedModelOptions
    generation: GenerationOptions = field(default_factory=lambda: GenerationOptions(max_new_tokens=2048))
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class CacheFeaturesOptions:
    """Options of `cache-features`.

    Attributes:
        output: feature cache; continued if it is there
        hidden: also the target's last hidden states, which --kl, --total-variation, --negative-log-acceptance and
            --lk-hybrid need
    """

    output: Directory
    source: DataOptions
    hidden: bool = False
    settings: Annotated[Any, SETTINGS] = field(default_factory=lambda: settings_class()())


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit`.

    Attributes:
        output: the run; continued if it is there
        features: a feature cache, instead of computing features online
        evaluate_prompts: held-out prompts; decoded to choose `best`
        chat_template_kwargs: of --evaluate-prompts: arguments of the chat template, a JSON object
        tensorboard: also log there
        tracker: also log to a tracker of experiments, if it is installed
    """

    output: Directory
    source: DataOptions
    features: Annotated[str | None, optional(str, "DIR")] = None
    evaluate_prompts: Annotated[str | None, optional(str, "FILE.jsonl")] = None
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    tensorboard: Annotated[str | None, optional(str, "DIR")] = None
    tracker: Annotated[Literal["wandb", "trackio"] | None, arg(metavar="wandb|trackio", help_behavior_hint="")] = None
    settings: Annotated[Any, SETTINGS] = field(default_factory=lambda: settings_class()())


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `evaluate`.

    Attributes:
        prompts: held-out prompts
        run: a run's `best`, else its newest checkpoint, instead of --drafter
        step: a checkpoint of the run instead
        max_samples: the first so many prompts
        json: write all figures
        store_sharpness: store the learnt sharpness of proposals in config.json of --drafter; needs held-out prompts and
            a --temperature
    """

    prompts: JsonLines
    models: NamedModelOptions
    run: Annotated[str | None, optional(str, "DIR")] = None
    step: Annotated[int | None, optional(int, "N")] = None
    max_samples: Annotated[int | None, optional(int, "N")] = None
    json: Annotated[str | None, optional(str, "FILE")] = None
    store_sharpness: bool = False
    generation: GenerationOptions = field(default_factory=GenerationOptions)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        run: made by fit
        output: a new directory
        step: checkpoint
        dtype: float32, bfloat16 or float16
        license: for the model card, as the hub names licenses, such as apache-2.0
        data_name: for the model card: what it was trained on
        format: layout of its files: that of the published drafters of z-lab, or of the speculators library
    """

    run: Directory
    output: Directory
    step: Annotated[int | None, optional(int, "N", "`best` if the run was evaluated, else newest")] = None
    dtype: str = "bfloat16"
    license: Annotated[str | None, optional(str, "NAME")] = None
    data_name: Annotated[str | None, optional(str, "TEXT")] = None
    format: Annotated[Literal["z-lab", "speculators"], arg(metavar="z-lab|speculators")] = "z-lab"


@dataclass(frozen=True)
class PushOptions:
    """Options of `push`.

    Attributes:
        drafter: written by export
        repo: repository of the hub, which is made if it is not there
        private: if it is made, others cannot see it
    """

    drafter: Directory
    repo: Annotated[str, arg(metavar="OWNER/NAME")]
    private: bool = False


@dataclass(frozen=True)
class PlotOptions:
    """Options of `plot`.

    Attributes:
        run: made by fit
        output: the picture
    """

    run: Directory
    output: Annotated[str, arg(metavar="FILE.png")]


@dataclass(frozen=True)
class PairOptions:
    """Options of `pair`.

    Attributes:
        output: all stages' results; continued if it is there
    """

    output: Directory


@dataclass(frozen=True)
class AblateOptions:
    """Options of `ablate`.

    Attributes:
        output: runs and results.jsonl; continued if it is there
        pair: made by pair
        rows: names of rows, in quotes
        steps: of each row
        samples: held-out problems to decode
        plot: draw tau of all rows that are done
    """

    output: Directory
    pair: Annotated[str | None, optional(str, "DIR", "the bundled pair, whose answers are made first")] = None
    rows: Annotated[str | None, optional(str, "A;B", "all")] = None
    steps: int = 300
    samples: int = 64
    plot: Annotated[str | None, optional(str, "FILE.svg")] = None


Stage = (
    Annotated[RegenerateOptions, subcommand("regenerate", description="answer prompts with the target")]
    | Annotated[CacheFeaturesOptions, subcommand("cache-features", description="write the target's features once")]
    | Annotated[FitOptions, subcommand("fit", description="train, or continue a run")]
    | Annotated[EvaluateOptions, subcommand("evaluate", description="decode held-out prompts")]
    | Annotated[
        ExportOptions,
        subcommand("export", description="write a drafter directory for this package and the official dflash package"),
    ]
    | Annotated[PushOptions, subcommand("push", description="upload an exported drafter to the Hugging Face hub")]
    | Annotated[PlotOptions, subcommand("plot", description="draw loss and tau")]
    | Annotated[PairOptions, subcommand("pair", description="make the bundled pair")]
    | Annotated[AblateOptions, subcommand("ablate", description="train and decode one drafter per row of the table")]
)


def parse_stage(argv: Sequence[str] | None = None, prog: str = "python -m dflash_jax.train") -> Any:
    """The options of a stage, an instance of the class that is its name."""
    words: Sequence[str] = sys.argv[1:] if argv is None else argv
    stages: Any = Stage
    if words[:1] and words[0] in ("fit", "cache-features"):
        importlib.import_module("dflash_jax.drafters")  # for the flags of its kinds; the other stages start faster
    return parse(stages, argv, prog=prog, description=DESCRIPTION, common=COMMON)
