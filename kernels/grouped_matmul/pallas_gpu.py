"""GPU implementation, by Triton: a tile of rows reads the weights of its groups once, and dequantises in registers."""

from collections.abc import Callable, Sequence
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

    @pl.when(ends[v] > 0)
    def _():
        found = tile(operands, groups[v], row, inside, column, known)
        at = out.at[row[:, None], column[None, :]]
        plgpu.store(at, found, mask=inside[:, None] & known[None, :])


def _plain(operands: Sequence[Ref], group: Array, row: Array, inside: Array, column: Array, known: Array) -> Array:
    x, weights = operands

    def add(i: Array, total: Array) -> Array:
        at, real = _inputs(i, x.shape[1])
        return total + _dot(_rows(x, row, inside, at, real), _weights(weights, group, column, known, at, real))

    return _over_inputs(add, row, x.shape[1])


def _mxfp4(operands: Sequence[Ref], group: Array, row: Array, inside: Array, column: Array, known: Array) -> Array:
    """The two numbers of a byte are multiplied apart, with every other input each."""
    low, high, values, scale = operands

    def add(i: Array, total: Array) -> Array:
        at, real = _inputs(i, low.shape[1])
        codes = _weights(values, group, column, known, at, real).astype(jnp.int32)
        power = e8m0(_weights(scale, group, column, known, at // (GROUP // 2), real).astype(jnp.int32))
        for x, half in ((low, codes & 15), (high, codes >> 4)):
            total += _dot(_rows(x, row, inside, at, real), (e2m1(half) * power).astype(x.dtype))
        return total

    return _over_inputs(add, row, low.shape[1])


def _fp8(operands: Sequence[Ref], group: Array, row: Array, inside: Array, column: Array, known: Array) -> Array:
    x, values, scale = operands
    block = 1 if scale.shape[1] == values.shape[1] else BLOCK

    def add(i: Array, total: Array) -> Array:
        at, real = _inputs(i, x.shape[1])
        codes = _weights(values, group, column, known, at, real).astype(jnp.int32)
        factor = _weights(scale, group, column // block, known, at // BLOCK, real)
        return total + _dot(_rows(x, row, inside, at, real), (e4m3(codes) * factor).astype(x.dtype))

    return _over_inputs(add, row, x.shape[1])


_TILES = {MXFP4: _mxfp4, FP8: _fp8}


def _over_inputs(add: Callable, row: Array, inputs: int) -> Array:
    return jax.lax.fori_loop(0, pl.cdiv(inputs, INPUTS), add, jnp.zeros((row.shape[0], OUTPUTS), jnp.float32))


def _inputs(i: Array, inputs: int) -> tuple[Array, Array]:
    at = i * INPUTS + jnp.arange(INPUTS)
    return at, at < inputs


def _rows(x: Ref, row: Array, inside: Array, at: Array, real: Array) -> Array:
    return plgpu.load(x.at[row[:, None], at[None, :]], mask=inside[:, None] & real[None, :], other=0)


def _weights(weights: Ref, group: Array, column: Array, known: Array, at: Array, real: Array) -> Array:
    place = weights.at[group, column[:, None], at[None, :]]
    return plgpu.load(place, mask=known[:, None] & real[None, :], other=0)


def _dot(x: Array, weights: Array) -> Array:
    return plgpu.dot(x, weights.T).astype(jnp.float32)
