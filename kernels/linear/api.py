"""Products of rows with one weight.

Shapes: B rows of a batch, T positions, M outputs, D inputs.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dflash_jax.mesh import current_mesh, on_each_device, on_one_device, parts_of, split_rows
from dflash_jax.quantised import FourBit, Quantised

from ..dispatch import Name, choose
from ..products import product
from . import mosaic_gpu, pallas_tpu, reference, xla_gpu
from .reference import dense as dense
from .trial import Trial

KERNELS = {"xla": reference, "tpu": pallas_tpu, "gpu": mosaic_gpu}
COMPILED = {"xla": reference, "xla_gpu": xla_gpu}  # which XLA divides over devices
IMPLEMENTATIONS = KERNELS | COMPILED


@partial(jax.jit, static_argnames="implementation")  # a call by this name in every trace; see `benchmarks.costs`
def linear(x: Float[Array, "B T D"], weight: Quantised, *, implementation: Name | None = None) -> Float[Array, "B T M"]:
    """`x @ weight.T` of a quantized weight, summed and returned in float32. Weights are the stored numbers times their
    scales; `x` is never quantized to fewer digits than it has.

    Args:
        implementation: "xla", "tpu" or "gpu" (Pallas), or "xla_gpu"; see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    if not on_one_device() and implementation is None and (split := _split(x, weight)) is not None:
        return split(x, weight)
    among = IMPLEMENTATIONS if on_one_device() else COMPILED
    trial = Trial.of(x, weight)
    chosen = choose(among, x, weight, implementation=implementation, trial=trial, call=linear)
    return reference.linear(x, weight) if chosen is reference else _by(chosen, x, weight)


def _split(x: Float[Array, "B T D"], weight: Quantised) -> Callable[..., Array] | None:
    """The product on a mesh, each device's part by a kernel. None where no kernel serves that part, or where it is not
    known: then XLA divides the product."""
    if weight.axes is None or (isinstance(weight, FourBit) and weight.order is not None):
        return None
    outputs, inputs = weight.axes
    of_rows = P(split_rows(x.shape[0]), None, inputs)
    of_weight = jax.tree.map(lambda leaf: P(*(outputs, inputs)[: leaf.ndim]), weight)
    parts = lambda spec: [parts_of(current_mesh(), axes or ()) for axes in spec]
    leaves, specs = (jax.tree.leaves(tree) for tree in ((x, weight), (of_rows, of_weight)))
    by = [(leaf.shape, parts(spec)) for leaf, spec in zip(leaves, specs, strict=True)]
    if any(size % n for sizes, counts in by for size, n in zip(sizes, counts, strict=True)):
        return None
    chosen: list[ModuleType] = []

    def ask(x: Array, weight: Quantised) -> None:
        chosen.append(choose(KERNELS, x, weight, implementation=None, trial=Trial.of(x, weight), call=linear))

    def part(leaf: Array, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([size // n for size, n in zip(leaf.shape, parts(spec), strict=True)], leaf.dtype)

    jax.eval_shape(ask, part(x, of_rows), jax.tree.map(part, weight, of_weight))
    if chosen[0] is reference:
        return None

    def local(x: Array, weight: Quantised) -> Array:
        found = linear(x, weight)
        return found if inputs is None else jax.lax.psum(found, inputs)

    return on_each_device(local, (of_rows, of_weight), P(of_rows[0], None, outputs))


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
