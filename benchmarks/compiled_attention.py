"""What the XLA attention costs on GPUs, as compiled for them: `python -m benchmarks.compiled_attention`.

Needs no GPU, but `.[cuda-compiler]`. Prints a table of the attention alone (8 rows of 8,192 committed positions, blocks
of 16, heads of Qwen3-8B), by how many slots of the cache an iteration reads: kernels that are started, bytes that they
read and write, and the time that this takes at the published bandwidth, without that of starting them. Of cuDNN's
attention only what surrounds its own kernel is known.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled
from jax.typing import DTypeLike
from jaxlib import _hlo, _jax  # pyright: ignore[reportAttributeAccessIssue] (without a description of its types)

from dflash_jax.benchmarks.topologies import compiling_for, has_compiler, topology
from dflash_jax.cache import KV
from dflash_jax.cache.int8 import Int8KV
from dflash_jax.chips import CHIPS
from dflash_jax.infer.interrupt import exit_quietly
from dflash_jax.kernels.block_attention import attend, reference
from dflash_jax.kernels.dispatch import Name
from dflash_jax.kernels.shapes import SHAPES, Shape

SHAPE, ROWS, SLOTS = SHAPES["qwen3-8b verify"], 8, 8192
KERNELS = re.compile(r"= .*? (fusion|custom-call|copy|convert|reduce|transpose|concatenate|select|scatter|dot)\(")


class Counted(NamedTuple):
    """Kernels that one call starts, and the bytes that they read and write together."""

    kernels: int
    bytes: float


def counted(text: str, iterations: int) -> Counted:
    """What a compiled program costs in all.

    Args:
        text: the program's HLO, with one loop at most.
        iterations: how often the loop's body runs.
    """
    loop = re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", text)
    (entry,) = re.findall(r"^ENTRY %([\w.-]+) ", text, re.M)
    parts = [(entry, 1), *((name, iterations) for name in (loop.groups() if loop else ()))]
    kernels = sum(times * len(KERNELS.findall(_computation(text, name))) for name, times in parts)
    once = _bytes(text)  # of the entry and of one iteration
    return Counted(kernels, once + (iterations - 1) * _bytes(_entered(text, loop[2])) if loop else once)


def _computation(text: str, name: str) -> str:
    found = re.search(rf"^(?:ENTRY )?%{re.escape(name)} .*?^}}", text, re.M | re.S)
    assert found, f"the program calls {name} and does not have it"
    return found[0]


def _entered(text: str, name: str) -> str:
    """The module with another computation as its entry."""
    head, _, rest = text.replace("\nENTRY %", "\n%").partition("\n")
    head = re.sub(r"^(HloModule \S+),.*", r"\1, is_scheduled=true", head)
    return f"{head}\n{rest}".replace(f"\n%{name} ", f"\nENTRY %{name} ")


def _bytes(text: str) -> float:
    client = jax.devices("cpu")[0].client
    return _jax.hlo_module_cost_analysis(client, _hlo.hlo_module_from_text(text))["bytes accessed"]


def compile_attention(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm] (a compiled class)
    shape: Shape,
    implementation: Name,
    dtype: DTypeLike = jnp.bfloat16,
    rows: int = 4,
    slots: int = 4096,
    page: int | None = None,
    codes: bool = False,
) -> Compiled:
    """The program of `attend` at this shape, with a cache of `rows` rows and `slots` positions, in pages of so many;
    with keys and values as codes of 8 bits, if asked for."""
    T, N, K, H = shape[:4]
    spec = _arrays_on(device, dtype)
    kept = partial(spec, dtype=jnp.int8 if codes else dtype)

    def call(q, positions, k, v, cache, lengths, sinks, pages, scales):
        options = {"window": shape.window, "softcap": shape.softcap, "implementation": implementation}
        options |= {"visible": "causal" if shape.causal else "full", "sinks": sinks if shape.sinks else None}
        return attend(q, positions, k, v, cache, lengths, pages=pages, scales=scales, **options)

    positions, lengths = spec(rows, T, dtype=jnp.int32), spec(rows, dtype=jnp.int32)
    block = spec(rows, T, N, H), positions, kept(rows, K, T, H), kept(rows, K, T, H)
    places, pages, scales = (rows, K, slots), None, None
    if page is not None:
        places, pages = (rows * slots // page, K, page), spec(rows, slots // page, dtype=jnp.int32)
    keys = kept(*places, H)
    cache = KV(keys, keys)  # pyright: ignore[reportArgumentType] (shapes stand for arrays)
    if codes:
        scales = spec(rows, K, T, 2, dtype=jnp.float32)
        cache = Int8KV(keys, keys, scales=spec(*places, 2, dtype=jnp.float32))  # pyright: ignore (as above)
    return jax.jit(call).lower(*block, cache, lengths, spec(N), pages, scales).compile()


def _arrays_on(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    default: DTypeLike = jnp.bfloat16,
) -> Callable[..., jax.ShapeDtypeStruct]:
    """What makes the shape and dtype of an array on this device: `spec(*sizes, dtype=default)`."""
    place = SingleDeviceSharding(device)
    return lambda *size, dtype=default: jax.ShapeDtypeStruct(size, dtype, sharding=place)


def by_chunks(chips: str, chunk: int) -> Compiled:
    """The program of our attention, an iteration of which reads `chunk` slots of the cache."""
    with compiling_for(chips), mock.patch.object(reference, "slots_at_once", return_value=chunk):
        return compile_attention(topology(chips)[0], SHAPE, "xla", rows=ROWS, slots=SLOTS)


def by_cudnn(chips: str) -> Compiled:
    """The program of `jax.nn.dot_product_attention(implementation="cudnn")` for our caches.

    Without cuDNN at hand, jax refuses; the check for it is skipped here, and the plan of cuDNN's own kernel not made.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    T, N, K, H = SHAPE[:4]
    spec = _arrays_on(topology(chips)[0])

    def call(q, k, v, lengths):
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        given = {"query_seq_lengths": jnp.full(ROWS, q.shape[1], jnp.int32), "key_value_seq_lengths": lengths}
        return jax.nn.dot_product_attention(q, k, v, **given, implementation="cudnn", return_residual=True)

    arrays = spec(ROWS, T, N, H), *[spec(ROWS, K, SLOTS, H)] * 2, spec(ROWS, dtype=jnp.int32)
    with compiling_for(chips), mock.patch.object(cudnn, "check_cudnn_version", return_value=91002):
        return jax.jit(call).lower(*arrays).compile()


def row(chips: str, name: str, program: Compiled, iterations: int) -> str:
    """A line of the table."""
    kernels, moved = counted(str(program.as_text()), iterations)
    memory = program.memory_analysis()
    assert memory is not None
    figures = f"{kernels:,} | {moved / 1e6:,.0f} MB | {memory.temp_size_in_bytes / 1e6:,.0f} MB"
    return f"| {chips} | {name} | {figures} | {1e3 * moved / CHIPS[chips].bandwidth:.2f} ms |"


def main() -> int:
    if not has_compiler("a100"):
        print("error: nothing compiles for GPUs here: pip install '.[cuda-compiler]'", file=sys.stderr)
        return 2
    print("| | slots an iteration | kernels | bytes | temporary | at full bandwidth |\n|---|---|---|---|---|---|")
    for chips in ("a100", "l4"):
        for chunk in (128, 1024, 8192):
            print(row(chips, f"{chunk:,}", by_chunks(chips, chunk), SLOTS // chunk - 1))
        print(row(chips, "cuDNN", by_cudnn(chips), 0))
    return 0


if __name__ == "__main__":
    exit_quietly(main())
