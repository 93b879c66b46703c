"""GPU implementation, by Triton: a tile of rows reads the weights of its groups once, and dequantizes in registers."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Num

from dflash_jax.quantised import BLOCK, GROUP, EightBit, FourBit, Quantised

from ..abstract_gpu import named
from .small_floats import E2M1, E4M3, WIDE, numbers
from .visits import tile_height, visits

ROWS = 16  # of a tile, at least
TYPES = (jnp.bfloat16, jnp.float16)
Load = Callable[..., Array]


class Tile(NamedTuple):
    """What a program computes at a time.

    Attributes:
        outputs: of the weights.
        columns: of the weights as they are stored, in one turn of the loop.
        warps, stages: see Triton.
        programs: wanted at least; with fewer visits, each sums a part of the inputs.
    """

    outputs: int
    columns: int
    warps: int = 4
    stages: int = 3
    programs: int = 264


# As measured on an H100 with the experts of gpt-oss-20b.
TILES = {"MXFP4": Tile(64, 64), "blocks": Tile(128, 128), "small": Tile(128, 128), "plain": Tile(64, 128)}
MOST_PARTS = 8  # of the inputs
# By what power of two weights in MXFP4 are smaller than they are, so that a factor of them fits its dtype.
SMALLER = {"bfloat16": 64, "float16": 0}


def declines(x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if x.dtype not in TYPES:
        return f"rows in {x.dtype}; it supports bfloat16 and float16"
    kind, values = _kind(x, weights), weights.values if isinstance(weights, Quantised) else weights
    if kind is None:
        return f"weights in {weights.form if isinstance(weights, Quantised) else weights.dtype} for rows in {x.dtype}"
    if kind != "plain" and 2**31 <= values.size <= 2**32:  # Pallas counts in 64 bits from there on
        return f"{values.size} bytes of weights; it supports less than {2**31}"
    return None


def _kind(x: Float[Array, "M D"], weights: Array | Quantised) -> str | None:
    """How weights are multiplied; None if they are not."""
    if isinstance(weights, FourBit):
        return "MXFP4" if weights.form == "MXFP4" and weights.zero is None and weights.gain is None else None
    if isinstance(weights, EightBit):
        rows = (1, BLOCK), (BLOCK, BLOCK)
        return "blocks" if weights.block in rows and weights.values.dtype == jnp.float8_e4m3fn else None
    if weights.dtype == x.dtype:
        return "plain"
    return "small" if weights.dtype in (jnp.int8, jnp.float8_e4m3fn) else None


def grouped_matmul(
    x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised, ends: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    M, (E, N, _) = x.shape[0], weights.shape
    height = tile_height(M, E, ROWS, 64)
    where = visits(ends, M, height)
    kind = _kind(x, weights)
    assert kind is not None
    bits = lambda values: jax.lax.bitcast_convert_type(values, jnp.uint8) if values.dtype != jnp.int8 else values
    if isinstance(weights, FourBit):
        operands = x[:, ::2], x[:, 1::2], weights.values, weights.scale
    elif isinstance(weights, Quantised):
        operands = x, bits(weights.values), weights.scale
    else:
        operands = x, weights if kind == "plain" else bits(weights)
    tile, columns = TILES[kind], operands[0].shape[1]
    grid = where.tile.shape[0], pl.cdiv(N, tile.outputs)
    parts = max(1, min(MOST_PARTS, tile.programs // (grid[0] * grid[1]), columns // (2 * tile.columns)))
    smaller = SMALLER[x.dtype.name] if kind == "MXFP4" else 0
    how = {"add": _ADD[kind], "tile": tile, "height": height, "total": (M, N), "parts": parts, "smaller": smaller}
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        partial(_visit, **how),
        out_shape=jax.ShapeDtypeStruct((parts, M, N), jnp.float32),
        grid=(*grid, parts),
        in_specs=[anywhere] * (len(where) + len(operands)),
        out_specs=anywhere,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )
    with named():
        out = call(*where, *operands)
    return out[0] if parts == 1 else jnp.sum(out, axis=0)


def _visit(
    tiles: Ref, groups: Ref, begins: Ref, ends: Ref, *refs: Ref,
    add: Callable, tile: Tile, height: int, total: tuple[int, int], parts: int, smaller: int,
) -> None:  # fmt: skip
    """The rows of one group in one tile, times a part of a tile of its weights. No two visits write the same place."""
    *operands, out = refs
    v, n, part = (pl.program_id(axis) for axis in range(3))
    row, column = tiles[v] * height + jnp.arange(height), n * tile.outputs + jnp.arange(tile.outputs)
    inside, known = (row >= begins[v]) & (row < ends[v]), column < total[1]
    columns = operands[0].shape[1]
    turns = pl.cdiv(pl.cdiv(columns, tile.columns), parts)  # of the loop, in each part

    @pl.when(ends[v] > 0)
    def _():
        group = groups[v]

        def turn(i: Array, total: Array) -> Array:
            first = (part * turns + i) * tile.columns

            def rows(x: Ref) -> Array:
                at = first + jnp.arange(tile.columns)
                mask = inside[:, None] & (at < columns)[None, :]
                return plgpu.load(x.at[row[:, None], at[None, :]], mask=mask, other=0)

            def weights(x: Ref, share: int = 1, every: int = 1) -> Array:
                """A tile of [outputs, columns / share, share], or of one for each so many rows and columns."""
                inner = jnp.arange(share if x.shape[2] == columns else 1)
                at = first + share * jnp.arange(tile.columns // share)[:, None] + inner[None]
                mask = known[:, None, None] & (at < columns)[None]
                at = at if x.shape[2] == columns else at // share
                return plgpu.load(x.at[group, column[:, None, None] // every, at[None]], mask=mask, other=0)

            return add(total, rows, weights, *operands)

        start = jnp.zeros((height, tile.outputs), jnp.float32)
        found = jax.lax.fori_loop(0, turns, turn, start) * 2.0**smaller
        at = out.at[part, row[:, None], column[None, :]]
        plgpu.store(at, found, mask=inside[:, None] & known[None, :])


# What some columns add to the sums of a tile, given functions that load rows and weights.


def _plain(total: Array, rows: Load, weights: Load, x: Ref, values: Ref) -> Array:
    return total + _dot(rows(x), weights(values))


def _mxfp4(total: Array, rows: Load, weights: Load, low: Ref, high: Ref, values: Ref, scale: Ref) -> Array:
    """The two numbers of a byte are multiplied apart, with every other input each; 16 bytes share an exponent."""
    codes, dtype = weights(values, GROUP // 2), low.dtype
    shared = weights(scale, GROUP // 2)
    for x, shift in ((low, 0), (high, 4)):
        found, exponent = numbers(codes, E2M1, shift, dtype)
        if dtype == jnp.float16:  # which cannot hold the product of both powers
            found, exponent = found * jnp.asarray(2.0**exponent, dtype), 0
        total += _dot(rows(x), found * _power(shared, exponent - SMALLER[jnp.dtype(dtype).name], dtype))
    return total


def _small(total: Array, rows: Load, weights: Load, x: Ref, values: Ref) -> Array:
    """Whole numbers, or E4M3 in bytes; their sums are multiplied by the scale of each output elsewhere."""
    found = weights(values)
    if found.dtype == jnp.int8:
        return total + _dot(rows(x), found.astype(x.dtype))
    numbers_of, exponent = numbers(found, E4M3, 0, x.dtype)
    return total + _dot(rows(x), numbers_of * jnp.asarray(2.0**exponent, x.dtype))


def _fp8(total: Array, rows: Load, weights: Load, x: Ref, values: Ref, scale: Ref) -> Array:
    """128 inputs, and as many outputs or one, share a factor, which their sums are multiplied by."""
    found, exponent = numbers(weights(values, BLOCK), E4M3, 0, x.dtype)
    factor = weights(scale, BLOCK, 1 if scale.shape[1] == values.shape[1] else BLOCK)
    sums = _dot(rows(x), found * jnp.asarray(2.0**exponent, x.dtype))
    return total + sums * factor.reshape(1, -1)


_ADD = {"MXFP4": _mxfp4, "blocks": _fp8, "small": _small, "plain": _plain}


def _dot(x: Array, weights: Array) -> Array:
    return plgpu.dot(x, weights.reshape(weights.shape[0], -1).T).astype(jnp.float32)


def _power(codes: Array, exponent: int, dtype: jnp.dtype) -> Array:
    """2.0 ** (codes - 127 + exponent) of exponents as they are stored (E8M0); infinite beyond the dtype."""
    wide = WIDE[jnp.dtype(dtype).name]
    infinite = (1 << wide.exponent) - 1
    field = jnp.clip(codes.astype(jnp.int32) + (exponent - 127 + wide.bias), 0, infinite)
    return jax.lax.bitcast_convert_type((field << wide.digits).astype(jnp.uint16), dtype)
