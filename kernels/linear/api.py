"""Products of rows with one weight.

Shapes: B rows of a batch, T positions, M outputs, D inputs.
"""

from functools import partial
from types import ModuleType

import jax
from jaxtyping import Array, Float

from dflash_jax.quantised import Quantised

from ..dispatch import Name, choose
from ..products import product
from . import mosaic_gpu, pallas_tpu, reference, xla_gpu
from .reference import dense as dense
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": mosaic_gpu, "xla_gpu": xla_gpu}


@partial(jax.jit, static_argnames="implementation")  # a call by this name in every trace; see `benchmarks.costs`
def linear(x: Float[Array, "B T D"], weight: Quantised, *, implementation: Name | None = None) -> Float[Array, "B T M"]:
    """`x @ weight.T` of a quantized weight, summed and returned in float32. Weights are the stored numbers times their
    scales; `x` is never quantized to fewer digits than it has.

    Args:
        implementation: "xla", "tpu" or "gpu" (Pallas), or "xla_gpu"; see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    trial = Trial.of(x, weight)
    chosen = choose(IMPLEMENTATIONS, x, weight, implementation=implementation, trial=trial, call=linear)
    return reference.linear(x, weight) if chosen is reference else _by(chosen, x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by(kernel: ModuleType, x: Float[Array, "B T D"], weight: Quantised) -> Float[Array, "B T M"]:
    """What a kernel gives; weights have no gradient."""
    return kernel.linear(x, weight)


def _forward(kernel: ModuleType, x: Array, weight: Quantised) -> tuple[Array, tuple[Array, Quantised]]:
    return _by(kernel, x, weight), (x, weight)


def _backward(_: ModuleType, kept: tuple[Array, Quantised], cotangent: Array) -> tuple[Array, None]:
    x, weight = kept
    found = product("btm,md->btd", cotangent.astype(x.dtype), weight.astype(x.dtype), rounded=True)
    return found, None


_by.defvjp(_forward, _backward)
