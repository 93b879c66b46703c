"""Whether the steps of a device call run as one CUDA graph.

By default XLA makes graphs of the stretches between loops and conditions, and the host decides each of those: three
times a step. With loops in graphs too, the whole call is one. That needs a driver of CUDA 12.4 or later. What a driver
does with it is checked once for every machine (`kernels.verdicts`), on a small program like a call of 16 steps.
"""

import ctypes
import threading
import warnings
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.infer.engine import compiler_options
from dflash_jax.infer.engine.compiler_options import Options
from dflash_jax.kernels import verdicts

Policy = Literal["auto", "on", "off"]
GRAPH_OPTIONS: Options = {
    # What XLA puts into graphs by itself, and loops.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",  # a call is one loop and little else
}
OLDEST = 12, 4  # the CUDA version of the first driver whose graphs can hold loops
STEPS = 16
PATIENCE = 300.0  # seconds until a check is taken to hang


def graph_options(policy: Policy, devices: int = 1) -> Options:
    """The compiler's options for programs of several steps.

    Args:
        devices: that share a program. "auto" makes graphs for one alone: no others have been tried.

    Raises:
        RuntimeError: the check hangs. Its mark stays on disk, so the next process makes no graphs.
    """
    if policy == "off" or jax.default_backend() != "gpu":
        return {}
    return GRAPH_OPTIONS if policy == "on" or (devices == 1 and _works()) else {}


@cache
def _works() -> bool:
    driver = driver_version()
    if driver is None or driver < OLDEST or compiler_options.unknown(GRAPH_OPTIONS):
        return False
    verdict = verdicts.Verdict(f"loops in CUDA graphs, driver {driver}", compiler_options)
    there, trouble = verdict.known()
    if not there:
        trouble = _checked(verdict)
    if trouble:
        warnings.warn(f"steps do not run as one CUDA graph: {trouble}", RuntimeWarning, stacklevel=2)
    return trouble is None


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver knows, or None."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else (number.value // 1000, number.value % 1000 // 10)


def _checked(verdict: verdicts.Verdict) -> str | None:
    """What a check finds, in a thread that can be left if it hangs: its mark then stays."""
    found: list[str | None] = []

    def check() -> None:
        with verdict.checking():
            found.append(trouble(GRAPH_OPTIONS))

    apart = threading.Thread(target=check, daemon=True, name="check of CUDA graphs")
    apart.start()
    try:
        apart.join(PATIENCE)
    except BaseException:  # an interrupt is no verdict
        verdict.drop()
        raise
    if apart.is_alive():
        raise RuntimeError(
            f"the check whether steps run as one CUDA graph has not ended after {PATIENCE:.0f} seconds. Start again: "
            "the next process goes without graphs. --gpu-graphs off never checks"
        )
    if not found:
        return "its check failed"
    verdict.keep(found[0])
    return found[0]


def trouble(options: Options) -> str | None:
    """What is wrong with a small program of 16 steps under these options, or None: it runs three times, once without
    them, and must give the same bits. All its numbers are small integers, so no order of sums changes one."""
    weights = jax.random.randint(jax.random.key(0), (256, 256), -1, 2).astype(jnp.bfloat16)
    x = jax.random.randint(jax.random.key(1), (8, 256), -1, 2).astype(jnp.bfloat16)
    try:
        with_options = jax.jit(_steps, compiler_options=options)
        runs = [jax.device_get(run(weights, x, np.int32(STEPS))) for run in (jax.jit(_steps), *[with_options] * 2)]
    except Exception as error:  # a compiler or driver raises whatever it likes
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
    same = all(np.array_equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    return None if same else "its results differ from those of the same steps without it"


def _steps(
    weights: Float[Array, "D D"], x: Float[Array, "B D"], count: Int[Array, ""]
) -> tuple[Float[Array, "B D"], Int[Array, "M B"]]:
    """A loop that may end early, with a product, a choice, and conditions that hold another loop."""

    def narrowed(scores: Array) -> Array:
        def half(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = carry
            middle = (low + high) // 2
            enough = jnp.sum(scores >= middle[:, None], axis=1) >= 4
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        ends = jnp.full(scores.shape[0], -512, jnp.int32), jnp.full(scores.shape[0], 512, jnp.int32)
        low, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1] - carry[0] > 1), half, ends)
        return jnp.where(scores >= low[:, None], scores, -512)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, x, chosen = carry
        scores = jnp.matmul(x, weights, preferred_element_type=jnp.float32).astype(jnp.int32)
        scores = jax.lax.cond((jnp.sum(scores[:, 0]) + i) % 2 == 0, narrowed, lambda scores: scores, scores)
        token = jnp.argmax(scores, axis=1).astype(jnp.int32)
        x = ((scores + token[:, None]) % 3 - 1).astype(x.dtype)
        return i + 1, x, jax.lax.dynamic_update_index_in_dim(chosen, token, i, 0)

    start = jnp.int32(0), x, jnp.zeros((STEPS, x.shape[0]), jnp.int32)
    going = lambda carry: (carry[0] < count) & jnp.any(carry[1] != 0)
    _, x, chosen = jax.lax.while_loop(going, step, start)
    return x, chosen
