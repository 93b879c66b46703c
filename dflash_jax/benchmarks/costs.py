"""What a function costs, from its trace alone: operations of its products, and bytes of what is stored.

The function is traced with shapes, never run. Attention to a cache is traced as one product over all of its slots, so
a cost is that of full rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from dflash_jax.kernels.block_attention.reference import whole_caches
from dflash_jax.kernels.dispatch import using

# Operations that leave the numbers of their largest operand as they are, wherever these are then read.
_VIEWS = frozenset(
    """
    reshape transpose broadcast_in_dim squeeze convert_element_type slice dynamic_slice expand_dims copy
    sharding_constraint select_n optimization_barrier mul concatenate pjit
""".split()
)


class Cost(NamedTuple):
    """Operations of one call, and the bytes that it reads.

    Attributes:
        flops: of all products, two for a multiplication and an addition.
        bytes_read: of each argument, what products read of it, once for every time they do.
    """

    flops: float
    bytes_read: tuple[float, ...]


def cost(function: Callable[..., Any], *arguments: Any) -> Cost:
    """The cost of `function(*arguments)`; arguments are pytrees of arrays or their shapes."""
    with using("xla"), whole_caches(), jax.disable_jit(False):
        closed = jax.make_jaxpr(function)(*arguments)
    leaves = [(i, leaf) for i, argument in enumerate(arguments) for leaf in jax.tree.leaves(argument)]
    origins: list[_View | None] = [_View(i, leaf.dtype.itemsize) for i, leaf in leaves]
    count = _Count([0.0] * len(arguments))
    count.visit(closed.jaxpr, origins, 1)
    return Cost(count.flops, tuple(count.read))


class _View(NamedTuple):
    """What a value is a view of.

    Attributes:
        argument: number of it.
        itemsize: bytes that each number has there.
    """

    argument: int
    itemsize: int


class _Count:
    """Walks a trace; knows of every value which argument it is a view of, if any."""

    def __init__(self, read: list[float]):
        self.flops, self.read = 0.0, read

    def visit(self, jaxpr: Any, origins: list[_View | None], times: int) -> list[_View | None]:
        """Counts a (sub-)program run so many times; returns what its results are views of."""
        known: dict[Any, _View | None] = dict(zip(jaxpr.invars, origins, strict=True))
        of = lambda x: None if isinstance(x, Literal) else known.get(x)
        for eqn in jaxpr.eqns:
            inputs, name = [of(x) for x in eqn.invars], eqn.primitive.name
            if name == "dot_general":
                self._product(eqn, inputs, times)
            if eqn.params.get("name") == "grouped_matmul":
                self._experts(eqn, inputs, times)
                continue
            if eqn.params.get("name") == "linear":
                self._quantised(eqn, inputs, times)
                continue
            inner = _inner(eqn, inputs)
            outputs: list[_View | None] = [None] * len(eqn.outvars)
            for program, sources, repeated in inner:
                found = self.visit(program, sources, times * repeated)
                if name in ("pjit", "jit", "closed_call", "remat2", "checkpoint", "custom_jvp_call"):
                    outputs = found
            if not inner and name in _VIEWS:
                views = [v for v in eqn.invars if of(v) is not None]
                largest = max(views, key=lambda v: v.aval.size, default=None)
                outputs = [largest if largest is None else of(largest)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [of(x) for x in jaxpr.outvars]

    def _experts(self, eqn: Any, inputs: list[_View | None], times: int) -> None:
        """Which groups have rows is not known from a trace: so many as if each row had its group by chance."""
        (x, *weights, _), (rows, outputs) = (v.aval for v in eqn.invars), eqn.outvars[0].aval.shape
        groups = weights[0].shape[0]
        self.flops += 2.0 * rows * outputs * x.shape[1] * times
        hit = 1 - (1 - 1 / groups) ** rows
        for weight, origin in zip(weights, inputs[1:-1], strict=True):  # one array, or what a quantized weight has
            if origin is not None:
                self.read[origin.argument] += hit * weight.size * weight.dtype.itemsize * times

    def _quantised(self, eqn: Any, inputs: list[_View | None], times: int) -> None:
        """A product with a quantized weight, of which all arrays are read."""
        x, out = eqn.invars[0].aval, eqn.outvars[0].aval
        self.flops += 2.0 * out.size * x.shape[-1] * times
        for operand, origin in zip(eqn.invars, inputs, strict=True):
            if origin is not None:
                self.read[origin.argument] += operand.aval.size * operand.aval.dtype.itemsize * times

    def _product(self, eqn: Any, inputs: list[_View | None], times: int) -> None:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        terms = float(np.prod([shape[axis] for axis in contracted]))
        self.flops += times * 2 * terms * float(np.prod(eqn.outvars[0].aval.shape))
        for operand, origin in zip(eqn.invars, inputs, strict=True):
            if origin is not None:
                itemsize = min(origin.itemsize, operand.aval.dtype.itemsize)  # a product may read a wider copy
                self.read[origin.argument] += times * operand.aval.size * itemsize


def _inner(eqn: Any, inputs: list[_View | None]) -> list[tuple[Any, list[_View | None], int]]:
    """Programs inside an operation: each with what its inputs are views of, and how often it runs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [(params["jaxpr"].jaxpr, inputs, params["length"])]
    if name == "while":  # once: loops over a cache are traced as one pass
        skip, constants = params["cond_nconsts"], params["body_nconsts"]
        return [(params["body_jaxpr"].jaxpr, inputs[skip : skip + constants] + inputs[skip + constants :], 1)]
    if name == "cond":  # as if no row asked for anything
        return [(params["branches"][0].jaxpr, inputs[1:], 1)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return [(getattr(params[key], "jaxpr", params[key]), inputs, 1)]
    return []
