"""`python -m dflash_jax.plan`: what a pair needs on a machine; see `benchmarks.planning`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dflash_jax import files
from dflash_jax.cli import Overrides, optional, parse
from dflash_jax.infer.interrupt import exit_quietly, exit_status

DESCRIPTION = """\
Memory, operations, collectives and the least time of a step, per device, on machines that are not here.

  examples      --target qwen3-8b --topology v5e:2x2 --batch-size 8 --max-length 8192
                --target qwen3-8b --topology v5e:4x4 --training --batch-size 16 --max-length 3072
                --target TARGET/config.json --drafter DRAFTER/config.json --topology h100:4 --mesh model=4

  exit status   0 planned, whether it fits or not, 1 no program fits, 2 unusable arguments or files, 130 interrupted
"""


@dataclass(frozen=True)
class PlanOptions:
    """Memory, operations, collectives and the least time of a step, per device.

    Attributes:
        target: a name such as qwen3-8b (an unknown one lists all), config.json or its folder
        topology: TPU, like v5e:2x2, or GPU and number, like h100:4
        drafter: config.json or its folder
        target_config: fields of the target's config.json to replace, a JSON object
        drafter_config: fields of the drafter's config.json to replace
        mesh: like data=2,model=4 (see serve)
        batch_size: rows; of training, packed rows of a step
        max_length: tokens of a row
        block_size: positions of a block, the anchor included
        tree: nodes of a tree that is verified instead of a chain; also says which trees cost no time
        parts: also compile draft, verify (also of one token), accept and commit, each alone, for the bytes they move
        tau: tokens a step commits
        training: the training step of the drafter instead
        row_anchors: blocks of a packed row, for --training
        json: write the figures, too
    """

    target: Annotated[str, arg(metavar="CONFIG")]
    topology: Annotated[str, arg(metavar="CHIP:SHAPE")]
    drafter: Annotated[str | None, optional(str, "CONFIG", "the published one of a target given by name")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    batch_size: int = 8
    max_length: int = 8192
    block_size: Annotated[int | None, optional(int, "N", "the drafter's")] = None
    tree: int = 0
    parts: bool = False
    tau: float = 6.49
    training: bool = False
    row_anchors: int = 512
    json: Annotated[Path | None, optional(Path, "FILE")] = None


def main(argv: Sequence[str] | None = None) -> int:
    options: PlanOptions = parse(PlanOptions, argv, prog="python -m dflash_jax.plan", description=DESCRIPTION)
    return exit_status(lambda: _planned(options), packages="a TPU topology needs pip install '.[tpu]'")


def _planned(options: PlanOptions) -> int:
    from dflash_jax.benchmarks.planning import plan, table

    try:
        figures = plan(options)
    except RuntimeError as error:  # the compiler's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(table(figures))
    if options.json:
        files.write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    exit_quietly(main())
