"""Stretches of a cache that are attended to apart, merged: what XLA does after the kernel for Hopper.

Shapes: B rows, K key-value heads, Q queries of one of them, Hv head dim of values.
"""

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

WRITTEN_OUT = 16  # stretches at most whose results are merged one by one
LOG2_E = math.log2(math.e)
LOWEST = -(2.0**30)  # exponent of two, of what nothing was seen of


def merged(
    out: Float[Array, "B K _ Q Hv"],
    exponent: Float[Array, "B K _ Q"],
    total: Float[Array, "B K _ Q"],
    sinks: Float[Array, "1 K Q"] | None,
) -> tuple[Float[Array, "B K Q Hv"], Float[Array, "B K Q"]]:
    """Unnormalized values and sums of exponentials of all stretches together, all divided by the same 2**n.

    XLA makes a single kernel of that if few stretches are written out one by one, and if their weights are cheap: it
    computes them again for each value. Exponentials would get a launch of their own. Powers of two are shifts.
    """
    few = range(exponent.shape[2]) if exponent.shape[2] <= WRITTEN_OUT else ()
    highest = reduce(jnp.maximum, [exponent[:, :, i] for i in few]) if few else jnp.max(exponent, axis=2)
    of_sinks = None if sinks is None else scaled(sinks)
    if of_sinks is not None:
        highest = jnp.maximum(highest, of_sinks[1])
    if few:
        weights = [_power_of_two(exponent[:, :, i] - highest) for i in few]
        values = reduce(jnp.add, [weight[..., None] * out[:, :, i] for i, weight in enumerate(weights)])
        sums = reduce(jnp.add, [weight * total[:, :, i] for i, weight in enumerate(weights)])
    else:
        weights = _power_of_two(exponent - highest[:, :, None])
        values, sums = jnp.sum(weights[..., None] * out, axis=2), jnp.sum(weights * total, axis=2)
    if of_sinks is None:
        return values, sums
    return values, sums + of_sinks[0] * _power_of_two(of_sinks[1] - highest)


def scaled(score: Float[Array, "*S"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """A score's exponential as `x * 2**n`: x, between 1/2 and 2, and n, a whole number.

    The error of x is about that of a rounding of the score.
    """
    exponent = jnp.maximum(score * LOG2_E, LOWEST).astype(jnp.int32).astype(jnp.float32)
    return jnp.exp(score - exponent / LOG2_E), exponent


def _power_of_two(exponent: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """2**n for whole numbers n <= 0; 0 below n = -126."""
    return jax.lax.bitcast_convert_type(jnp.maximum(exponent + 127, 0).astype(jnp.int32) << 23, jnp.float32)
