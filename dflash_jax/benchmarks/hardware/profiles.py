"""Where the time of a step goes: kernels by their kind, from a trace of JAX's profiler."""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench, StepKind
from dflash_jax.benchmarks.hardware.report import SkippedError

# Kinds by what the names of kernels hold, the first that fits; others keep their name without numbers.
KINDS = (
    (r"gemm|cutlass|nvjet|cublas|splitk|convolution|\bdot", "matrix products"),
    (r"mosaic|attend|splash|paged|custom-call", "attention and other kernels of this package"),
    (r"grouped|_visit", "products of experts"),
    (r"memcpy|copy", "copies"),
    (r"scatter", "scatters"),
    (r"reduce", "reductions"),
    (r"dynamic.update.slice", "dynamic-update-slices"),
    (r"dynamic.slice|\bslice", "slices"),
    (r"transpose", "transpositions"),
    (r"concatenate|pad", "pads and concatenations"),
    (r"sort|top.?k", "sorts"),
)
SHOWN = 16  # kinds of each step


def profiles(bench: Bench) -> Iterator[Figures]:
    """A row for each kind of kernel in a plain and in a speculative step at one row.

    Not as one CUDA graph, of whose loops the profiler shows one turn.
    """
    for speculative in (False, True):
        looped, _ = bench.step(StepKind(speculative, graphs="off"))
        found = by_kind(looped.seconds, bench.loops)
        if not found:
            raise SkippedError("the profiler shows no operations on this device")
        name = "speculative" if speculative else "plain"
        number, micro = (sum(column) for column in zip(*found.values(), strict=True))
        yield {"step": name, "kind": "all", "a step": number, "microseconds": micro}
        for kind, (number, micro) in sorted(found.items(), key=lambda item: -item[1][1])[:SHOWN]:
            yield {"step": name, "kind": kind, "a step": number, "microseconds": micro}


def by_kind(call: Callable[[], object], steps: int) -> dict[str, tuple[float, float]]:
    """What one call of so many steps runs: the number of kernels and their microseconds a step, by kind."""
    number, total = Counter[str](), defaultdict[str, float](float)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            call()
        for path in Path(directory).rglob("*.xplane.pb"):
            for name, nanoseconds in _operations(path):
                kind = next((kind for pattern, kind in KINDS if re.search(pattern, name)), _plain(name))
                number[kind] += 1
                total[kind] += nanoseconds
    return {kind: (number[kind] / steps, total[kind] / steps / 1e3) for kind in number}


def _operations(path: Path) -> Iterator[tuple[str, float]]:
    """Name and nanoseconds of everything that a device ran; on CPU, what XLA ran in its threads."""
    data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        on_gpu, on_tpu = "/device:GPU" in plane.name, "/device:TPU" in plane.name
        for line in plane.lines:
            if (on_gpu and "Stream" not in line.name) or (on_tpu and line.name != "XLA Ops"):
                continue
            for event in line.events:
                if on_gpu or on_tpu or any(key == "hlo_op" for key, _ in event.stats):
                    yield event.name.lower(), event.duration_ns


def _plain(name: str) -> str:
    return re.sub(r"[_.]?\d+", "", name)[:60]
