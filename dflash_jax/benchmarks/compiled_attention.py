"""What the XLA attention costs on GPUs, as compiled for them: `python -m tests.compiled_attention`, without a GPU.

A table of the attention alone (8 rows of 8,192 committed positions, blocks of 16, heads of Qwen3-8B), by how many slots
of the cache an iteration reads: kernels that are started, bytes that they read and write, and the time that this takes
at the published bandwidth, without that of starting them. Of cuDNN's attention only what surrounds its own kernel is
known. Needs `.[cuda-compiler]`.
"""

import re
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxlib import _hlo, _jax

from dflash_jax.benchmarks.topologies import CHIPS, compiling_for
from dflash_jax.kernels.block_attention import reference
from tests.chips import compile_attention, topology

CASE, ROWS, SLOTS = "qwen3-8b verify", 8, 8192
KERNELS = re.compile(r"= .*? (fusion|custom-call|copy|convert|reduce|transpose|concatenate|select|scatter|dot)\(")


class Counted(NamedTuple):
    """Of a whole call: kernels, and bytes that they read and write."""

    kernels: int
    bytes: float


def counted(text: str, iterations: int) -> Counted:
    """Of a compiled program with at most one loop, which runs so often."""
    loop = re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", text)
    (entry,) = re.findall(r"^ENTRY %([\w.-]+) ", text, re.M)
    parts = [(entry, 1), *((name, iterations) for name in (loop.groups() if loop else ()))]
    kernels = sum(times * len(KERNELS.findall(_computation(text, name))) for name, times in parts)
    once = _bytes(text)  # of the entry and of one iteration
    return Counted(kernels, once + (iterations - 1) * _bytes(_entered(text, loop[2])) if loop else once)


def _computation(text: str, name: str) -> str:
    return re.search(rf"^(?:ENTRY )?%{re.escape(name)} .*?^}}", text, re.M | re.S)[0]  # type: ignore[index]


def _entered(text: str, name: str) -> str:
    """The module with another computation as its entry."""
    head, _, rest = text.replace("\nENTRY %", "\n%").partition("\n")
    head = re.sub(r"^(HloModule \S+),.*", r"\1, is_scheduled=true", head)
    return f"{head}\n{rest}".replace(f"\n%{name} ", f"\nENTRY %{name} ")


def _bytes(text: str) -> float:
    client = jax.devices("cpu")[0].client
    return _jax.hlo_module_cost_analysis(client, _hlo.hlo_module_from_text(text))["bytes accessed"]


def by_chunks(chips: str, chunk: int) -> Any:
    """The program of our attention, of which an iteration reads so many slots."""
    with compiling_for(chips), mock.patch.object(reference, "slots_at_once", return_value=chunk):
        return compile_attention(chips, "xla", CASE, rows=ROWS, slots=SLOTS)


def by_cudnn(chips: str) -> Any:
    """The program of `jax.nn.dot_product_attention(implementation="cudnn")` for our caches.

    Without cuDNN at hand, jax refuses; the check for it is skipped here, and the plan of cuDNN's own kernel not made.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    place = SingleDeviceSharding(topology(chips)[0])
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=place)

    def call(q, k, v, lengths):
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        given = {"query_seq_lengths": jnp.full(ROWS, q.shape[1], jnp.int32), "key_value_seq_lengths": lengths}
        return jax.nn.dot_product_attention(q, k, v, **given, implementation="cudnn", return_residual=True)

    arrays = spec(ROWS, 16, 32, 128), *[spec(ROWS, 8, SLOTS, 128)] * 2, spec(ROWS, dtype=jnp.int32)
    with compiling_for(chips), mock.patch.object(cudnn, "check_cudnn_version", return_value=91002):
        return jax.jit(call).lower(*arrays).compile()


def row(chips: str, name: str, program: Any, iterations: int) -> str:
    """A line of the table."""
    kernels, moved = counted(program.as_text(), iterations)
    temporary = program.memory_analysis().temp_size_in_bytes
    figures = f"{kernels:,} | {moved / 1e6:,.0f} MB | {temporary / 1e6:,.0f} MB"
    return f"| {chips} | {name} | {figures} | {1e3 * moved / CHIPS[chips].bandwidth:.2f} ms |"


def main() -> None:
    print("| | slots an iteration | kernels | bytes | temporary | at full bandwidth |\n|---|---|---|---|---|---|")
    for chips in ("a100", "l4"):
        for chunk in (128, 1024, 8192):
            print(row(chips, f"{chunk:,}", by_chunks(chips, chunk), SLOTS // chunk - 1))
        print(row(chips, "cuDNN", by_cudnn(chips), 0))


if __name__ == "__main__":
    main()
