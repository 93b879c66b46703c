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
    ENGINE,
    GENERATION,
    MODEL,
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
    regenerate      let the target answer prompts        prompts -> answers.jsonl
    cache-features  compute its features once (optional) answers.jsonl -> features/
    fit             train, or continue a run             answers.jsonl -> run/
    evaluate        tau and speedup on held-out prompts  run/ or drafter, prompts
    export          write a Hugging Face directory       run/ -> drafter/
    push            upload it to the hub                 drafter/ -> OWNER/NAME
    plot            loss and tau over the steps          run/ -> plot.png
    pair            the bundled pair, from scratch       nothing -> directory/pair/
    ablate          the paper's ablations on that pair   directory/ -> results.jsonl

  examples      regenerate --target DIR --input prompts.jsonl --output answers.jsonl
                fit --target DIR --data answers.jsonl --output run
                export --run run --output drafter

  exit status   0 done, 1 stopped by an infinite loss, or (regenerate) some line has
                an error record; what is done is kept, 2 unusable arguments or
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


SETTINGS = arg(constructor_factory=settings_class, name="training")


def settings_given(settings: Any) -> dict[str, Any]:
    """Those that stand on the command line."""
    return {name: value for name, value in vars(settings).items() if value is not NOT_GIVEN}


def _distributed(given: list[str]) -> str:
    if len(given) > 1:
        raise ValueError(f"takes one HOST:PORT,I/N, got {' '.join(given)}")
    return given[0] if given else ""


@dataclass(frozen=True)
class DataOptions:
    """Training data and target.

    Attributes:
        target: target model: a directory, a GGUF file of the Llama family, or a Hugging Face id
        data: answers, written by regenerate
        config: YAML or JSON file of training options by name
        mesh: device mesh, like data=2,model=4 (axes data, fsdp, model, expert; -1 takes the remaining devices); auto
            splits batches and parameters over all devices
        distributed: run as process I (from 0) of N that train together, with the first at HOST:PORT; detected on TPU
            pods and Slurm if no value is given
        init_from: start from this drafter, written by `export` or published: a directory or a Hugging Face id
        target_config: fields of the target's config.json to override, a JSON object
        drafter_config: fields to override in the config.json of the drafter to start from
        quantize: quantize the target while loading, like target=int8,head=int8, to train for the quantized target
        kernels: kernel implementation; auto checks each Pallas kernel against XLA at its first use. The environment
            variable DFLASH_KERNELS sets it, too
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
        input: prompts, one JSON object per line in any form that `serve` takes, uncompressed; or gsm8k, the training
            questions of that dataset from the hub
        output: answers; an existing file is continued
    """

    input: Annotated[str, arg(metavar="FILE.jsonl|gsm8k")]
    output: JsonLines
    models: Annotated[NamedModelOptions, MODEL]
    generation: Annotated[GenerationOptions, GENERATION] = field(
        default_factory=lambda: GenerationOptions(max_new_tokens=2048)
    )
    engine: Annotated[EngineOptions, ENGINE] = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class CacheFeaturesOptions:
    """Options of `cache-features`.

    Attributes:
        output: feature cache; an existing one is continued
        hidden: also write the target's last hidden states, which all losses but the cross-entropy need (--kl and so on)
    """

    output: Directory
    source: Annotated[DataOptions, arg(name="data and model")]
    hidden: bool = False
    settings: Annotated[Any, SETTINGS] = field(default_factory=lambda: settings_class()())


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit`.

    Attributes:
        output: directory of the run; an existing run is continued
        features: feature cache to read, instead of computing features while training
        evaluate_prompts: held-out prompts, whose tau chooses the checkpoint `best`
        chat_template_kwargs: arguments of the chat template for --evaluate-prompts, a JSON object
        tensorboard: also write TensorBoard logs to this directory
        tracker: also log to this experiment tracker, if it is installed
    """

    output: Directory
    source: Annotated[DataOptions, arg(name="data and model")]
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
        run: evaluate a run's `best` checkpoint, else its newest, instead of --drafter
        step: evaluate the run's checkpoint of this step
        max_samples: number of prompts, from the beginning of the file
        json: write all results
        store_sharpness: store the learned scales of the draft logits in config.json of --drafter; needs held-out
            prompts and a --temperature above 0
    """

    prompts: JsonLines
    models: Annotated[NamedModelOptions, MODEL]
    run: Annotated[str | None, optional(str, "DIR")] = None
    step: Annotated[int | None, optional(int, "N")] = None
    max_samples: Annotated[int | None, optional(int, "N")] = None
    json: Annotated[str | None, optional(str, "FILE")] = None
    store_sharpness: bool = False
    generation: Annotated[GenerationOptions, GENERATION] = field(default_factory=GenerationOptions)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        run: directory of a run of fit
        output: a new directory
        step: checkpoint to export
        dtype: dtype of the weights: float32, bfloat16 or float16
        license: license for the model card, as the hub names it, such as apache-2.0
        data_name: training data, for the model card
        format: layout of its files: that of the published drafters of z-lab, or of the speculators library
    """

    run: Directory
    output: Directory
    step: Annotated[int | None, optional(int, "N", "`best` if the run was evaluated, else the newest")] = None
    dtype: str = "bfloat16"
    license: Annotated[str | None, optional(str, "NAME")] = None
    data_name: Annotated[str | None, optional(str, "TEXT")] = None
    format: Annotated[Literal["z-lab", "speculators"], arg(metavar="z-lab|speculators")] = "z-lab"


@dataclass(frozen=True)
class PushOptions:
    """Options of `push`.

    Attributes:
        drafter: directory written by export
        repo: repository on the hub; created if it does not exist
        private: create a private repository
    """

    drafter: Directory
    repo: Annotated[str, arg(metavar="OWNER/NAME")]
    private: bool = False


@dataclass(frozen=True)
class PlotOptions:
    """Options of `plot`.

    Attributes:
        run: directory of a run of fit
        output: image file
    """

    run: Directory
    output: Annotated[str, arg(metavar="FILE.png")]


@dataclass(frozen=True)
class PairOptions:
    """Options of `pair`.

    Attributes:
        output: directory of the results of all stages; existing ones are continued
    """

    output: Directory


@dataclass(frozen=True)
class AblateOptions:
    """Options of `ablate`.

    Attributes:
        output: directory of the runs and results.jsonl; existing ones are continued
        pair: directory made by pair
        rows: names of ablations, in quotes
        steps: optimizer steps of each ablation
        samples: number of held-out problems to decode
        plot: plot tau of all ablations that are done
    """

    output: Directory
    pair: Annotated[str | None, optional(str, "DIR", "the bundled pair, whose answers are regenerated first")] = None
    rows: Annotated[str | None, optional(str, "A;B", "all")] = None
    steps: int = 300
    samples: int = 64
    plot: Annotated[str | None, optional(str, "FILE.svg")] = None


Stage = (
    Annotated[RegenerateOptions, subcommand("regenerate", description="Answers prompts with the target.")]
    | Annotated[CacheFeaturesOptions, subcommand("cache-features", description="Computes the target's features once.")]
    | Annotated[FitOptions, subcommand("fit", description="Trains a drafter, or continues a run.")]
    | Annotated[
        EvaluateOptions, subcommand("evaluate", description="Tau and speedup of a drafter on held-out prompts.")
    ]
    | Annotated[
        ExportOptions,
        subcommand(
            "export", description="Writes a drafter directory for this package and the authors' dflash package."
        ),
    ]
    | Annotated[PushOptions, subcommand("push", description="Uploads an exported drafter to the Hugging Face hub.")]
    | Annotated[PlotOptions, subcommand("plot", description="Plots loss and tau over the steps.")]
    | Annotated[PairOptions, subcommand("pair", description="Makes the bundled pair from scratch.")]
    | Annotated[AblateOptions, subcommand("ablate", description="Trains and evaluates one drafter per ablation.")]
)


def parse_stage(argv: Sequence[str] | None = None, prog: str = "python -m dflash_jax.train") -> Any:
    """The options of a stage, an instance of the class that is its name."""
    words: Sequence[str] = sys.argv[1:] if argv is None else argv
    stages: Any = Stage
    if words[:1] and words[0] in ("fit", "cache-features"):
        importlib.import_module("dflash_jax.drafters")  # for the flags of its kinds; the other stages start faster
    return parse(stages, argv, prog=prog, description=DESCRIPTION, common=COMMON)
