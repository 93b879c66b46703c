"""TPU implementation for weights of four bits in groups, and a few rows.

A program has a tile of outputs and walks the inputs in chunks. The two numbers of a byte are multiplied apart, with
every other input each. Numbers are multiplied by their scales first, and rounded once, as a dequantized weight is: with
a product for each group, the weights would go through the matrix units as often.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from dflash_jax.quantised import FourBit, Quantised, e2m1, e4m3, e8m0

from ..products import FEW_ROWS, product

OUTPUTS = 128  # of a program
LANES = 128
CHUNK = 2 * LANES  # inputs that it takes at once
TOGETHER = 4, 2, 1  # chunks that a turn of the loop takes, as many as divide them all
ROWS = 16  # of x, at least: what bfloat16 numbers are kept in


def declines(x: Float[Array, "B T D"], weight: Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if not isinstance(weight, FourBit) or weight.values.ndim != 2:
        return f"weights in {weight.form} of {len(weight.shape)} axes; it supports matrices of four bits"
    if x.dtype != jnp.bfloat16:
        return f"rows in {x.dtype}; it supports bfloat16"
    if x.shape[0] * x.shape[1] > FEW_ROWS:
        return f"{x.shape[0] * x.shape[1]} rows; it supports {FEW_ROWS}"
    (outputs, inputs), groups = weight.shape, weight.scale.shape[-1]
    if outputs % OUTPUTS or inputs % CHUNK:
        return f"weights of {outputs} x {inputs}; it supports multiples of {OUTPUTS} x {CHUNK}"
    if inputs % groups or (CHUNK % (inputs // groups) and inputs // groups % CHUNK):
        return f"{groups} groups of {inputs} inputs; it supports groups that divide {CHUNK}, or multiples of it"
    if weight.offset is not None and weight.zero is not None:
        return "offsets of zero points"
    if weight.zero is not None and weight.zero.dtype != jnp.uint8:
        return f"zero points in {weight.zero.dtype}; it supports whole numbers"
    return None


def linear(x: Float[Array, "B T D"], weight: FourBit) -> Float[Array, "B T M"]:
    """See `api.linear`."""
    (B, T, D), (N, groups), scale = x.shape, weight.scale.shape, weight.scale
    rows = x.reshape(B * T, D) if weight.order is None else x.reshape(B * T, D)[:, weight.order]
    rows = jnp.pad(rows, ((0, -B * T % ROWS), (0, 0)))
    decode = lambda codes: codes.astype(jnp.float32)
    if scale.dtype == jnp.uint8:
        decode = lambda codes: e8m0(codes.astype(jnp.int32))
    elif scale.dtype == jnp.float8_e4m3fn:
        scale, decode = jax.lax.bitcast_convert_type(scale, jnp.uint8), lambda codes: e4m3(codes.astype(jnp.int32))
    elif scale.dtype == jnp.float16:  # which cores of a TPU do not know
        scale = scale.astype(jnp.float32)
    factors = [scale] if weight.zero is None else [scale, weight.zero]
    parts = {"float32": 3, "float16": 2}.get(str(weight.scale.dtype), 1)  # numbers in bfloat16 whose sum is a scale
    table, rooms = pltpu.VMEM((2 * LANES, LANES), jnp.float32), parts + len(factors) - 1
    whole = lambda height, width: pl.BlockSpec((height, width), lambda n: (0, 0))
    tile = lambda width: pl.BlockSpec((OUTPUTS, width), lambda n: (n, 0))
    wide = -(-groups // LANES) * LANES
    found = pl.pallas_call(
        partial(_kernel, code=weight.code, decode=decode, group=D // groups, zeros=len(factors) > 1),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], N), jnp.float32),
        grid=(N // OUTPUTS,),
        in_specs=[whole(rows.shape[0], D // 2)] * 2 + [tile(D // 2)] + [tile(groups)] * len(factors),
        out_specs=pl.BlockSpec((rows.shape[0], OUTPUTS), lambda n: (0, n)),
        scratch_shapes=[table, *[pltpu.VMEM((OUTPUTS, wide), jnp.bfloat16)] * rooms],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(rows[:, ::2], rows[:, 1::2], weight.values, *factors)
    total = found[: B * T]
    if weight.offset is not None:  # from 8, which the kernel subtracts: as often as the inputs of a group say
        sums = jnp.sum(rows[: B * T].reshape(B * T, groups, -1).astype(jnp.float32), axis=-1)
        rest = 8.0 * weight.scale.astype(jnp.float32) - weight.offset.astype(jnp.float32)
        total = total + product("rg,ng->rn", sums, rest)
    if weight.gain is not None:
        total = total * weight.gain.astype(jnp.float32)[None]
    return total.reshape(B, T, N)


def _kernel(even: Ref, odd: Ref, values: Ref, *refs: Ref, code: str, decode, group: int, zeros: bool) -> None:
    """A tile of outputs. Scales, and zero points after them, are kept as sums of bfloat16 numbers."""
    count = 2 if zeros else 1
    factors, out, table, *rooms = refs[:count], refs[count], *refs[count + 1 :]
    scales, zero = (rooms[:-1], rooms[-1]) if zeros else (rooms, None)
    rest = decode(factors[0][...])
    for room in scales:
        _keep(room, rest)
        rest = rest - rest.astype(jnp.bfloat16).astype(jnp.float32)
    if zero is not None:
        _keep(zero, factors[1][...].astype(jnp.int32).astype(jnp.float32) - 8.0)
    chunks = values.shape[1] // LANES
    together = next(n for n in TOGETHER if chunks % n == 0)
    # Ones where the column of a half, which is of every other input, is of the group that the row stands for; row 128
    # stands for the first one of a chunk.
    row, column = (jax.lax.broadcasted_iota(jnp.int32, table.shape, axis) for axis in range(2))
    table[...] = (row - LANES == jax.lax.div(column, jnp.int32(max(1, group // 2)))).astype(jnp.float32)

    def chunk(i):
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        codes = values[:, at].astype(jnp.int32)
        lower, upper = codes & 15, codes >> 4
        if code == "int4":  # which has a sign
            lower, upper = codes << 28 >> 28, codes << 24 >> 28
        halves = (lower, even[:, at]), (upper, odd[:, at])
        first = jax.lax.div(i * CHUNK, jnp.int32(group))
        block = jax.lax.div(first, jnp.int32(LANES)) * LANES  # of the groups, the ones that stand side by side
        there = pl.ds(pl.multiple_of(block, LANES), LANES)
        chosen = table[pl.ds(LANES - (first - block), LANES), :].astype(jnp.bfloat16)

        def spread(rooms):
            """For each column the factor of its group: a product of exact terms, which is faster than to move numbers
            across lanes."""
            parts = [_dot(room[:, there], chosen, 0) for room in rooms]
            return sum(parts[1:], parts[0])

        scale, sums = spread(scales), 0.0
        less = None if zero is None else spread([zero])
        for code_of, rows in halves:
            numbers = e2m1(code_of) if code == "e2m1" else code_of.astype(jnp.float32)
            numbers = numbers if less is None else numbers - less
            sums += _dot(rows, (numbers * scale).astype(jnp.bfloat16), 1)
        return sums

    def some(i, total):
        for j in range(together):  # side by side, so that none waits for the units of another
            total += chunk(i * together + j)
        return total

    out[...] = jax.lax.fori_loop(0, chunks // together, some, jnp.zeros(out.shape, jnp.float32))


def _keep(room: Ref, numbers: Array) -> None:
    """Numbers of groups in bfloat16, and zeros where there are no groups any more."""
    if room.shape[1] > numbers.shape[1]:
        room[...] = jnp.zeros(room.shape, room.dtype)
    room[:, : numbers.shape[1]] = numbers.astype(room.dtype)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """The product over the last axis of `a` and this one of `b`."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
