"""Implementation for Hopper (Pallas, Mosaic GPU) for weights of four bits, or eight with a scale for few inputs, and a
few rows.

See `kernels.streamed`. Where the outputs give too few thread blocks for a GPU, the inputs are divided, and XLA adds the
parts, in order.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.quantised import EightBit, FourBit, Quantised

from .. import operands, streamed

WARPGROUPS = 2
OUTPUTS = WARPGROUPS * streamed.ROWS  # of a thread block
BLOCKS = 132  # thread blocks that there are at least, if the inputs allow: an H100 has as many cores


def declines(x: Float[Array, "B T D"], weight: Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if (isinstance(weight, EightBit) and weight.block is None) or weight.values.ndim != 2:
        return f"weights in {weight.form} of {len(weight.shape)} axes; it supports matrices with a scale for few inputs"
    if why := streamed.missing(x.dtype, x.shape[0] * x.shape[1]):
        return why
    if weight.shape[0] % OUTPUTS:
        return f"{weight.shape[0]} outputs; it supports multiples of {OUTPUTS}"
    return operands.declines(weight)


def linear(x: Float[Array, "B T D"], weight: Quantised) -> Float[Array, "B T M"]:
    """See `api.linear`."""
    (B, T, D), N, stored = x.shape, weight.shape[0], operands.stored(weight)
    rows, order, gain = x.reshape(B * T, D), None, None
    if isinstance(weight, FourBit):
        order, gain = weight.order, weight.gain
    rows = rows if order is None else rows[:, order]
    rows = operands.arranged(jnp.pad(rows, ((0, -B * T % 8), (0, 0))), stored)
    found = streamed.multiply(rows[None], stored, warpgroups=WARPGROUPS, parts=-(-BLOCKS // (N // OUTPUTS)))
    total = found[0, 0]
    for part in found[1:]:
        total = total + part[0]
    total = total[: B * T] * stored.smaller
    if gain is not None:
        total = total * gain.astype(jnp.float32)[None]
    return total.reshape(B, T, N)
