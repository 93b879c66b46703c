"""Stages of shared memory that the first warpgroup of a Hopper thread block fills some steps ahead, by TMA."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

SLACK = 2  # steps after which a stage is filled anew; by then the other warpgroups are mostly done with it


def pipeline(depth: int, copies: int, readers: int):
    """What says that a stage was filled, by so many copies, and that all warpgroups are done with it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return {
        "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=depth),
        "consumed": plgpu.Barrier(num_arrivals=readers, num_barriers=depth),
    }


def begin(fetch, count, depth: int) -> None:
    """Asks for the first steps; `fetch(i, stage)` starts the copies of step i of so many."""
    for i in range(depth - SLACK):
        first = (jax.lax.axis_index("warpgroup") == 0) & (i < count)
        pl.when(first)(lambda i=i: fetch(jnp.int32(i), jnp.int32(i)))


def wait(fetch, i, count, depth: int, arrived, consumed):
    """Waits for step i and returns its stage; before that, asks for a later one, once its place is free."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    later, most = i + depth - SLACK, jnp.int32(depth)

    @pl.when((jax.lax.axis_index("warpgroup") == 0) & (later < count))
    def _():
        place = jax.lax.rem(later, most)
        pl.when(later >= most)(lambda: plgpu.barrier_wait(consumed.at[place]))
        fetch(later, place)

    stage = jax.lax.rem(i, most)
    plgpu.barrier_wait(arrived.at[stage])
    return stage
