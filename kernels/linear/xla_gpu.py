"""Implementation for GPUs in XLA, for a few rows and whole numbers of 4 and 8 bits with a scale for each group.

XLA widens stored numbers where it multiplies them, if nothing else is done to them. So each group is multiplied by
itself, and its scale multiplies the sum. What is subtracted from the numbers of a group is subtracted from their sum,
as often as their inputs say. Numbers of four bits are XLA's own int4.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.quantised import EightBit, FourBit, Quantised

from ..dispatch import platform
from ..products import FEW_ROWS, product
from .reference import in_groups
from .trial import rows_of

PASSES = 2  # over a weight, at most: dequantized, it is written and read, and has four times the bytes
CAPABILITY = 8  # major, from which on XLA multiplies so


def declines(x: Float[Array, "B T D"], weight: Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    four = isinstance(weight, FourBit) and weight.code == "int4"
    if weight.values.ndim != 2 or not (four or (in_groups(weight) and weight.values.dtype == jnp.int8)):
        return f"weights in {weight.form} of {len(weight.shape)} axes; it supports matrices of whole numbers in groups"
    if four and jax.__version_info__ < (0, 12):
        return f"jax {jax.__version__}, whose XLA ends the process at it; it supports 0.12 and later"
    if platform() == jax.default_backend() == "gpu":
        found = jax.devices()[0].compute_capability
        if int(float(found)) < CAPABILITY:
            return f"compute capability {found}; it supports {CAPABILITY}.0 and later"
    if weight.shape[-1] % _group(weight):
        return f"{weight.shape[-1]} inputs; it supports multiples of {_group(weight)}"
    count, most = x.shape[0] * x.shape[1], min(FEW_ROWS, PASSES * _at_once(weight))
    return None if count > 1 and rows_of(count) <= most else f"{count} rows; it supports 2 to {most}"


def linear(x: Float[Array, "B T D"], weight: Quantised) -> Float[Array, "B T M"]:
    """See `api.linear`. There is a sum for each row and group; so many rows are taken at once that these sums have no
    more bytes than the weight. A single row is better served by `reference.by_one`."""
    assert isinstance(weight, (EightBit, FourBit))
    if isinstance(weight, FourBit) and weight.order is not None:
        x, weight = x[..., weight.order], weight.replace(order=None)
    rows, each, found = x.reshape(-1, x.shape[-1]), _at_once(weight), []
    for i in range(0, len(rows), each):
        if found:  # the sums of the rows before are no longer there
            rows, found[-1] = jax.lax.optimization_barrier((rows, found[-1]))
        found.append(_multiply(rows[i : i + each], weight))
    return jnp.concatenate(found).reshape(*x.shape[:2], -1)


def _multiply(rows: Float[Array, "N D"], weight: EightBit | FourBit) -> Float[Array, "N M"]:
    numbers, least, offset, gain, group = weight.values, None, None, None, _group(weight)
    if isinstance(weight, FourBit):
        numbers = jax.lax.bitcast_convert_type(weight.values, jnp.int4)
        least, offset, gain = weight.least, weight.offset, weight.gain
    rows = rows.reshape(len(rows), -1, group)
    sums = product("ngd,mgd->gnm", rows, numbers.astype(rows.dtype).reshape(*weight.scale.shape, group))
    inputs = jnp.sum(rows.astype(jnp.float32), axis=-1).T[..., None]
    each = lambda factor: factor.astype(jnp.float32).T[:, None]  # of every group and output
    if least is not None:
        sums = sums - inputs * each(least)
    sums = sums * each(weight.scale)
    if offset is not None:
        sums = sums - inputs * each(offset)
    total = jnp.sum(sums, axis=0)
    return total if gain is None else total * gain.astype(jnp.float32)[None]


def _group(weight: Quantised) -> int:
    """Inputs that share a scale."""
    if isinstance(weight, EightBit):
        assert weight.block is not None
        return weight.block[1]
    return weight.shape[-1] // weight.scale.shape[-1]


def _at_once(weight: Quantised) -> int:
    """Rows whose sums have no more bytes than the weight."""
    return _group(weight) * (1 if isinstance(weight, FourBit) else 2) // 8
