"""`python -m dflash_jax.plan`: what a pair needs on a machine; see `benchmarks.planning`."""

import sys
from collections.abc import Sequence

from dflash_jax import files
from dflash_jax.benchmarks.arguments import PlanOptions
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.parsing import parse

DESCRIPTION = """\
Estimates memory, operations, communication and step time per device, for a TPU or GPU that you do not have.

  examples      --target qwen3-8b --topology v5e-4 --batch-size 8 --max-length 8192
                --target qwen3-8b --topology v5e:4x4 --training --batch-size 16 --max-length 3072
                --target TARGET/config.json --drafter DRAFTER/config.json --topology h100:4 --mesh model=4

  exit status   0 planned, whether it fits or not, 1 no program fits, 2 unusable arguments or files, 130 interrupted
"""


# What `--help` shows of the options.
COMMON = frozenset(
    "target drafter topology mesh batch_size max_length block_size tree quantize training row_anchors json".split()
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m dflash_jax.plan") -> int:
    options: PlanOptions = parse(PlanOptions, argv, prog=prog, description=DESCRIPTION, common=COMMON)
    return exit_status(lambda: _planned(options), packages="a TPU topology needs pip install '.[tpu]'")


def _planned(options: PlanOptions) -> int:
    from dflash_jax.benchmarks.plan_table import table
    from dflash_jax.benchmarks.planning import plan

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
