"""`python -m benchmarks.bundles`: instructions of a TPU v5e for weights of four bits, as its compiler schedules them.

Needs no TPU, but the package libtpu. The kernel is compiled for 16 rows and a matrix of 4096 x 4096, and libtpu writes
down its last schedule. A bundle is what the core starts in one cycle, if it waits for nothing. The table has the
bundles of the inner loop for 1,000 weights, and those that the chip's memory takes to deliver them.
"""

import os
import re
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.topologies import compiling_for, has_compiler, topology
from dflash_jax.chips import CHIPS
from dflash_jax.infer.interrupt import exit_quietly
from dflash_jax.kernels.linear import linear, pallas_tpu
from dflash_jax.quantised import FourBit

CHIP, ROWS, SIZE = "v5e", 16, 4096
CLOCK = 1.5e9  # of a v5e: 197 TFLOP/s by four matrix units of 128 x 128
KINDS = {  # inputs that share a scale, its type, and whether there are zero points
    "int4, groups of 256": (256, "bfloat16", False),
    "int4, groups of 128": (128, "bfloat16", False),
    "int4, groups of 128, float16 scales and zero points (AWQ)": (128, "float16", True),
    "int4, groups of 32": (32, "bfloat16", False),
    "MXFP4": (32, "uint8", False),
    "NVFP4": (16, "float8_e4m3fn", False),
}


@cache
def place() -> SingleDeviceSharding:
    return SingleDeviceSharding(topology(f"{CHIP}:2x2")[0])


def weight(group: int, scale: str, zero: bool) -> Any:
    """Shapes of what stands for a weight."""

    def spec(columns: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((SIZE, columns), dtype, sharding=place())

    groups, code = SIZE // group, "e2m1" if scale.startswith(("uint8", "float8")) else "int4"
    zeros = spec(groups, jnp.uint8) if zero else None
    return FourBit(spec(SIZE // 2, jnp.uint8), spec(groups, scale), zero=zeros, code=code)


def inner_loop(text: str) -> int:
    """Bundles of the innermost loop of a schedule, whose lines begin with an address and a `>` for each loop."""
    found = [match for line in text.splitlines() if (match := re.match(r"\s*0x([0-9a-f]+)\s*\w*\s*:\s*(>*)", line))]
    deepest = max(len(match[2]) for match in found)
    inside = [int(match[1], 16) for match in found if len(match[2]) == deepest]
    return max(inside) - min(inside) + 1


def bundles(kind: str, dump: Path) -> int:
    """Those of a turn of the kernel's loop."""
    x = jax.ShapeDtypeStruct((1, ROWS, SIZE), jnp.bfloat16, sharding=place())
    before = set(dump.iterdir())
    with compiling_for(f"{CHIP}:2x2"):
        jax.jit(partial(linear, implementation="tpu")).lower(x, weight(*KINDS[kind])).compile()
    new = [path for path in dump.iterdir() if path not in before and "linear" in path.name]
    (schedule,) = [path for path in new if re.search(r"\d+-final_bundles\.txt$", path.name)]
    return inner_loop(schedule.read_text())


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        if not has_compiler(f"{CHIP}:2x2"):
            print("error: nothing compiles for TPUs here: pip install libtpu", file=sys.stderr)
            return 2
        chunks = SIZE // pallas_tpu.CHUNK
        together = next(n for n in pallas_tpu.TOGETHER if chunks % n == 0)
        weights = together * pallas_tpu.OUTPUTS * pallas_tpu.CHUNK
        print("| | bundles for 1,000 weights | to read them |\n|---|---|---|")
        for kind, (group, scale, zero) in KINDS.items():
            size = 0.5 + (jnp.dtype(scale).itemsize + zero) / group  # bytes of a weight
            read = 1000 * size / CHIPS[CHIP].bandwidth * CLOCK
            print(f"| {kind} | {1000 * bundles(kind, Path(directory)) / weights:.2f} | {read:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    exit_quietly(main())
