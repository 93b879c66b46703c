"""`python -m benchmarks.sass [mxfp4|fp8|bfloat16]...`: instructions of an H100 for every weight of experts.

The kernel is compiled without a GPU, and the loop that holds its products is disassembled: its instructions over the
weights that a thread decodes in one turn. Needs the `cuda-compiler` extra and nvdisasm, which CUDA's toolkit has, and
the package nvidia-cuda-nvdisasm or triton from PyPI.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.topologies import compiling_for, topology
from dflash_jax.kernels.grouped_matmul import grouped_matmul, pallas_gpu
from dflash_jax.quantised import BLOCK, FP8, GROUP, MXFP4

ROWS, GROUPS, OUTPUTS, INPUTS = 16, 32, 5760, 2880
NUMBERS = {"mxfp4": (MXFP4, 2), "fp8": (FP8, 1), "bfloat16": (jax.Array, 1)}  # and how many of them a column has


def compiled(kind: str, dump: Path) -> str:
    """PTX of the kernel."""
    place = SingleDeviceSharding(topology("h100")[0])
    spec: Any = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    N, D = OUTPUTS, INPUTS // BLOCK * BLOCK if kind == "fp8" else INPUTS
    weights = {
        "mxfp4": lambda: MXFP4(spec((GROUPS, N, D // 2), jnp.uint8), spec((GROUPS, N, D // GROUP), jnp.uint8)),
        "fp8": lambda: FP8(
            spec((GROUPS, N, D), jnp.float8_e4m3fn), spec((GROUPS, N // BLOCK, D // BLOCK), jnp.float32)
        ),
        "bfloat16": lambda: spec((GROUPS, N, D), jnp.bfloat16),
    }[kind]()
    with compiling_for("h100"):
        program = jax.jit(grouped_matmul, compiler_options={"xla_dump_to": str(dump)})
        program.lower(spec((ROWS, D), jnp.bfloat16), weights, spec((GROUPS,), jnp.int32)).compile()
    return next(text for path in sorted(dump.glob("*.ptx")) if "mma" in (text := path.read_text()))


def tool(name: str) -> str:
    """The path of one of CUDA's tools."""
    if found := shutil.which(name):
        return found
    for package in ("nvidia", "triton"):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            if found := next(Path(root).rglob(f"bin/{name}"), None):
                return str(found)
    raise SystemExit(f"error: {name} is not installed")


def disassembled(ptx: str, directory: Path) -> list[str]:
    """SASS, a line for an instruction or label."""
    (directory / "kernel.ptx").write_text(ptx)
    cubin = str(directory / "kernel.cubin")
    subprocess.run([tool("ptxas"), "-arch=sm_90a", "-O3", str(directory / "kernel.ptx"), "-o", cubin], check=True)
    text = subprocess.run([tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(/\*[0-9a-f]{4,}\*/|\.L_\w+:)", line)]


def loop(lines: list[str]) -> list[str]:
    """The instructions of the loop with most products: from a label to the jump back to it."""
    places, best = {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"(\.L_\w+):", line):
            places[label[1]] = i
        elif (jump := re.search(r"BRA.*?(\.L_\w+)", line)) and jump[1] in places:
            body = [line for line in lines[places[jump[1]] : i + 1] if line.startswith("/*")]
            products = lambda body: sum("MMA" in line for line in body)
            if products(body) and (not best or len(body) < len(best)):
                best = body
    return best


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for kind in (sys.argv[1:] if argv is None else argv) or NUMBERS:
        which, numbers = NUMBERS[kind]
        tile = pallas_gpu.TILES[which]
        with tempfile.TemporaryDirectory() as directory:
            (dump := Path(directory) / "dump").mkdir()
            body = loop(disassembled(compiled(kind, dump), Path(directory)))
        weights = tile.outputs * tile.columns * numbers / (32 * tile.warps)
        products = sum("MMA" in line for line in body)
        print(f"{kind}: {len(body) / weights:.2f} ({len(body)} instructions, {products} of them products)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
