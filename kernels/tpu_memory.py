"""Where the arrays of a TPU kernel lie, and how many cores run it."""

import jax
from jax.core import Tracer
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped


def in_hbm(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """An argument of a kernel that stays in the device's memory.

    Left alone, the compiler may carry a small cache into the memory of a core and, if it is updated, all of it back.
    """
    return pltpu.with_memory_space_constraint(x, pltpu.HBM) if isinstance(x, Tracer) else x


def cores() -> int:
    """Cores of this device, which share the parallel steps of a kernel; 1 where that is not known."""
    try:
        return pltpu.get_tpu_info().num_cores if jax.default_backend() == "tpu" else 1
    except ValueError:  # a chip that jax does not describe
        return 1
