"""Products of a few rows with quantized weights, and with experts: equal to float32, to the bit at every width, and how
fast."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.device import timed
from dflash_jax.kernels.active_experts import multiply
from dflash_jax.kernels.dispatch import PREFERRED, Name
from dflash_jax.kernels.linear import linear
from dflash_jax.quantised import BLOCK, EightBit, FourBit, Quantised, quantised

FLOAT32 = jnp.dtype("float32")
SHAPES = {"qwen3-8b gate and up": (24576, 4096), "qwen3-8b down": (4096, 12288), "qwen3-8b o": (4096, 4096)}
EXPERTS = {"gpt-oss-20b up": (5760, 2880), "gpt-oss-20b down": (2880, 2880)}  # of 32, of which a token goes to 4
ROWS = 1, 16, 64, 256  # of which times are taken
WIDTHS = 1, 2, 8, 16, 31, 64  # at which a row must have the same bits


def _int4(shape: tuple[int, ...], group: int, scale: str, *, zero: bool) -> FourBit:
    keys = jax.random.split(jax.random.key(1), 3)
    values = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    groups = *shape[:-1], shape[-1] // group
    zeros = jax.random.randint(keys[1], groups, 0, 16).astype(jnp.uint8) if zero else None
    return FourBit(values, jax.random.uniform(keys[2], groups, minval=0.01, maxval=0.03).astype(scale), zero=zeros)


def _e2m1(shape: tuple[int, ...], group: int) -> FourBit:
    keys = jax.random.split(jax.random.key(1))
    values = jax.random.bits(keys[0], (*shape[:-1], shape[-1] // 2), jnp.uint8)
    groups = *shape[:-1], shape[-1] // group
    if group == 32:
        return FourBit(values, jax.random.randint(keys[1], groups, 118, 124).astype(jnp.uint8), code="e2m1")
    scale = jax.random.uniform(keys[1], groups, minval=0.5, maxval=2).astype(jnp.float8_e4m3fn)
    return FourBit(values, scale, gain=jnp.full(shape[:-1], 0.01, jnp.float32), code="e2m1")


def _int8(shape: tuple[int, ...], group: int) -> EightBit:
    values = jax.random.randint(jax.random.key(1), shape, -127, 128).astype(jnp.int8)
    scale = jax.random.uniform(jax.random.key(2), (*shape[:-1], shape[-1] // group), minval=0.001, maxval=0.003)
    return EightBit(values, scale, block=(1, group))


def _blocks(shape: tuple[int, ...]) -> EightBit:
    values = jax.random.normal(jax.random.key(1), shape).astype(jnp.float8_e4m3fn)
    blocks = *shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK)
    scale = jax.random.uniform(jax.random.key(2), blocks, minval=0.01, maxval=0.03)
    return EightBit(values, scale, block=(BLOCK, BLOCK))


KINDS: dict[str, Callable[[tuple[int, ...]], Quantised]] = {
    "INT8": lambda shape: quantised(jax.random.normal(jax.random.key(1), shape, jnp.bfloat16), "int8"),
    "INT8, groups of 32": lambda shape: _int8(shape, 32),
    "FP8 in blocks": _blocks,
    "INT4, groups of 128, zero points (AWQ)": lambda shape: _int4(shape, 128, "float16", zero=True),
    "INT4, groups of 128": lambda shape: _int4(shape, 128, "bfloat16", zero=False),
    "INT4, groups of 32": lambda shape: _int4(shape, 32, "bfloat16", zero=False),
    "MXFP4": lambda shape: _e2m1(shape, 32),
    "NVFP4": lambda shape: _e2m1(shape, 16),
}

EXPERT_KINDS: dict[str, Callable[[tuple[int, ...]], Array | Quantised]] = {
    "MXFP4": KINDS["MXFP4"],
    "INT8": KINDS["INT8"],
    "bfloat16": lambda shape: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16),
}


def weights(*, small: bool, dtype: jnp.dtype) -> Iterator[Figures]:
    """Of whole matrices in every format, and of the experts of gpt-oss-20b."""
    for name, shape in SHAPES.items():
        shape = (256, 256) if small else shape
        for kind, make in KINDS.items():
            weight = jax.jit(make, static_argnums=0)(shape)
            draw = lambda rows, inputs=shape[1]: jax.random.normal(jax.random.key(0), (1, rows, inputs), dtype)
            yield _row(f"{name}, {kind}", linear, draw, (weight,), small)
    for name, shape in EXPERTS.items():
        experts, tokens = (32, *shape) if not small else (4, 128, 128), (1, 8, 16)
        draw = lambda rows, inputs=experts[2]: jax.random.normal(jax.random.key(0), (1, rows, inputs), dtype)
        for kind, make in EXPERT_KINDS.items():
            made = jax.jit(make, static_argnums=0)(experts)
            for count in tokens:
                slots = jnp.arange(min(experts[0], 4 * count) + 1)  # as many as may be active
                yield _row(f"{name}, experts of {count} tokens, {kind}", multiply, draw, (made, slots), small, (count,))


def _served(call: Callable[..., Array], implementation: Name, *arguments: Any) -> Array | None:
    """What this implementation gives; None where it declines."""
    try:
        return call(*arguments, implementation=implementation)
    except ValueError:
        return None


def _row(
    name: str,
    call: Callable[..., Array],
    draw: Callable[[int], Array],
    rest: tuple,
    small: bool,
    rows: tuple[int, ...] = ROWS,
) -> Figures:
    row: Figures = {"weights": name}
    weight = rest[0]
    wide = np.asarray(weight.astype(FLOAT32), np.float64)
    turned = wide.T if wide.ndim == 2 else np.swapaxes(wide[np.asarray(rest[1][:-1])], 1, 2)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    if wide.ndim == 3:
        read *= (len(rest[1]) - 1) / len(wide)
    for which in ("xla", *PREFERRED.get(jax.default_backend(), ())):
        run = partial(_served, call, which)
        if not (served := [count for count in rows if run(draw(count), *rest) is not None]):
            continue
        expected = np.asarray(draw(served[0]), np.float64)[0] @ turned
        found = np.asarray(run(draw(served[0]), *rest)).reshape(expected.shape)
        row[f"{which} error"] = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
        largest = draw(WIDTHS[-1])
        runs = [run(largest[:, :width], *rest) for width in WIDTHS]
        firsts = [np.asarray(found)[..., :1, :] for found in runs if found is not None]
        row[f"{which} same bits"] = all(np.array_equal(firsts[0], other) for other in firsts[1:])
        for count in served if not small else served[:1]:
            seconds = timed(partial(call, implementation=which), draw(count), *rest)
            row[f"{which} us, {count} rows"] = 1e6 * seconds
            row[f"{which} GB/s, {count} rows"] = read / seconds / 1e9
    return row
