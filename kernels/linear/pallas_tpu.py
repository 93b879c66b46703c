"""TPU implementation for weights of four bits in groups, and a few rows.

A program has a tile of outputs and walks the inputs in chunks. Weights stand on the left of the products, so that they
stream through a matrix unit that holds the rows. The two numbers of a byte are multiplied apart, with every other input
each, and the sums of each group are multiplied by its scale; no number is rounded before that. Of a chunk that is
several groups, the inputs of the others are zero.
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
    whole = lambda height, width: pl.BlockSpec((height, width), lambda n: (0, 0))
    tile = lambda width: pl.BlockSpec((OUTPUTS, width), lambda n: (n, 0))
    wide = -(-groups // LANES) * LANES
    found = pl.pallas_call(
        partial(_kernel, code=weight.code, decode=decode, group=D // groups),
        out_shape=jax.ShapeDtypeStruct((N, rows.shape[0]), jnp.float32),
        grid=(N // OUTPUTS,),
        in_specs=[whole(rows.shape[0], D // 2)] * 2 + [tile(D // 2)] + [tile(groups)] * len(factors),
        out_specs=tile(rows.shape[0]),
        scratch_shapes=[pltpu.VMEM((OUTPUTS, wide), jnp.float32)] * len(factors),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(rows[:, ::2], rows[:, 1::2], weight.values, *factors)
    total = found.T[: B * T]
    if weight.offset is not None:  # from 8, which the kernel subtracts: as often as the inputs of a group say
        sums = jnp.sum(rows[: B * T].reshape(B * T, groups, -1).astype(jnp.float32), axis=-1)
        rest = 8.0 * weight.scale.astype(jnp.float32) - weight.offset.astype(jnp.float32)
        total = total + product("rg,ng->rn", sums, rest)
    if weight.gain is not None:
        total = total * weight.gain.astype(jnp.float32)[None]
    return total.reshape(B, T, N)


def _kernel(even: Ref, odd: Ref, values: Ref, *refs: Ref, code: str, decode, group: int) -> None:
    count = len(refs) // 2  # of scales, and zero points if there are
    factors, out, wide = refs[:count], refs[count], refs[count + 1 :]
    for i, (ref, room) in enumerate(zip(factors, wide, strict=True)):
        found = decode(ref[...]) if i == 0 else ref[...].astype(jnp.int32).astype(jnp.float32)
        room[:, : ref.shape[1]] = found
    each = max(1, CHUNK // group)  # groups of a chunk
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def chunk(i, total):
        at = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        codes = values[:, at].astype(jnp.int32)
        codes = codes if code == "e2m1" else codes ^ 0x88  # whole numbers are stored 8 smaller
        halves = (codes & 15, even[:, at]), (codes >> 4, odd[:, at])
        first = jax.lax.div(i * CHUNK, jnp.int32(group))
        here = [pltpu.roll(room[...], jax.lax.rem(room.shape[1] - first, room.shape[1]), 1) for room in wide]
        for g in range(each):
            inside = jax.lax.div(lane, jnp.int32(group // 2)) == g if each > 1 else None
            sums = jnp.zeros_like(total)
            for code_of, rows in halves:
                if code == "e2m1":
                    numbers = e2m1(code_of)
                else:
                    numbers = code_of.astype(jnp.float32) - (here[1][:, g : g + 1] if count > 1 else 8.0)
                own = rows if inside is None else jnp.where(inside, rows, jnp.zeros_like(rows))
                sums += jax.lax.dot_general(
                    numbers.astype(jnp.bfloat16), own, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
            total += sums * here[0][:, g : g + 1]
        return total

    start = jnp.zeros(out.shape, jnp.float32)
    out[...] = jax.lax.fori_loop(0, values.shape[1] // LANES, chunk, start)
