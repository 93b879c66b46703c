"""TPU implementation: jax's own megablox kernel for plain weights, and one that dequantizes tiles of quantized ones."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from dflash_jax.quantised import BLOCK, GROUP, EightBit, FourBit, Quantised, e2m1, e4m3, e8m0

from .visits import Visits, tile_height, visits

LANES = 128
MOST = 512  # of a tile of megablox, along inputs and outputs
ROWS = 16  # of a tile, at least: what bfloat16 numbers are kept in
_Call = tuple[Callable[..., Array], list[Array], list[pl.BlockSpec]]  # a product of tiles, its operands, their tiles


def declines(x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    _, outputs, inputs = weights.shape
    if x.dtype != jnp.bfloat16:
        return f"rows in {x.dtype}; it supports bfloat16, and rounds float32 to it"
    if (kind := _kind(weights)) is None:
        return f"weights in {weights.form if isinstance(weights, Quantised) else weights.dtype}"
    if kind != "plain":
        unit = GROUP if kind == "MXFP4" else BLOCK
        return f"{inputs} inputs; it supports multiples of {unit}" if inputs % unit else None
    if outputs % LANES or inputs % LANES:
        return f"weights of {outputs} x {inputs}; it supports multiples of {LANES}"
    return None


def _kind(weights: Array | Quantised) -> str | None:
    """How weights are multiplied; None if they are not."""
    if isinstance(weights, FourBit):
        return "MXFP4" if weights.form == "MXFP4" and weights.zero is None and weights.gain is None else None
    if isinstance(weights, EightBit):
        same = weights.block == (BLOCK, BLOCK) and weights.values.dtype == jnp.float8_e4m3fn
        return "blocks" if same else None
    if weights.dtype in (jnp.int8, jnp.float8_e4m3fn):
        return "small"
    return "plain" if weights.dtype == jnp.bfloat16 else None


def grouped_matmul(
    x: Float[Array, "M D"], weights: Num[Array, "E N D"] | Quantised, ends: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    (M, D), (E, N, _) = x.shape, weights.shape
    height = tile_height(M, E, ROWS)
    padded = jnp.pad(x, ((0, -M % height), (0, 0)))
    if _kind(weights) != "plain":
        return _packed(padded, weights, visits(ends, M, height), height)[:M]
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tiling = height, _tile(D), _tile(N)
    return gmm(padded, weights, jnp.diff(ends, prepend=0), jnp.float32, tiling, transpose_rhs=True)[:M]


def _tile(size: int) -> int:
    """The largest multiple of 128 up to `MOST` that divides `size`."""
    return next(tile for tile in range(MOST, 0, -LANES) if size % tile == 0)


def _packed(x: Float[Array, "P D"], weights: Array | Quantised, where: Visits, height: int) -> Float[Array, "P N"]:
    """A program per visit and tile of outputs, with all inputs; the visits of a tile of rows share its output."""
    N = weights.shape[1]
    product, operands, specs = _KERNELS[_kind(weights) or ""](x, weights, where, height)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(pl.cdiv(N, BLOCK), where.tile.shape[0]),
        in_specs=specs,
        out_specs=pl.BlockSpec((height, BLOCK), lambda n, v, tile, *_: (tile[v], n)),
    )
    return pl.pallas_call(
        partial(_visit, product=product, height=height),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], N), jnp.float32),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(*where, *operands)


def _visit(tile: Ref, group: Ref, begin: Ref, end: Ref, *refs: Ref, product: Callable, height: int) -> None:
    *operands, out = refs
    v = pl.program_id(1)
    first = (v == 0) | (tile[jnp.maximum(v - 1, 0)] != tile[v])
    row = tile[v] * height + jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    inside = (row >= begin[v]) & (row < end[v])

    @pl.when(first)
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(end[v] > 0)
    def _():
        out[...] = jnp.where(inside, product(*operands), out[...])


def _mxfp4(x: Float[Array, "P D"], weights: Quantised, where: Visits, height: int) -> _Call:
    """The two numbers of a byte are multiplied apart, with every other input each.

    Outputs lie last: so XLA keeps weights of gpt-oss's shapes, and they are not copied. Scales are gathered visit by
    visit, since it keeps those in an order of their own.
    """
    half, groups = weights.values.shape[2], weights.scale.shape[2]
    spread = jnp.repeat(jnp.eye(groups, dtype=jnp.bfloat16), GROUP // 2, axis=0)  # a power of two to its group's bytes

    def product(low: Ref, high: Ref, values: Ref, scale: Ref, spread: Ref) -> Float[Array, "P N"]:
        codes, power = values[0].astype(jnp.int32), e8m0(scale[0].astype(jnp.int32)).astype(jnp.bfloat16)
        power = _dot(spread[...], power, 0)
        numbers = lambda codes: (e2m1(codes) * power).astype(jnp.bfloat16)
        return _dot(low[...], numbers(codes & 15), 0) + _dot(high[...], numbers(codes >> 4), 0)

    rows = pl.BlockSpec((height, half), lambda n, v, tile, *_: (tile[v], 0))
    specs = [
        rows,
        rows,
        pl.BlockSpec((1, half, BLOCK), lambda n, v, tile, group, *_: (group[v], 0, n)),
        pl.BlockSpec((1, groups, BLOCK), lambda n, v, *_: (v, 0, n)),
        pl.BlockSpec((half, groups), lambda *_: (0, 0)),
    ]
    values, scale = (jnp.swapaxes(x, 1, 2) for x in (weights.values, weights.scale))
    return product, [x[:, ::2], x[:, 1::2], values, scale[where.group], spread], specs


def _small(x: Float[Array, "P D"], weights: Array, where: Visits, height: int) -> _Call:
    """Whole numbers, or E4M3; their sums are multiplied by the scale of each output elsewhere."""

    def product(x: Ref, values: Ref) -> Float[Array, "P N"]:
        found = values[0]
        if found.dtype != jnp.int8:
            found = e4m3(pltpu.bitcast(found, jnp.uint8).astype(jnp.int32))
        return _dot(x[...], found.astype(jnp.float32).astype(jnp.bfloat16), 1)

    specs = [
        pl.BlockSpec((height, x.shape[1]), lambda n, v, tile, *_: (tile[v], 0)),
        pl.BlockSpec((1, BLOCK, x.shape[1]), lambda n, v, tile, group, *_: (group[v], n, 0)),
    ]
    return product, [x, weights], specs


def _fp8(x: Float[Array, "P D"], weights: Quantised, where: Visits, height: int) -> _Call:
    E, outer, blocks = weights.scale.shape

    def product(x: Ref, values: Ref, scale: Ref) -> Float[Array, "P N"]:
        total = jnp.zeros((height, BLOCK), jnp.float32)
        for i in range(blocks):
            at = slice(i * BLOCK, (i + 1) * BLOCK)
            codes = pltpu.bitcast(values[0, :, at], jnp.uint8).astype(jnp.int32)
            numbers = e4m3(codes) * scale[0, 0, :, i : i + 1]
            total += _dot(x[:, at], numbers.astype(jnp.bfloat16), 1)
        return total

    specs = [
        pl.BlockSpec((height, x.shape[1]), lambda n, v, tile, *_: (tile[v], 0)),
        pl.BlockSpec((1, BLOCK, x.shape[1]), lambda n, v, tile, group, *_: (group[v], n, 0)),
        pl.BlockSpec((1, 1, 1, blocks), lambda n, v, tile, group, *_: (group[v], n, 0, 0)),
    ]
    return product, [x, weights.values, weights.scale.reshape(E, outer, 1, blocks)], specs


def _dot(a: Array, b: Array, axis: int) -> Float[Array, "_ _"]:
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


_KERNELS: dict[str, Callable[..., _Call]] = {"MXFP4": _mxfp4, "blocks": _fp8, "small": _small}
