"""Whether a training step has the memory to keep what its backward pass needs, or computes draft layers again."""

from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.stages import Compiled, Lowered

Remat = bool | Literal["auto"]
SPARE = 0.05  # of a device's memory: what lies there besides the step


def peak_bytes(compiled: Compiled) -> int:
    """Bytes of a device's memory that a program needs, its arguments among them."""
    memory = compiled.memory_analysis()
    assert memory is not None
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def memory_limit() -> int | None:
    """Bytes that programs may use of a device at hand, the least of all; None where devices do not say (CPUs)."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    found = min((limit for limit in limits if limit), default=0)
    if jax.process_count() > 1:  # all run one program
        from jax.experimental import multihost_utils

        found = int(multihost_utils.process_allgather(np.asarray(found // 2**20)).min()) * 2**20
    return found or None


def compiled_step(lower: Callable[[bool], Lowered], remat: Remat, limit: int | None) -> tuple[Compiled, bool]:
    """The compiled step, and whether it computes layers again.

    Args:
        lower: the step, with layers computed again or not.
        remat: whether they are; "auto" if the step needs more than `limit` bytes of a device otherwise, and where that
            is not known.
    """
    if remat != "auto" or limit is None:
        again = remat is not False
        return lower(again).compile(), again
    try:
        compiled = lower(False).compile()
        if peak_bytes(compiled) <= (1 - SPARE) * limit:
            return compiled, False
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler counts for itself
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return lower(True).compile(), True
