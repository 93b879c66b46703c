"""Compiler options of programs that multiply blocks of tokens, not single ones."""

import os
import sys
import time
from functools import cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.kernels.verdicts import Verdict
from dflash_jax.models.layers import matmul

Options = dict[str, str | bool]

BLOCK_OPTIONS: dict[str, Options] = {
    # XLA hands products to YNNPACK. For one token that is the fastest way. For blocks, the older Eigen path is faster
    # in small models, and slower in larger ones (benchmarks.md).
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    # Merging a draft layer's products of the same input copies its part of `kv_proj` in every step.
    "gpu": {"xla_gpu_dot_merger_threshold_mb": "0"},
}
# Of training steps, whose products are large: on a GPU they are cuBLAS's. With blocks of 10, those that XLA makes by
# Triton do not compile, and to try their variants takes long.
TRAINING_OPTIONS = BLOCK_OPTIONS | {"gpu": BLOCK_OPTIONS["gpu"] | {"xla_gpu_enable_triton_gemm": False}}
LARGE = 4 << 20  # bytes of a layer's MLP from which the options are measured
MEASURED = 64 << 20  # bytes of weights to measure with: more than a processor's own caches hold
ROUNDS = 7
GAIN = 0.95  # of the time, at most, for which the options are left out


@cache
def block_compiler_options() -> Options | None:
    """The options of this platform; None where there are none, or this XLA does not know them."""
    return _known(BLOCK_OPTIONS)


@cache
def training_compiler_options() -> Options | None:
    """The same for a training step."""
    return _known(TRAINING_OPTIONS)


def _known(by_platform: dict[str, Options]) -> Options | None:
    options = by_platform.get(jax.default_backend())
    return None if options is None or unknown(options) else options


def unknown(options: Options) -> bool:
    """Whether this XLA does not know one of them."""
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return True
    return False


@cache
def fastest_options(width: int, inner: int, tokens: int, *, clock: bool = True) -> Options | None:
    """`block_compiler_options`, or None if the products of a large model are faster without them on this CPU, which
    takes a fraction of a second to find out, once on a machine.

    Args:
        width, inner: of the model's MLP.
        tokens: of a block, in all rows together.
        clock: whether anything may be measured; processes that work together must not choose each on its own.
    """
    options, layer = block_compiler_options(), 12 * width * inner
    if options is None or jax.default_backend() != "cpu" or not clock or layer < LARGE or jax.process_count() > 1:
        return options
    case = f"{sorted(options)}: products of {tokens} tokens in an MLP of {width} by {inner}, {processors()} processors"
    verdict = Verdict(case, sys.modules[__name__])
    known, slower = verdict.known()
    if not known:
        verdict.keep(slower := _slower(options, width, inner, tokens))
    return None if slower else options


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _slower(options: Options, width: int, inner: int, tokens: int) -> str | None:
    """Says so if products are faster without these options."""
    key, layer = jax.random.key(0), 12 * width * inner
    weights = [
        (jax.random.normal(key, (2 * inner, width)), jax.random.normal(key, (width, inner)) / (width * inner) ** 0.5)
        for _ in range(max(1, MEASURED // layer))
    ]
    x = jnp.ones((1, tokens, width))
    programs = [jax.jit(_products, compiler_options=given) for given in (options, None)]
    # The first round compiles.
    times = [[_seconds(program, x, weights) for program in programs] for _ in range(1 + ROUNDS)]
    given, left_out = (min(column) for column in zip(*times[1:], strict=True))
    return f"{given:.3g} s with them, {left_out:.3g} without" if left_out < GAIN * given else None


def _products(x: Float[Array, "B T D"], weights: list[tuple[Array, Array]]) -> Float[Array, "B T D"]:
    for gate_up, down in weights:
        x = x + matmul(matmul(x, gate_up)[..., : down.shape[1]], down)
    return x


def _seconds(program: jax.stages.Wrapped, *arguments: object) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - begin
