"""Operands of a Hopper GPU's tensor cores from weights in shared memory: quantized ones are decoded in registers, two
numbers an instruction, in bfloat16.

What is decoded is exact: whole numbers less their zero point, and small floats, whose bits are put where those of a
bfloat16 number lie, which makes them smaller by a power of two. The factor of a group multiplies them there, rounded
once. One of more digits than bfloat16 has is two numbers, its own rounding and what that leaves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from dflash_jax.quantised import BLOCK, EightBit, FourBit, Quantised

from . import fragments, tensor_cores
from .fragments import ROWS, THREADS


class Code(NamedTuple):
    """How numbers are stored.

    Attributes:
        bits: of a number.
        scales: what factors may be stored in.
        smaller: powers of two that operands are smaller by than weights.
    """

    bits: int
    scales: tuple
    smaller: int = 0


CODES = {
    "int4": Code(4, (jnp.bfloat16, jnp.float16, jnp.float32)),
    "e2m1": Code(
        4, (jnp.uint8, jnp.float8_e4m3fn), 64
    ),  # placed bits are 2^126 smaller, which no factor can make up for
    "float8_e4m3fn": Code(8, (jnp.float32, jnp.bfloat16)),
    "int8": Code(8, (jnp.bfloat16, jnp.float16, jnp.float32)),
    "bfloat16": Code(16, ()),
}


class Stored(NamedTuple):
    """What stands for a weight in memory, as a kernel gets it; E is of experts.

    Attributes:
        values: [E, N, _] in bytes, or in bfloat16.
        code: of `CODES`.
        factors: scales and, if there are, zero points or offsets: [E, N, G], or [E, N / 128, G] of blocks. Empty where
            sums are multiplied instead.
        group: inputs that share a factor.
        exponents: whether scales are exponents.
        blocks: whether 128 outputs share a factor.
        offsets: whether the second factors are what is subtracted from numbers times their scales.
    """

    values: Array
    code: str
    factors: tuple[Array, ...] = ()
    group: int = 0
    exponents: bool = False
    blocks: bool = False
    offsets: bool = False

    @property
    def words(self) -> int:
        """32-bit words of a thread in one operand."""
        return 2 if self.values.shape[-1] * self.values.dtype.itemsize % (16 * THREADS) else 4

    @property
    def columns(self) -> int:
        """Of values, in one operand."""
        return 4 * THREADS * self.words // self.values.dtype.itemsize

    @property
    def inputs(self) -> int:
        """Of an operand."""
        return 32 * THREADS * self.words // CODES[self.code].bits

    @property
    def smaller(self) -> float:
        """What sums are multiplied by."""
        return 2.0 ** CODES[self.code].smaller


def _code(weight: Array | Quantised) -> str:
    """What its numbers are called in `CODES`, if they are there."""
    if isinstance(weight, FourBit):
        return weight.code
    return str(weight.values.dtype if isinstance(weight, Quantised) else weight.dtype)


def declines(weight: Array | Quantised) -> str | None:
    """Why such a weight, or those of experts, cannot be decoded here, or None."""
    if (code := CODES.get(_code(weight))) is None:
        return f"weights in {_code(weight)}"
    inputs, groups, group = weight.shape[-1], 1, 1
    if isinstance(weight, EightBit) and weight.block is not None:
        if weight.block[0] != 1 and weight.block != (BLOCK, BLOCK):
            return f"weights in {weight.form}"
        groups, group = weight.scale.shape[-1], weight.block[1]
    elif isinstance(weight, FourBit):
        if weight.offset is not None and (weight.zero is not None or weight.code != "int4"):
            return f"offsets of {'zero points' if weight.zero is not None else weight.form}"
        if weight.zero is not None and weight.zero.dtype != jnp.uint8:
            return f"zero points in {weight.zero.dtype}; it supports whole numbers"
        groups = weight.scale.shape[-1]
        group = inputs // groups
    if (groups, group) != (1, 1) and (inputs != groups * group or (group not in (16, 32, 64) and group % BLOCK)):
        return f"{groups} groups of {inputs} inputs; it supports groups of 16, 32, 64 or multiples of {BLOCK}"
    unit = max(BLOCK // 2, min(group, BLOCK))  # the narrowest operand has 64 inputs
    if inputs % unit:
        return f"{inputs} inputs; it supports multiples of {unit}"
    scale = weight.scale.dtype if isinstance(weight, Quantised) else None
    return None if scale is None or scale in code.scales else f"scales in {scale}"


def stored(weight: Array | Quantised) -> Stored:
    """The weight in arrays of types that kernels load; of a matrix, with an axis before it."""
    if weight.ndim == 2:
        weight = jax.tree.map(lambda x: x[None], weight)
    code = _code(weight)
    if not isinstance(weight, Quantised):
        return Stored(weight, code)
    scale = weight.scale
    if isinstance(weight, EightBit):
        values = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)
        if weight.block is None:
            return Stored(values, code)
        return Stored(values, code, (scale,), weight.block[1], blocks=weight.block[0] > 1)
    assert isinstance(weight, FourBit)
    exponents = scale.dtype == jnp.uint8
    if scale.dtype == jnp.float8_e4m3fn:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    factors = tuple(x for x in (scale, weight.zero, weight.offset) if x is not None)
    group, offsets = weight.shape[-1] // scale.shape[-1], weight.offset is not None
    return Stored(weight.values, code, factors, group, exponents, offsets=offsets)


def arranged(x: Float[Array, "*B D"], weight: Stored) -> Float[Array, "*B D"]:
    """The other operand's inputs in the order of these."""
    return fragments.arranged(x, CODES[weight.code].bits, weight.words)


def load_factors(ref, weight: Stored, first, tile):
    """The factors, zero points or offsets of 64 outputs and the inputs of a tile, from memory [N, G].

    Args:
        first: of the outputs.
        tile: of `weight.inputs` inputs, counted from the first one.
    """
    count, column = weight.inputs // weight.group, tile
    if count == 0:
        column = jax.lax.div(tile, jnp.int32(weight.group // weight.inputs))
    if weight.blocks:
        return ref[jax.lax.div(first, jnp.int32(BLOCK)), column]
    rows = ref.at[pl.ds(first, ROWS)]
    if count > 1:
        name = "operand" if count == 2 * THREADS else str(count)
        return tensor_cores.load(rows.at[:, pl.ds(tile * count, count)], layout=fragments.layout(name))
    return tensor_cores.load(rows.at[:, column], axis=1)


def operand(values, factors: Sequence, weight: Stored):
    """The operand [64, inputs] of 64 outputs, from their values in shared memory, and what `load_factors` gave of each
    array; it is smaller than the weight, see `Code`."""
    found = fragments.words(tensor_cores.load(values, layout=fragments.layout(str(weight.columns))))
    high, low = _scales(factors[0], weight) if factors else (None, None)
    least = rest = None
    if weight.offsets:  # from 8, which is subtracted from the numbers, so that what is rounded is small
        scale, offset = (factor.astype(jnp.float32) for factor in factors)
        rest = fragments.twice((8.0 * scale - offset).astype(jnp.bfloat16))
    elif len(factors) > 1:
        zero = factors[1].astype(jnp.int32).astype(jnp.float32)
        least = fragments.twice((128.0 + zero).astype(jnp.bfloat16))
    parts = []
    for i, word in enumerate(found):
        at = 0 if high is None else i * len(high) // len(found)
        if weight.code == "e2m1":
            assert high is not None
            parts += [fragments.scaled(bits, high[at]) for bits in _e2m1(word)]
            continue
        if weight.code == "int4":
            numbers = _integers(word, 136.0 if least is None else least[at])
        elif weight.code == "int8":
            numbers = _bytes(word)
        elif weight.code == "bfloat16":
            numbers = [fragments.pairs(word)]
        else:
            numbers = [fragments.scaled(bits, 2.0**120) for bits in _e4m3(word)]
        parts += [_times(number, *(x and x[at] for x in (high, low, rest))) for number in numbers]
    return fragments.joined(parts)


def _times(number, high, low, rest):
    """`number * (high + low) + rest`, as far as there are these."""
    if high is None:
        return number
    if low is not None:
        rest = number * low if rest is None else fragments.fused(number, low, rest)
    return number * high if rest is None else fragments.fused(number, high, rest)


def _integers(word, least):
    """The pairs of a word's whole numbers, less what is added to make them bfloat16 numbers from 128 on. Of a number
    that is stored 8 smaller, in two's complement, that makes the highest bit the other one."""
    return [fragments.pairs(fragments.masked(_shifted(word, -4 * i), 0x000F000F, 0x43084308)) - least for i in range(4)]


def _bytes(word):
    """The same of whole numbers of eight bits in two's complement: 128 and the lower bits, less 128, or less 256 where
    the highest bit is set. That bit has the place of the last one of a bfloat16 number's exponent."""
    there = [_shifted(word, -8 * i) for i in range(2)]
    part = lambda bits, mask: fragments.pairs(fragments.masked(bits, mask, 0x43004300))
    return [part(bits, 0x007F007F) - part(bits, 0x00800080) for bits in there]


def _e2m1(word):
    """The pairs of a word's small floats, 2^126 times smaller, as the bits of bfloat16 numbers."""
    return [_placed(word, 12 - 4 * i, 6 - 4 * i, 0x01C001C0) for i in range(4)]


def _e4m3(word):
    """The same of floats of eight bits, 2^120 times smaller."""
    return [_placed(word, 8 - 8 * i, 4 - 8 * i, 0x07F007F0) for i in range(2)]


def _placed(word, sign: int, rest: int, mask: int):
    """Bits 15 and 31 of a word shifted to the left so far, and those of a mask of it shifted so far."""
    return (_shifted(word, sign) & jnp.int32(-0x7FFF8000)) | (_shifted(word, rest) & mask)


def _shifted(word, left: int):
    return word << left if left > 0 else word >> -left if left else word


def _scales(scale, weight: Stored):
    """What numbers are multiplied by, for each half of a thread's words or for all; and what rounding left of it, or
    None."""
    if weight.code == "e2m1":
        return fragments.twice(_power(scale) if weight.exponents else _small(scale)), None
    spread = fragments.alike if weight.blocks else fragments.twice
    if scale.dtype == jnp.bfloat16:
        return spread(scale), None
    wide = scale.astype(jnp.float32)
    high = wide.astype(jnp.bfloat16)
    return spread(high), spread((wide - high.astype(jnp.float32)).astype(jnp.bfloat16))


def _power(codes):
    """2.0 ** (codes - 127), as exponents are stored, times 2.0 ** (126 - 64); larger ones are as large as there is."""
    field = jnp.minimum(codes.astype(jnp.int32) + (126 - CODES["e2m1"].smaller), 254)
    return jax.lax.bitcast_convert_type(field << 23, jnp.float32).astype(jnp.bfloat16)


def _small(codes):
    """E4M3 numbers in bytes, times 2.0 ** (126 - 64); with their bits at the places of those of a float16 number they
    are 2^8 times smaller."""
    found = codes.astype(jnp.int32)
    bits = (((found & 0x80) << 8) | ((found & 0x7F) << 7)).astype(jnp.int16)
    wide = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    return (wide * 2.0 ** (8 + 126 - CODES["e2m1"].smaller)).astype(jnp.bfloat16)
