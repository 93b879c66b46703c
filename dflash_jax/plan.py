"""`python -m dflash_jax.plan`: what a pair needs on a machine; see `benchmarks.planning`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.benchmarks.topologies import CHIPS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.plan",
        description="Memory, operations, collectives and the least time of a step, per device.",
    )
    parser.add_argument("--target", required=True, metavar="CONFIG", help="name (qwen3-8b), config.json or its folder")
    parser.add_argument("--drafter", metavar="CONFIG", help="likewise (default: that of a target named by name)")
    parser.add_argument(
        "--topology", required=True, help=f"TPU, like v5e:2x2, or GPU and number, like h100:4 ({', '.join(CHIPS)})"
    )
    parser.add_argument("--mesh", default="auto", help="like data=2,model=4 (see serve)")
    parser.add_argument("--batch", type=int, default=8, help="rows; of training, packed rows of a step (default 8)")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a row (default 8192)")
    parser.add_argument("--block-size", type=int, help="draft slots (default: the drafter's)")
    parser.add_argument("--tau", type=float, default=6.49, help="tokens a step commits (default 6.49)")
    parser.add_argument("--training", action="store_true", help="the training step of the drafter instead")
    parser.add_argument("--anchors", type=int, default=512, help="of a row, for --training (default 512)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = vars(build_parser().parse_args(argv))
    file = args.pop("json")
    from dflash_jax.benchmarks.planning import PlanOptions, plan, table

    try:
        figures = plan(PlanOptions(**args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error}; a TPU topology needs pip install '.[tpu]'", file=sys.stderr)
        return 2
    except RuntimeError as error:  # the compiler's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(table(figures))
    if file:
        Path(file).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
