"""The options of `python -m dflash_jax.train STAGE ...`."""

import argparse
import dataclasses
import re

from dflash_jax.cli import add_generation_arguments, add_mesh_argument, add_model_arguments
from dflash_jax.train.config import TrainConfig

EPILOG = """\
stages
  regenerate      the target answers prompts itself      prompts.jsonl -> answers.jsonl
  cache-features  writes its features once (optional)    answers.jsonl -> features/
  fit             trains; continues a run it finds       answers.jsonl -> run/
  evaluate        tau and speedup by real decoding       run/ or drafter, prompts.jsonl
  export          a Hugging Face directory               run/ -> drafter/
  plot            loss and tau over the steps            run/ -> plot.png
  pair            the bundled pair, from text on         nothing -> directory/pair/
  ablate          the paper's ablations on that pair     directory/ -> results.jsonl
exit status   0 done, 1 stopped on the way (what is done is kept), 2 unusable arguments or files
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.train",
        description="Trains a DFlash drafter for a target.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    stage = stages.add_parser("regenerate", help="answer prompts with the target")
    stage.add_argument("--input", required=True, metavar="FILE.jsonl", help="prompts, in every form `serve` takes")
    stage.add_argument("--output", required=True, metavar="FILE.jsonl", help="answers; continued if it exists")
    stage.add_argument("--seed", type=int, default=0, help="sampling noise (default 0)")
    stage.add_argument("--max-length", type=int, help="prompt and answer tokens per row")
    add_model_arguments(stage, bundled=False)
    add_generation_arguments(stage)
    stage.set_defaults(max_new_tokens=2048)

    stage = stages.add_parser("cache-features", help="write the target's features once")
    stage.add_argument("--out", required=True, metavar="DIR", help="feature cache; continued if it is there")
    stage.add_argument("--hidden", action="store_true", help="also what kl and total_variation need")
    _add_data_arguments(stage)

    stage = stages.add_parser("fit", help="train, or continue a run")
    stage.add_argument("--out", required=True, metavar="DIR", help="the run; continued if it is there")
    stage.add_argument("--features", metavar="DIR", help="a feature cache, instead of computing features online")
    stage.add_argument("--eval-prompts", metavar="FILE.jsonl", help="held-out prompts; decoded to choose `best`")
    stage.add_argument("--tensorboard", metavar="DIR", help="also log there")
    _add_data_arguments(stage)

    stage = stages.add_parser("evaluate", help="decode held-out prompts")
    stage.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="held-out prompts")
    stage.add_argument("--run", metavar="DIR", help="a run's `best`, else its newest checkpoint, instead of --drafter")
    stage.add_argument("--step", type=int, help="a checkpoint of the run instead")
    stage.add_argument("--max-samples", type=int, help="the first so many prompts")
    stage.add_argument("--json", metavar="FILE", help="write all figures")
    add_model_arguments(stage, bundled=False)
    add_generation_arguments(stage)

    stage = stages.add_parser("export", help="write a drafter for this package, dflash, vLLM and SGLang")
    stage.add_argument("--run", required=True, metavar="DIR", help="made by fit")
    stage.add_argument("--step", type=int, help="checkpoint (default: `best` if the run was evaluated, else newest)")
    stage.add_argument("--out", required=True, metavar="DIR", help="a new directory")
    stage.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 (default) or float16")

    stage = stages.add_parser("plot", help="draw loss and tau")
    stage.add_argument("--run", required=True, metavar="DIR", help="made by fit")
    stage.add_argument("--out", required=True, metavar="FILE.png")

    stage = stages.add_parser("pair", help="make the bundled pair")
    stage.add_argument("--out", required=True, metavar="DIR", help="all stages' results; continued if it is there")

    stage = stages.add_parser("ablate", help="train and decode one drafter per row of the table")
    stage.add_argument(
        "--pair", metavar="DIR", help="made by pair (default: the bundled pair, whose answers are made first)"
    )
    stage.add_argument("--out", required=True, metavar="DIR", help="runs and results.jsonl; continued if it is there")
    stage.add_argument("--rows", metavar="A;B", help="names of rows (default: all)")
    stage.add_argument("--steps", type=int, default=300, help="of each row (default 300)")
    stage.add_argument("--samples", type=int, default=64, help="held-out problems to decode (default 64)")
    return parser


def _add_data_arguments(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--target", required=True, metavar="DIR|ID", help="target checkpoint")
    stage.add_argument("--data", required=True, metavar="FILE.jsonl", help="made by regenerate")
    stage.add_argument("--config", metavar="FILE", help="YAML or JSON of settings")
    add_mesh_argument(stage, "rows and parameters over all of them")
    stage.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,I/N",
        help="this is process I (from 0) of N that train together, with the first at HOST:PORT; without a value as the "
        "environment says (TPU pods, Slurm)",
    )
    stage.add_argument("--init-from", metavar="DIR|ID", help="continue from a published drafter")
    settings = stage.add_argument_group("settings (the paper's recipe by default; they win over --config)")
    texts = _attribute_texts()
    for field in dataclasses.fields(TrainConfig):
        default = "" if field.default in ((), None) else f" (default {field.default})"
        text = (texts[field.name] + default).replace("%", "%%")
        settings.add_argument("--" + field.name.replace("_", "-"), metavar="X", help=text)


def _attribute_texts() -> dict[str, str]:
    """What the docstring of `TrainConfig` says of each setting."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (TrainConfig.__doc__ or "").split("Attributes:")[-1].splitlines():
        named = re.match(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if named:
            names = named[1].split(", ")
        for name in names:
            texts[name] = (texts.get(name, "") + " " + (named[2] if named else line.strip())).strip()
    return texts
