"""GPU implementation, by Triton: a tile of rows reads the weights of its groups once, and dequantises in registers."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from dflash_jax.quantised import BLOCK, FP8, GROUP, MXFP4, Quantised, e2m1, e4m3, e8m0

from .visits import tile_height, visits

ROWS, OUTPUTS, INPUTS = 16, 64, 128  # of a tile: rows at least, outputs, and inputs at a time
TYPES = (jnp.bfloat16, jnp.float16)
Load = Callable[..., Array]


def declines(x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if x.dtype not in TYPES:
        return f"rows in {x.dtype}; it serves bfloat16 and float16"
    if isinstance(weights, Quantised):
        return None if type(weights) in (MXFP4, FP8) else f"weights in {type(weights).__name__}"
    return None if weights.dtype == x.dtype else f"weights in {weights.dtype} for rows in {x.dtype}"


def grouped_matmul(
    x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised, sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    M, (E, N, _) = x.shape[0], weights.shape
    height = tile_height(M, E, ROWS, 64)
    where = visits(sizes, M, height)
    if isinstance(weights, MXFP4):
        operands = x[:, ::2], x[:, 1::2], weights.values, weights.scale
    elif isinstance(weights, FP8):
        operands = x, jax.lax.bitcast_convert_type(weights.values, jnp.uint8), weights.scale
    else:
        operands = x, weights
    tile = _TILES[type(weights)] if isinstance(weights, Quantised) else _plain
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        partial(_visit, tile=tile, height=height, total=(M, N)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(where.tile.shape[0], pl.cdiv(N, OUTPUTS)),
        in_specs=[anywhere] * (len(where) + len(operands)),
        out_specs=anywhere,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
    )
    with jax.sharding.use_abstract_mesh(_mesh()):
        return call(*where, *operands)


def _mesh() -> jax.sharding.AbstractMesh:
    """The mesh in force; with the name of a GPU where there is none, for which jax 0.12 asks."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device or jax.default_backend() == "gpu":
        return mesh
    return mesh.update(abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu"))


def _visit(
    tiles: Ref, groups: Ref, begins: Ref, ends: Ref, *refs: Ref, tile: Callable, height: int, total: tuple[int, int]
) -> None:
    """The rows of one group in one tile, times a tile of its weights. No two visits write the same place."""
    *operands, out = refs
    v, n = pl.program_id(0), pl.program_id(1)
    row, column = tiles[v] * height + jnp.arange(height), n * OUTPUTS + jnp.arange(OUTPUTS)
    inside, known = (row >= begins[v]) & (row < ends[v]), column < total[1]
    inputs = operands[0].shape[1]

    @pl.when(ends[v] > 0)
    def _():
        group = groups[v]

        def add(i: Array, total: Array) -> Array:
            at = i * INPUTS + jnp.arange(INPUTS)
            real = at < inputs
            load = lambda place, mask: plgpu.load(place, mask=mask[:, None] & real[None, :], other=0)
            rows = lambda x: load(x.at[row[:, None], at[None, :]], inside)
            weights = lambda x, column, at: load(x.at[group, column[:, None], at[None, :]], known)
            return tile(total, rows, weights, column, at, *operands)

        start = jnp.zeros((height, OUTPUTS), jnp.float32)
        found = jax.lax.fori_loop(0, pl.cdiv(inputs, INPUTS), add, start)
        at = out.at[row[:, None], column[None, :]]
        plgpu.store(at, found, mask=inside[:, None] & known[None, :])


# What some inputs add to the sums of a tile, given functions that load rows, and weights at outputs and inputs.


def _plain(total: Array, rows: Load, weights: Load, column: Array, at: Array, x: Ref, values: Ref) -> Array:
    return total + _dot(rows(x), weights(values, column, at))


def _mxfp4(
    total: Array, rows: Load, weights: Load, column: Array, at: Array, low: Ref, high: Ref, values: Ref, scale: Ref
) -> Array:
    """The two numbers of a byte are multiplied apart, with every other input each."""
    codes = weights(values, column, at).astype(jnp.int32)
    power = e8m0(weights(scale, column, at // (GROUP // 2)).astype(jnp.int32))
    for x, half in ((low, codes & 15), (high, codes >> 4)):
        total += _dot(rows(x), (e2m1(half) * power).astype(x.dtype))
    return total


def _fp8(total: Array, rows: Load, weights: Load, column: Array, at: Array, x: Ref, values: Ref, scale: Ref) -> Array:
    block = 1 if scale.shape[1] == values.shape[1] else BLOCK
    codes = weights(values, column, at).astype(jnp.int32)
    factor = weights(scale, column // block, at // BLOCK)
    return total + _dot(rows(x), (e4m3(codes) * factor).astype(x.dtype))


_TILES = {MXFP4: _mxfp4, FP8: _fp8}


def _dot(x: Array, weights: Array) -> Array:
    return plgpu.dot(x, weights.T).astype(jnp.float32)
