"""Products of a warpgroup of a Hopper GPU, for kernels in Mosaic: operands in shared memory or registers, sums in
registers."""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

CAPABILITY = 9  # major, of the devices that have these tensor cores (WGMMA)


def missing() -> str | None:
    """Why the GPU at hand has no such tensor cores, or None; where there is no GPU, none is missing."""
    if jax.default_backend() == "gpu" and int(float(found := jax.devices()[0].compute_capability)) != CAPABILITY:
        return f"compute capability {found}; it supports {CAPABILITY}.0, for whose tensor cores it is written"
    return None


def load(ref, axis: int | None = None, layout=None):
    """What stands in memory, in registers as a product has its operands, or in a layout of Mosaic's.

    Args:
        axis: of a product over which a vector is a sum, or None of a whole matrix.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if layout is None:
        layout = plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis)
    asked = inspect.signature(plgpu.load).parameters.get("idx")
    index = ((),) if asked and asked.default is inspect.Parameter.empty else ()  # jax 0.10 wants one, 0.11 warns at it
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def full(shape: tuple[int, ...], value, axis: int | None = None, dtype=jnp.float32):
    """Numbers that are all alike, in registers; `axis` as for `load`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA if axis is None else plgpu.Layout.WGMMA.reduce(axis)
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def product(a, b):
    """a @ b.T of two arrays in shared memory, in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def multiply(ref):
        plgpu.wgmma(ref, a, b.transpose((1, 0)))
        return ref[...]

    accumulator = plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32)  # pyright: ignore (jax documents it, but marks it not)
    return pl.run_scoped(multiply, accumulator)


def add_product(acc, a, b):
    """acc + a @ b of `b` in shared memory and the rest in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    start = plgpu.ACC.init(acc)  # pyright: ignore (as above)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(start)
