"""Products of a few rows with weights on a Hopper GPU (Pallas, Mosaic), which read every weight once.

Weights are what stands on the left of a product of the tensor cores, so that 8 rows are as good as 64: each warpgroup
of a thread block has 64 outputs, which it decodes in registers (`operands`) and multiplies with rows in shared memory.
All share what the first one copies there some steps ahead (`stages`). Thread blocks may each sum a part of the inputs.
How many parts there are follows from the weight's shape alone, so a row has the same bits beside whatever other rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import fragments, operands, stages, tensor_cores
from .operands import Stored
from .products import FEW_ROWS

ROWS = fragments.ROWS
MEMORY = 110 * 1024  # bytes of shared memory of a thread block, so that a core has two of them
DEPTH = 3, 6  # stages, at least and at most
LEAST = 4  # tiles of inputs in a part, at least


def missing(dtype: jnp.dtype, count: int) -> str | None:
    """Why so many rows of this type are not served, whatever the weights, or None."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}; it is written for 0.11 and later"
    if dtype != jnp.bfloat16:
        return f"rows in {dtype}; it supports bfloat16"
    return f"{count} rows; it supports {FEW_ROWS}" if count > FEW_ROWS else tensor_cores.missing()


def share(weight: Stored, parts: int) -> int:
    """Tiles of inputs of each of so many parts, at most; the last one may have fewer."""
    tiles, step = weight.values.shape[2] // weight.columns, at_once(weight)
    most = max(1, min(parts, tiles // LEAST))
    return -(-tiles // (most * step)) * step


def at_once(weight: Stored) -> int:
    """Tiles that are copied at once, and divide all. Those of half the width stand side by side: an odd number of them,
    so that threads that read at once find what they read in different banks of the memory."""
    tiles = weight.values.shape[2] // weight.columns
    return next(n for n in ((2, 1) if weight.words == 4 else (5, 3, 1)) if tiles % n == 0)


def multiply(
    x: Float[Array, "X T D"],
    weight: Stored,
    slots: Int[Array, " S1"] | None = None,
    *,
    warpgroups: int = 2,
    parts: int = 1,
) -> Float[Array, "P S T N"]:
    """`x[s] @ weight[slots[s]].T` for each slot, or for the only weight; in parts that are still to be added, and
    smaller than they are (`Stored.smaller`).

    Args:
        x: for each slot, or one for all; in `operands.arranged` order, and T a multiple of 8.
        slots: experts, and after them how many of these slots there are; the others are not written.
        warpgroups: of a thread block; N is a multiple of 64 times as many.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    height, D, N = *x.shape[1:], weight.values.shape[1]
    count = 1 if slots is None else slots.shape[0] - 1
    each, step = share(weight, parts), at_once(weight)
    step = 1 if height > 64 else step
    outputs, tiles = warpgroups * ROWS, D // weight.inputs
    least, most = DEPTH
    stage = step * (outputs * weight.columns * weight.values.dtype.itemsize + height * weight.inputs * x.dtype.itemsize)
    depth = min(most, max(least, MEMORY // stage))
    apart, wide = step if weight.words == 4 else 1, min(64, weight.inputs)
    scratch = {
        "values_smem": plgpu.SMEM((depth, apart, outputs, step // apart * weight.columns), weight.values.dtype),
        "x_smem": plgpu.SMEM(
            (depth, height, step * weight.inputs),
            x.dtype,
            transforms=(plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(wide * x.dtype.itemsize)),
        ),
        **stages.pipeline(depth, apart + 1, warpgroups),
    }
    grid = -(-tiles // each), count, N // outputs
    given = [weight.values, *weight.factors] + ([] if slots is None else [slots])
    return plgpu.kernel(
        partial(_kernel, plgpu, weight=weight, active=slots is not None, step=step, share=each),
        out_type=jax.ShapeDtypeStruct((grid[0], count, height, N), jnp.float32),
        scratch_types=scratch,
        grid=grid,
        grid_names=("part", "slot", "tile"),
        num_threads=warpgroups,
        thread_name="warpgroup",
    )(x, *given)


def _kernel(plgpu, x, values, *rest, values_smem, x_smem, arrived, consumed, weight, active, step, share):
    """The products of one part of the inputs, for a tile of outputs of one slot."""
    *factors, out = rest
    part, slot, tile, mine = (jax.lax.axis_index(name) for name in ("part", "slot", "tile", "warpgroup"))
    expert, there = jnp.int32(0), True
    if active:
        *factors, slots = factors
        there = slot < slots[slots.shape[0] - 1]
        expert = slots[slot]
    (depth, apart, outputs, _), height = values_smem.shape, x_smem.shape[1]
    together = step // apart  # tiles of one copy
    first, begin = part * share, tile * outputs
    count = jax.lax.div(jnp.minimum(jnp.int32(share), x.shape[2] // weight.inputs - first), jnp.int32(step))
    own = pl.ds(begin + mine * ROWS, ROWS)
    rows = x.at[jnp.where(x.shape[0] > 1, slot, 0)]

    def fetch(i, stage):
        at = first + i * step
        for j in range(apart):
            columns = pl.ds((at + j * together) * weight.columns, together * weight.columns)
            source = values.at[expert, pl.ds(begin, outputs), columns]
            plgpu.copy_gmem_to_smem(source, values_smem.at[stage, j], arrived.at[stage])
        source = rows.at[:, pl.ds(at * weight.inputs, step * weight.inputs)]
        plgpu.copy_gmem_to_smem(source, x_smem.at[stage], arrived.at[stage])

    def ahead(i):
        """Scales and zero points of a step."""
        load = lambda ref, t: operands.load_factors(ref.at[expert], weight, begin + mine * ROWS, first + i * step + t)
        return [[load(ref, t) for ref in factors] for t in range(step)]

    def body(i, carry):
        total, now = carry
        later = ahead(jnp.minimum(i + 1, count - 1))
        stage = stages.wait(fetch, i, count, depth, arrived, consumed)
        for t in range(step):
            columns = pl.ds(t % together * weight.columns, weight.columns)
            here = values_smem.at[stage, t // together, pl.ds(mine * ROWS, ROWS), columns]
            inputs = x_smem.at[stage, :, pl.ds(t * weight.inputs, weight.inputs)]
            total = tensor_cores.add_product(total, operands.operand(here, now[t], weight), inputs.transpose((1, 0)))
        plgpu.barrier_arrive(consumed.at[stage])
        return total, later

    @pl.when(there)
    def _():
        stages.begin(fetch, count, depth)
        start = tensor_cores.full((ROWS, height), 0.0), ahead(jnp.int32(0))
        total, _ = jax.lax.fori_loop(0, count, body, start)
        # Turned: no two of a thread's numbers are neighbors there.
        out.at[part, slot, :, own].transpose((1, 0))[...] = fragments.apart(total)
