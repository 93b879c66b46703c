"""Implementation for Hopper (Pallas, Mosaic GPU): each active expert's weights are read once (`kernels.streamed`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.quantised import EightBit, FourBit, Quantised

from .. import operands, streamed

WARPGROUPS = 2, 3, 1  # of a thread block, the preferred ones first
BLOCKS = 132  # thread blocks that there are at least, if possible: an H100 has as many cores


def declines(x: Float[Array, "X T D"] | jax.ShapeDtypeStruct, weights: Array | Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if why := streamed.missing(x.dtype, x.shape[1]):
        return why
    if isinstance(weights, FourBit) and weights.order is not None:
        return "inputs in an order of their own"
    if weights.shape[1] % streamed.ROWS:
        return f"{weights.shape[1]} outputs; it supports multiples of {streamed.ROWS}"
    return operands.declines(weights)


def multiply(
    x: Float[Array, "X T D"], weights: Float[Array, "E N D"] | Quantised, slots: Int[Array, " S1"]
) -> Float[Array, "S T N"]:
    """See `api.multiply`."""
    T, N, stored = x.shape[1], weights.shape[1], operands.stored(weights)
    rows = operands.arranged(jnp.pad(x, ((0, 0), (0, -T % 8), (0, 0))), stored)
    fitting = [n for n in WARPGROUPS if N % (n * streamed.ROWS) == 0]
    count = slots.shape[0] - 1
    warpgroups = next((n for n in fitting if N // (n * streamed.ROWS) * count >= BLOCKS), 1)
    found = streamed.multiply(rows, stored, slots, warpgroups=warpgroups)[0, :, :T] * stored.smaller
    gain = None
    if isinstance(weights, FourBit):
        gain = weights.gain
    elif isinstance(weights, EightBit) and weights.block is None:
        gain = weights.scale
    return found if gain is None else found * gain[slots[:-1]].astype(jnp.float32)[:, None]
