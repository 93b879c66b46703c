"""Steps of the pair: plain and speculative, of several batches and contexts, with trees, graphs, XLA's attention."""

from collections.abc import Iterator
from contextlib import nullcontext

import jax

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench, StepKind, weight_bytes
from dflash_jax.benchmarks.hardware.report import SkippedError
from dflash_jax.chips import chip_of
from dflash_jax.kernels.dispatch import using

TAU = 6.49  # committed tokens a step: the paper's average on Qwen3-8B


def steps(bench: Bench, rows: int, context: int, pair: str | None = None) -> Iterator[Figures]:
    """A plain and a speculative step, and what their ratio means at the paper's tau."""
    plain, first = bench.milliseconds(StepKind(False, rows, context), pair)
    row: Figures = {"pair": pair or bench.pair, "rows": rows, "context": bench.context(context), "plain ms": plain}
    row |= {"plain first s": first}
    speculative, first = bench.milliseconds(StepKind(True, rows, context), pair)
    row |= {"speculative ms": speculative, "speculative first s": first, "ratio": speculative / plain}
    row |= {f"tokens/s at tau {TAU}": 1e3 * TAU * rows / speculative}
    target, _ = bench.models(pair)
    if (chip := chip_of(jax.devices()[0].device_kind)) and not any(x.experts for x in target.config.layers):
        row["plain, of bandwidth"] = weight_bytes(target) / chip.bandwidth / (plain / 1e3)
    yield row


def trees(bench: Bench) -> Iterator[Figures]:
    """Speculative steps that verify a tree."""
    for nodes in (31,) if not bench.small else (7,):
        took, first = bench.milliseconds(StepKind(True, tree=nodes))
        yield {"nodes": nodes, "speculative ms": took, "first s": first}


def graphs(bench: Bench) -> Iterator[Figures]:
    """One CUDA graph for all steps of a call, against one for every stretch between loops and conditions."""
    if jax.default_backend() != "gpu":
        raise SkippedError("only GPUs have CUDA graphs")
    for speculative in (False, True):
        row: Figures = {"step": "speculative" if speculative else "plain"}
        for policy in ("on", "off"):  # the first is what earlier items have compiled, where it works
            took, _ = bench.milliseconds(StepKind(speculative, graphs=policy))
            row[f"{policy} ms"] = took
        yield row | {"on / off": row["on ms"] / row["off ms"]}


def by_xla(bench: Bench) -> Iterator[Figures]:
    """The same steps with XLA in place of every kernel of this package."""
    for speculative in (False, True):
        row: Figures = {"step": "speculative" if speculative else "plain"}
        for name, within in (("kernels", nullcontext()), ("XLA", using("xla"))):
            bench.forget()
            with within:
                row[f"{name} ms"], row[f"{name} first s"] = bench.milliseconds(StepKind(speculative))
        yield row | {"kernels / XLA": row["kernels ms"] / row["XLA ms"]}
    bench.forget()
