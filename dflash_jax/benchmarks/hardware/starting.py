"""Seconds until `serve --prompt` has answered with the bundled pair, from nothing and again."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.report import SkippedError

QUESTION = "Anna has 24 apples. Anna buys 18 more and then gives 15 to Ben. How many apples does Anna have now?"
LIMIT = 300  # seconds


def starts() -> Iterator[Figures]:
    """The whole command in a process of its own, whose compiled programs lie in a new directory."""
    if jax.default_backend() == "tpu":
        raise SkippedError(
            "a TPU belongs to one process: run `time python -m dflash_jax.serve --prompt Hello` by itself"
        )
    with tempfile.TemporaryDirectory() as directory:
        kept = {"XDG_CACHE_HOME": directory, "JAX_COMPILATION_CACHE_DIR": f"{directory}/xla"}
        environment = os.environ | kept | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for name in ("from nothing", "again", "and again"):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "dflash_jax.serve", "--prompt", QUESTION]
            found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
            if found.returncode:
                raise RuntimeError(f"serve --prompt failed: {found.stderr[-300:]}")
            yield {"start": name, "seconds": time.perf_counter() - begin, "right": "27" in found.stdout}
