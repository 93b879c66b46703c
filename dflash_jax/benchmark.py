"""Autoregressive and speculative decoding compared in one run: `python -m dflash_jax.benchmark MODE ...`."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_jax import files
from dflash_jax.benchmarks.arguments import (
    DraftersOptions,
    Figures,
    JobsOptions,
    MeasureOptions,
    Mode,
    PairOptions,
    SweepOptions,
)
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.pairs import completed
from dflash_jax.parsing import parse

DESCRIPTION = """\
Measures speedup, tau (mean accepted length) and step times. Autoregressive and speculative decoding take turns on the
same prompts, both warmed up. Without a mode, it is compare.

  examples      compare (the bundled pair, on held-out problems)
                compare --target DIR --drafter DIR --dataset gsm8k --max-samples 24 --json figures.json
                sweep --concurrency 1,2,4,8 --plot sweep.svg
                drafters --target DIR --drafters a=DIR,b=DIR --temperature 0,1 --plot drafters.svg

  exit status   0 measured, 1 measured, but answers in float32 differed (drafters), 2
                unusable arguments or files, 130 interrupted
"""
# What `--help` shows of the options.
COMMON = frozenset(
    "target drafter drafters dataset max_samples max_new_tokens batch_size block_size tree temperature rounds "
    "concurrency tasks json plot mesh dtype quantize".split()
)
# What each of the flags has become that chose what is measured before there were modes: a mode, and its option.
FLAGS = {
    "--jobs": ("jobs", "--rounds"),
    "--sweep": ("sweep", "--concurrency"),
    "--drafters": ("drafters", "--drafters"),
}


def parse_options(argv: Sequence[str] | None = None, prog: str = "python -m dflash_jax.benchmark") -> Any:
    """The options of a mode, an instance of the class that is its name."""
    modes: Any = Mode
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        given = ["compare"]
    elif given[0].startswith("-") and not {"-h", "--help"} & set(given):
        given = with_mode(given)
        print(f"note: this is now written as: {prog} {shlex.join(given)}", file=sys.stderr)
    return parse(modes, given, prog=prog, description=DESCRIPTION, common=COMMON)


def with_mode(argv: Sequence[str]) -> list[str]:
    """The command of today for one without a mode, as it was written when flags chose what is measured.

    Ends the process with status 2 if several flags do.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.partition("=")[0] in FLAGS else [word])]
    chosen = list(dict.fromkeys(word for word in words if word in FLAGS))
    if len(chosen) > 1:
        print(f"error: {chosen[0]} and {chosen[1]} are different modes; leave one of them out", file=sys.stderr)
        raise SystemExit(2)
    if not chosen:
        return ["compare", *argv]
    (mode, flag), at = FLAGS[chosen[0]], words.index(chosen[0])
    return [mode, *words[:at], *words[at + 2 :], flag, *words[at + 1 : at + 2]]


def main(argv: Sequence[str] | None = None, **named: str) -> int:
    options = parse_options(argv, **named)
    return exit_status(lambda: _measured(options))


def _measured(options: MeasureOptions) -> int:
    if isinstance(options, PairOptions) and (options.models.target or options.models.drafter):
        options = replace(options, models=completed(options.models))
    mode, plot = _module(options), getattr(options, "plot", None)
    if options.json:
        files.check_writable(Path(options.json))
    if plot:
        from dflash_jax.benchmarks.plots import check_plot

        check_plot(plot)
    figures: Figures = mode.measure(options)
    if options.json:  # before all else that may fail
        files.write_json(Path(options.json), figures)
    print(mode.text(figures))
    if plot:
        mode.draw(figures, plot)
    wrong = mode.unequal(figures) if isinstance(options, DraftersOptions) else None
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


def _module(options: MeasureOptions) -> ModuleType:
    """The module of a mode: `measure` makes figures of its options, `text` shows them, and `draw` plots them. It is
    imported here, for it imports jax. Measuring raises ValueError for unusable options and where nothing was decoded,
    and OSError for files that cannot be read."""
    if isinstance(options, JobsOptions):
        from dflash_jax.benchmarks import jobs as mode
    elif isinstance(options, SweepOptions):
        from dflash_jax.benchmarks import sweep as mode
    elif isinstance(options, DraftersOptions):
        from dflash_jax.benchmarks import drafters as mode
    else:
        from dflash_jax.benchmarks import compare as mode
    return mode


if __name__ == "__main__":
    exit_quietly(main())
