"""XLA forms that read a quantized weight as it is stored, and where they can do not write it in a wider dtype.

- A scale for each output multiplies sums. XLA widens the stored numbers where it multiplies them, on GPUs and TPUs.
- A scale for each block of outputs and inputs multiplies the inputs, once for each block of outputs.
- Of a single row on a GPU, weights with several scales for an output are dequantized where their products are added
  (`by_one`); of a few rows see `xla_gpu`.
- On CPUs, which would widen all of a weight first, whole numbers are multiplied by whole numbers: the inputs become
  three digits of eight bits each. Their sums are exact, so a row has the same bits beside whatever other rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from dflash_jax.quantised import EightBit, FourBit, Quantised

from ..dispatch import platform
from ..products import FEW_ROWS, product

DIGITS, BASE = 3, 254  # of an input: 127 is the largest, and the next one counts 254 times less
MOST_ROWS = 1024  # that are split into digits
MOST_INPUTS = 2**31 // 127**2  # whose products have a sum in 32 bits


def linear(x: Float[Array, "B T D"], weight: Quantised) -> Float[Array, "B T M"]:
    """See `api.linear`; dequantized first where no other form serves."""
    found = _as_stored(x, weight)
    return dense(x, weight.astype(x.dtype)) if found is None else found


def dense(x: Float[Array, "B T D"], weight: Float[Array, "M D"]) -> Float[Array, "B T M"]:
    """`x @ weight.T` accumulated and returned in float32.

    For a decoding block the weight stands on the left, because on CPU a [M, D] x [D, 16] product runs up
    to twice as fast as the same product written [16, D] x [D, M]. Beyond `FEW_ROWS` it is the other way round, and on
    GPUs, too, where it spares the kernels that turn what comes out. Products of float32 are exact to float32.
    """
    if x.shape[0] * x.shape[1] > FEW_ROWS or platform() == "gpu":
        return product("btd,md->btm", x, weight)
    return jnp.moveaxis(product("md,btd->mbt", weight, x), 0, -1)


def _as_stored(x: Float[Array, "B T D"], weight: Quantised) -> Float[Array, "B T M"] | None:
    """None where the weight has to be dequantized first."""
    rows = x.shape[0] * x.shape[1]
    if isinstance(weight, FourBit) and weight.order is not None:
        return linear(x[..., weight.order], weight.replace(order=None))
    if rows == 1 and platform() == "gpu" and (isinstance(weight, FourBit) or in_groups(weight)):
        return by_one(x, weight)
    if not isinstance(weight, EightBit):
        return None
    if weight.block is None:
        digits = platform() == "cpu" and weight.values.dtype == jnp.int8 and rows <= MOST_ROWS
        scale = weight.scale.astype(jnp.float32)[None, None]
        if digits and x.shape[2] < MOST_INPUTS:
            return _by_itself(in_digits(_computed_once(x), weight.values) * scale)
        return product("btd,md->btm", x, weight.values.astype(x.dtype)) * scale
    if platform() == "cpu" or rows > FEW_ROWS or in_groups(weight) or x.dtype == jnp.float16:
        return None  # float16 has too few exponents for an input times a scale
    return blocks(x, weight)


def in_groups(weight: Quantised) -> bool:
    """Whether an output has several scales of its own."""
    return isinstance(weight, EightBit) and weight.block is not None and weight.block[0] == 1


def by_one(x: Float[Array, "1 1 D"], weight: Quantised) -> Float[Array, "1 1 M"]:
    """Of one row, as a sum of products: there XLA:GPU dequantizes where it adds. For a matrix product it would write
    the dequantized weight first. As in `xla_gpu`, no product of a number and its scale is rounded."""
    wide = weight.astype(jnp.dtype(jnp.float32))
    return jnp.sum(x[0].astype(jnp.float32) * wide, axis=-1)[None, None]


def blocks(x: Float[Array, "B T D"], weight: EightBit) -> Float[Array, "B T M"]:
    """With a scale for each block of outputs and inputs; the last block of either may be smaller."""
    assert weight.block is not None
    (height, width), (M, D) = weight.block, weight.shape
    rows, whole = x.reshape(-1, D), M // height
    scale = jnp.repeat(weight.scale.astype(jnp.float32), width, axis=1)[:, :D]
    scaled = (rows.astype(jnp.float32)[None] * scale[:, None]).astype(x.dtype)
    values = weight.values.astype(x.dtype)
    out = product("nmd,nod->nmo", scaled[:whole], values[: whole * height].reshape(whole, height, D))
    out = jnp.moveaxis(out, 0, 1).reshape(len(rows), -1)
    if whole * height < M:
        out = jnp.concatenate([out, product("md,od->mo", scaled[whole], values[whole * height :])], axis=1)
    return out.reshape(*x.shape[:2], M)


@jax.custom_vjp
def in_digits(x: Float[Array, "B T D"], values: Int8[Array, "M D"]) -> Float[Array, "B T M"]:
    """`x @ values.T`, as exact as in float32: a row is its largest number times digits, of which three have 23 bits."""
    (B, T, D), M = x.shape, values.shape[0]
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    unit = jnp.where(largest == 0, 1.0, largest) / 127
    unit = jnp.where(
        jnp.any(jnp.isnan(wide), axis=-1, keepdims=True), jnp.nan, unit
    )  # a CPU's maximum may be of others
    rest, digits = wide / unit, []
    for _ in range(DIGITS):
        digit = jnp.round(rest)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) * BASE
    both = jnp.stack(digits, axis=2).reshape(B * T * DIGITS, D)
    sums = jax.lax.dot_general(both, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32).reshape(B, T, DIGITS, M)
    total = sums[:, :, -1]
    for i in reversed(range(DIGITS - 1)):
        total = sums[:, :, i] + _by_itself(total / BASE)
    return total * unit


def _computed_once(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The same rows, which are read several times; XLA may compute them for each reader anew, and round them otherwise.
    It does not look through a condition on one of them; this one is always true."""
    first = x[0, 0, 0]
    return jax.lax.cond(jnp.isnan(first) | (first <= jnp.inf), lambda x: x, lambda x: -x, x)


def _by_itself(products: Float[Array, "..."]) -> Float[Array, "..."]:
    """The same products, to which something is added. LLVM makes one operation of both, with one rounding less, where
    a program has them in one loop; other programs have not, and a token would depend on it. A minimum stays between."""
    return jnp.minimum(products, jnp.finfo(jnp.float32).max)


def _forward(x: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    return in_digits(x, values), (x, values)


def _backward(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, np.ndarray]:
    x, values = operands
    found = product("btm,md->btd", cotangent, values.astype(cotangent.dtype))
    return found.astype(x.dtype), np.zeros(values.shape, jax.dtypes.float0)


in_digits.defvjp(_forward, _backward)
