"""`python -m benchmarks.bundles [weights|attention]`: instructions of kernels for a TPU v5e.

Needs no TPU, but the package libtpu, a compiler that writes down its last schedule of each kernel. A bundle is what the
core starts in one cycle, if it waits for nothing.

Weights of four bits: 16 rows and a matrix of 4096 x 4096. The table has the bundles of the inner loop for 1,000
weights, and those that the chip's memory takes to deliver them.

Attention: heads of 128 numbers, four queries each at a position, and a cache in pages of 128 slots. The table has the
bundles of a step of the kernel, which reads so many pages: before its work, where it begins copies and waits for them;
for pages that all queries see, and for others; and those that the chip's memory takes to deliver them. A row's first
step has its block, too, and its last one the division at the end.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from dflash_jax.benchmarks.topologies import compiling_for, has_compiler, topology
from dflash_jax.cache import KV
from dflash_jax.cache.int8 import Int8KV
from dflash_jax.chips import CHIPS
from dflash_jax.infer.interrupt import exit_quietly
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.block_attention import pallas_tpu as block_attention
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
BATCH, SHARE, DIM, PAGE, CACHED = 4, 4, 128, 128, 2048
BLOCKS = {  # positions of a block, key-value heads, and whether the cache has 8 bits
    "1 position, 8 heads": (1, 8, False),
    "16 positions, 8 heads": (16, 8, False),
    "16 positions, 8 heads, int8 cache": (16, 8, True),
    "16 positions, 2 heads": (16, 2, False),
    "a tree of 31, 8 heads": (31, 8, False),
}


@cache
def place() -> SingleDeviceSharding:
    return SingleDeviceSharding(topology(f"{CHIP}:2x2")[0])


def array(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """What stands for an array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place())


def weight(group: int, scale: str, zero: bool) -> Any:
    """Shapes of what stands for a weight."""
    groups, code = SIZE // group, "e2m1" if scale.startswith(("uint8", "float8")) else "int4"
    zeros = array(SIZE, groups, dtype=jnp.uint8) if zero else None
    return FourBit(array(SIZE, SIZE // 2, dtype=jnp.uint8), array(SIZE, groups, dtype=scale), zero=zeros, code=code)


def schedule(kernel: str, dump: Path, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[str]:
    """Lines of the schedule of one kernel of a compiled function: an address, a `>` for each loop, instructions."""
    before = set(dump.iterdir())
    with compiling_for(f"{CHIP}:2x2"):
        jax.jit(function).lower(*arguments, **more).compile()
    new = [path for path in dump.iterdir() if path not in before and kernel in path.name]
    (last,) = [path for path in new if re.search(r"\d+-final_bundles\.txt$", path.name)]
    return [line for line in last.read_text().splitlines() if re.match(r"\s*0x[0-9a-f]+\s*\w*\s*:", line)]


def address(line: str) -> int:
    return int(line.split()[0], 16)


def inner_loop(lines: list[str]) -> int:
    """Bundles of the innermost loop."""
    depths = [line.split("{")[0].count(">") for line in lines]
    inside = [address(line) for line, depth in zip(lines, depths, strict=True) if depth == max(depths)]
    return max(inside) - min(inside) + 1


def branches(lines: list[str]) -> list[int]:
    """Addresses of the branches ahead, of those that skip a part of the loop, and of the one that ends it."""
    return [address(line) for line in lines if "sbr.rel" in line]


def four_bits(dump: Path) -> None:
    """Prints the table of weights."""
    chunks = SIZE // pallas_tpu.CHUNK
    together = next(n for n in pallas_tpu.TOGETHER if chunks % n == 0)
    weights = together * pallas_tpu.OUTPUTS * pallas_tpu.CHUNK
    print("| | bundles for 1,000 weights | to read them |\n|---|---|---|")
    for kind, (group, scale, zero) in KINDS.items():
        size = 0.5 + (jnp.dtype(scale).itemsize + zero) / group  # bytes of a weight
        multiply = partial(linear, implementation="tpu")
        lines = schedule("linear", dump, multiply, array(1, ROWS, SIZE), weight(group, scale, zero))
        print(f"| {kind} | {1000 * inner_loop(lines) / weights:.2f} | {bundles_to_read(1000 * size):.2f} |", flush=True)


def attention(dump: Path) -> None:
    """Prints the table of attention."""
    columns = "", "pages", "before", "all seen", "not all seen", "to read them", "block", "end"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, (positions, heads, codes) in BLOCKS.items():
        stored = jnp.int8 if codes else jnp.bfloat16
        fresh = array(BATCH, heads, positions, DIM, dtype=stored)
        held = array(BATCH * CACHED // PAGE, heads, PAGE, DIM, dtype=stored)
        cache, more = KV(held, held), {}
        if codes:
            of_fresh, of_held = (array(*x.shape[:3], 2, dtype=jnp.float32) for x in (fresh, held))
            cache, more = Int8KV(held, held, scales=of_held), {"scales": of_fresh}
        q, whole = array(BATCH, positions, heads * SHARE, DIM), partial(array, BATCH, dtype=jnp.int32)
        arguments, more["pages"] = (q, whole(positions), fresh, fresh, cache, whole()), whole(CACHED // PAGE)
        call = partial(attend, visible="causal", implementation="tpu")
        ends = branches(schedule("attention", dump, call, *arguments, **more))[-5:]
        begin, all_seen, some_seen, end = (later - earlier for earlier, later in pairwise(ends))
        pages = block_attention.pages_at_once(CACHED // PAGE, PAGE, 2 * heads * DIM * jnp.dtype(stored).itemsize)
        read = bundles_to_read(pages * 2 * heads * PAGE * (DIM * jnp.dtype(stored).itemsize + 4 * codes))
        figures = name, pages, ends[0], all_seen, some_seen, round(read), begin, end
        print(f"| {' | '.join(map(str, figures))} |", flush=True)


def bundles_to_read(size: float) -> float:
    """Those in which the chip's memory delivers so many bytes."""
    return size / CHIPS[CHIP].bandwidth * CLOCK


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tables = {"weights": four_bits, "attention": attention}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        if not has_compiler(f"{CHIP}:2x2"):
            print("error: nothing compiles for TPUs here: pip install libtpu", file=sys.stderr)
            return 2
        for name in (sys.argv[1:] if argv is None else argv) or tables:
            if name not in tables:
                print(f"error: {name!r} is no table; there are {', '.join(tables)}", file=sys.stderr)
                return 2
            tables[name](Path(directory))
    return 0


if __name__ == "__main__":
    exit_quietly(main())
