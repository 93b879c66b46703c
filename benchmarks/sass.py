"""`python -m benchmarks.sass [int4|mxfp4|fp8|experts|"int8 experts"|...]`: instructions of an H100 for a weight.

A kernel is compiled without a GPU, and the loop that holds its products is disassembled: its instructions over the
weights that a thread decodes in one turn. Needs the `cuda-compiler` extra and nvdisasm, which CUDA's toolkit has, and
the package nvidia-cuda-nvdisasm or triton from PyPI; the kernels in Mosaic also need jax 0.11 or later.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.topologies import compiling_for, topology
from dflash_jax.kernels import fragments, operands
from dflash_jax.kernels import streamed as kernel
from dflash_jax.kernels.active_experts import multiply
from dflash_jax.kernels.grouped_matmul import grouped_matmul, pallas_gpu
from dflash_jax.kernels.linear import linear
from dflash_jax.quantised import BLOCK, EightBit, FourBit

ROWS, GROUPS, OUTPUTS, INPUTS = 16, 32, 5760, 2880  # of experts
MATRIX = 24576, 4096
# By the Triton kernel of sorted rows: what is decoded, and how many numbers a column has.
SORTED = {
    "sorted mxfp4": ("MXFP4", 2),
    "sorted fp8": ("blocks", 1),
    "sorted int8": ("small", 1),
    "sorted bfloat16": ("plain", 1),
}
# By the Mosaic kernel: group (None is a scale for each output) and type of scales, and type of zero points
# or offsets.
STREAMED = {
    "int4": (128, "bfloat16", ""),
    "int4-zeros": (128, "float16", "uint8"),
    "int4-32": (32, "bfloat16", ""),
    "int4-offsets": (32, "float32", "float32"),
    "mxfp4": (32, "uint8", ""),
    "nvfp4": (16, "float8_e4m3fn", ""),
    "fp8": (128, "float32", ""),
    "int8-32": (32, "float16", ""),
    "int8-16": (16, "float32", ""),
    "experts": (32, "uint8", ""),
    "int8 experts": (None, "float32", ""),
    "bfloat16 experts": (None, "", ""),
}


@cache
def device() -> Any:
    return topology("h100")[0]


def spec(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device()))


def weight(kind: str) -> Any:
    """Shapes of what stands for a weight."""
    group, scale, less = STREAMED[kind]
    shape = (GROUPS, OUTPUTS, INPUTS) if kind.endswith("experts") else MATRIX
    if kind.startswith("bfloat16"):
        return spec(shape, jnp.bfloat16)
    if kind.startswith("int8"):
        block, scales = (None, shape[:-1]) if group is None else ((1, group), (*shape[:-1], shape[-1] // group))
        return EightBit(spec(shape, jnp.int8), spec(scales, scale), block=block)
    if kind == "fp8":
        blocks = tuple(size // BLOCK for size in shape)
        return EightBit(spec(shape, jnp.float8_e4m3fn), spec(blocks, scale), block=(BLOCK, BLOCK))
    groups, code = (*shape[:-1], shape[-1] // group), "int4" if kind.startswith("int4") else "e2m1"
    subtracted = {"zero" if less == "uint8" else "offset": spec(groups, less)} if less else {}
    return FourBit(spec((*shape[:-1], shape[-1] // 2), jnp.uint8), spec(groups, scale), code=code, **subtracted)


def streamed(kind: str) -> tuple[str, float]:
    """PTX of the kernel in Mosaic, and the weights of a thread in one turn of its loop."""
    given = weight(kind)
    slots = [spec((GROUPS + 1,), jnp.int32)] if kind.endswith("experts") else []
    call = partial(multiply if slots else linear, implementation="gpu")
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    with compiling_for("h100"), printed() as written:
        jax.jit(call).lower(spec((1, ROWS, given.shape[-1]), jnp.bfloat16), given, *slots).compile()
        text = written()
    found: list[operands.Stored] = []
    jax.eval_shape(lambda given: found.append(operands.stored(given)), given)
    weights = kernel.at_once(found[0]) * found[0].inputs * fragments.ROWS / 128
    return text[text.index(".version") : text.rindex("}") + 1], weights


@contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """What C++ prints within."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: (file.seek(0), file.read().decode(errors="replace"))[1]
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def sorted_rows(kind: str, dump: Path) -> tuple[str, float]:
    """The same of the kernel in Triton."""
    which, numbers = SORTED[kind]
    N, D = OUTPUTS, INPUTS // BLOCK * BLOCK if which == "blocks" else INPUTS
    weights = {
        "MXFP4": lambda: weight("experts"),
        "blocks": lambda: EightBit(
            spec((GROUPS, N, D), jnp.float8_e4m3fn),
            spec((GROUPS, N // BLOCK, D // BLOCK), jnp.float32),
            block=(BLOCK, BLOCK),
        ),
        "small": lambda: EightBit(spec((GROUPS, N, D), jnp.int8), spec((GROUPS, N), jnp.float32)),
        "plain": lambda: spec((GROUPS, N, D), jnp.bfloat16),
    }[which]()
    with compiling_for("h100"):
        program = jax.jit(grouped_matmul, compiler_options={"xla_dump_to": str(dump)})
        program.lower(spec((ROWS, D), jnp.bfloat16), weights, spec((GROUPS,), jnp.int32)).compile()
    tile = pallas_gpu.TILES[which]
    texts = (path.read_text() for path in sorted(dump.glob("*.ptx")))
    if (ptx := next((text for text in texts if "mma" in text), None)) is None:
        raise SystemExit(f"error: jax {jax.__version__} wrote no PTX of the kernel in Triton; jax 0.10 does")
    return ptx, tile.outputs * tile.columns * numbers / (32 * tile.warps)


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
    for kind in (sys.argv[1:] if argv is None else argv) or (*STREAMED, *SORTED):
        with tempfile.TemporaryDirectory() as directory:
            (dump := Path(directory) / "dump").mkdir()
            ptx, weights = streamed(kind) if kind in STREAMED else sorted_rows(kind, dump)
            body = loop(disassembled(ptx, Path(directory)))
        products = sum("MMA" in line for line in body)
        print(f"{kind}: {len(body) / weights:.2f} ({len(body)} instructions, {products} of them products)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
