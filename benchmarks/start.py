"""Seconds from the start of a command to the last word of an answer, of several checkouts in turns:
`python -m benchmarks.start CHECKOUT [CHECKOUT ...] [--rounds 5] [--prompt TEXT] [--environment PYTHON]`.

Each checkout keeps its programs in a directory, which is empty at first: its first start is the cold one. Then come
the warm ones, in turns. What imports alone take is printed, too: of jax, of flax, of transformers' tokenizers.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tyro.conf import Positional

from dflash_jax.bundled import PROMPT
from dflash_jax.infer.interrupt import exit_quietly
from dflash_jax.parsing import parse

IMPORTS = "jax", "flax.linen", "transformers.PreTrainedTokenizerFast"


@dataclass(frozen=True)
class StartOptions:
    """Options.

    Attributes:
        checkouts: directories that hold the package, the first one compared with the others
        rounds: warm starts of each
        prompt: what to ask
        environment: the Python that runs them
    """

    checkouts: Positional[tuple[Path, ...]]
    rounds: int = 5
    prompt: str = PROMPT
    environment: str = sys.executable


def seconds(python: str, checkout: Path, prompt: str, kept: str) -> tuple[float, float]:
    """From the start to the last word of the answer, and to the end of the process."""
    surroundings = os.environ | {"PYTHONPATH": str(checkout.absolute()), "XDG_CACHE_HOME": kept}
    command = [python, "-m", "dflash_jax.serve", "--prompt", prompt]
    begin, last = time.perf_counter(), 0.0
    with subprocess.Popen(
        command, cwd=kept, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout
        while os.read(process.stdout.fileno(), 1 << 16):
            last = time.perf_counter() - begin
    if process.returncode:
        raise ValueError(f"{checkout}: the command failed with status {process.returncode}")
    return last, time.perf_counter() - begin


def imports(python: str) -> str:
    """What each of `IMPORTS` adds, in one process."""
    lines = ["import time; times = [time.perf_counter()]"]
    for name in IMPORTS:
        module, _, member = name.partition(".")
        lines.append(f"from {module} import {member}" if member else f"import {module}")
        lines.append("times.append(time.perf_counter())")
    lines.append("print(*(f'{b - a:.2f}' for a, b in zip(times, times[1:])))")
    found = subprocess.run([python, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    return ", ".join(f"{name} {took} s" for name, took in zip(IMPORTS, found.stdout.split(), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    options: StartOptions = parse(StartOptions, argv, prog="python -m benchmarks.start", description=__doc__ or "")
    print("imports:", imports(options.environment))
    with tempfile.TemporaryDirectory() as directory:
        kept = [str(Path(directory, str(i))) for i in range(len(options.checkouts))]
        pairs = list(zip(options.checkouts, kept, strict=True))
        for place in kept:
            Path(place).mkdir()
        cold = [seconds(options.environment, checkout, options.prompt, place)[0] for checkout, place in pairs]
        warm = [
            [seconds(options.environment, checkout, options.prompt, place) for checkout, place in pairs]
            for _ in range(options.rounds)
        ]
    for i, checkout in enumerate(options.checkouts):
        words, ends = zip(*(of_round[i] for of_round in warm), strict=True)
        ratios = [of_round[i][0] / of_round[0][0] for of_round in warm]
        figures = (
            f"cold {cold[i]:.1f} s, warm {median(words):.2f} s (least {min(words):.2f}), exit {median(ends):.2f} s"
        )
        print(f"{checkout}: {figures}; {median(ratios):.2f} of the first ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    exit_quietly(main())
