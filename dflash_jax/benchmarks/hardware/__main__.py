"""`python -m dflash_jax.benchmarks.hardware`: what a device does with this package's programs, as one report.

It measures in a fixed order, most telling first, for as long as it may, writes a file after every row, and prints
Markdown at the end. It runs anywhere; the figures mean something on an accelerator.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from dflash_jax import files
from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.report import Item, markdown, measure
from dflash_jax.cli import Quantization, optional, parsed
from dflash_jax.parsing import parse

if TYPE_CHECKING:
    from dflash_jax.benchmarks.hardware.bench import Bench

EXPERTS = "gpt-oss-20b", "qwen3-coder-30b-a3b"


def _names(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, given[0].split(",")))


@dataclass(frozen=True)
class ReportOptions:
    """Options of `python -m dflash_jax.benchmarks.hardware`.

    Attributes:
        pair: dense pair of dflash_jax.benchmarks.presets, with random weights
        quantize: weights of the pair to quantize, like target=int8,drafter=int8,head=int8 (see serve)
        minutes: time limit of the report; what would take longer is skipped and listed
        only: items of the report, like device,steps
        resume: continue the file of an earlier run on this device, and measure what it lacks
        json: write the results
        small: toy sizes, to try the command
    """

    pair: str = "qwen3-8b"
    quantize: Quantization = field(default_factory=dict)
    minutes: float = 5.0
    only: Annotated[tuple[str, ...], parsed(_names, "ITEM,..."), arg(help_behavior_hint="(default: all)")] = ()
    resume: bool = False
    json: Annotated[Path | None, optional(Path, "FILE.json")] = None
    small: bool = False


def parse_options(argv: Sequence[str] | None = None) -> ReportOptions:
    """The options of a command line."""
    description = (__doc__ or "").splitlines()[0]
    return parse(ReportOptions, argv, prog="python -m dflash_jax.benchmarks.hardware", description=description)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes use the device, too
    from dflash_jax.benchmarks.hardware.bench import Bench
    from dflash_jax.benchmarks.hardware.device import described
    from dflash_jax.benchmarks.presets import PAIRS
    from dflash_jax.loading import enable_compilation_cache

    if options.pair not in PAIRS:
        print(f"error: --pair must be one of {', '.join(PAIRS)}, got {options.pair}", file=sys.stderr)
        return 2
    enable_compilation_cache()
    items = all_items(Bench(options.pair, quantize=options.quantize, small=options.small))
    if unknown := [name for name in options.only if name not in items]:
        print(f"error: --only has items of {', '.join(items)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    report: Figures = described() | {"pair": options.pair, "small": options.small}
    report |= {"quantize": dict(options.quantize)} if options.quantize else {}
    try:
        if options.json is not None:
            files.check_writable(options.json)
        report = _resumed(options, report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = {name: item for name, item in items.items() if not options.only or name in options.only}
    measure(chosen, report, options.json, options.minutes)
    print("\n" + markdown(report))
    return 0


def _resumed(options: ReportOptions, report: Figures) -> Figures:
    """The report of the file, if that is to be gone on with.

    Raises:
        ValueError: it is of another device, of other versions or of another pair.
    """
    if not options.resume:
        return report
    if options.json is None:
        raise ValueError("--resume needs --json, the file to continue")
    if not options.json.exists():
        return report
    earlier = files.read_json(options.json)
    if changed := [key for key, value in report.items() if earlier.get(key) != value]:
        key = changed[0]
        raise ValueError(f"{options.json} is of another run: {key} was {earlier.get(key)}, and is {report[key]}")
    return earlier


def all_items(bench: "Bench") -> dict[str, Item]:
    """What the report has, in its order."""
    from dflash_jax.benchmarks.hardware import device, kernels, others, profiles, quantised, starting, steps, training

    how = {"small": bench.small, "dtype": bench.dtype}
    one = partial(steps.steps, bench, 1, 1024)
    items = {
        "device": Item("The device's own speed", 0.3, partial(device.ceilings, small=bench.small)),
        "steps": Item("Steps at one row", 1.2, one),
        "profile": Item("Kernels of a step, by kind", 1.3, partial(profiles.profiles, bench)),
        "graphs": Item("All steps of a call as one CUDA graph", 0.5, partial(steps.graphs, bench)),
        "rows8": Item("Steps at 8 rows", 1.5, partial(steps.steps, bench, 8, 1024)),
        "rows32": Item("Steps at 32 rows", 1.5, partial(steps.steps, bench, 32, 1024)),
        "long": Item("Steps at 16,384 tokens", 1.5, partial(steps.steps, bench, 1, 16384)),
        "tree": Item("Steps that verify a tree", 1.0, partial(steps.trees, bench)),
        "xla": Item("Kernels of this package against XLA", 2.5, partial(steps.by_xla, bench)),
        "attention": Item("Attention at the shapes of real models", 4.0, partial(kernels.attention, **how)),
        "anchored": Item("Attention of training", 1.0, partial(kernels.anchored, **how)),
        "products": Item("Products of experts", 1.0, partial(kernels.products, **how)),
        "weights": Item("Products with quantized weights", 2.0, partial(quantised.weights, **how)),
    }
    for name in EXPERTS:
        items[name] = Item(f"Steps of {name}", 2.5, partial(steps.steps, bench, 1, 1024, name))
    items["training"] = Item("A training step", 2.0, partial(training.training, bench))
    items["start"] = Item("Seconds to the first answer", 1.5, starting.starts)
    items["torch"] = Item("Torch on the same device", 1.5, partial(others.torch_steps, bench))
    return items


if __name__ == "__main__":
    sys.exit(main())
