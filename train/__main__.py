"""Trains drafters: `python -m dflash_jax.train STAGE ...`."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from dflash_jax.cli import log_to_stderr
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.train import arguments
from dflash_jax.train.config import NotFiniteError, StageError


def main(argv: Sequence[str] | None = None, **named: str) -> int:
    options = arguments.parse_stage(argv, **named)
    log_to_stderr()

    def work() -> int:
        try:
            return _stage(options)()
        except (NotFiniteError, StageError) as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 1

    at_once = arguments.EvaluateOptions | arguments.ExportOptions | arguments.PushOptions | arguments.PlotOptions
    continues = not isinstance(options, at_once)
    return exit_status(
        work,
        interrupted=f"interrupted{'; the same command continues' if continues else ''}",
        packages="training needs more packages: pip install '.[train]' in the checkout",
    )


def _stage(options: object) -> Callable[[], int]:
    """The main function of a stage. Its file is imported here, for it imports jax, and packages that may be missing."""
    match options:
        case arguments.RegenerateOptions():
            from dflash_jax.train.regenerate import main as run
        case arguments.CacheFeaturesOptions():
            from dflash_jax.train.features import main as run
        case arguments.FitOptions():
            from dflash_jax.train.fit import main as run
        case arguments.EvaluateOptions():
            from dflash_jax.train.evaluate import main as run
        case arguments.ExportOptions():
            from dflash_jax.train.export import main as run
        case arguments.PushOptions():
            from dflash_jax.train.push import main as run
        case arguments.PlotOptions():
            from dflash_jax.train.plot import main as run
        case arguments.PairOptions():
            from dflash_jax.train.toy import pair

            return partial(pair.main, options, main)
        case arguments.AblateOptions():
            from dflash_jax.train.toy import ablations

            return partial(ablations.main, options, main)
        case _:
            raise AssertionError(options)
    return partial(run, options)


if __name__ == "__main__":
    exit_quietly(main())
