"""Numbers of four and eight bits in the registers of a GPU, by putting their bits where those of a wider number lie.

A small number's sign, exponent and digits, put at the same places of a wider one, are that number times a power of two,
subnormal ones too. It takes two or three instructions a number, for two numbers at once, in place of some sixteen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from dflash_jax.quantised import e2m1, e4m3

from ..dispatch import platform


class Small(NamedTuple):
    """A format: a sign, and so many bits of exponent and of digits below it."""

    exponent: int
    digits: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.digits

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1


E2M1, E4M3 = Small(2, 1), Small(4, 3)
WIDE = {"bfloat16": Small(8, 7), "float16": Small(5, 10)}


def numbers(codes: UInt8[Array, "..."], kind: Small, shift: int, dtype: jnp.dtype) -> tuple[Float[Array, "..."], int]:
    """The numbers in bytes, times a power of two, and which one: `2.0 ** exponent` makes them what they are.

    Args:
        shift: the bit of a byte at which they begin.
        dtype: bfloat16 or float16.
    """
    if platform() == "cpu":  # the interpreter, which has no subnormal numbers
        wide = codes.astype(jnp.int32)
        return (e4m3(wide) if kind == E4M3 else e2m1((wide >> shift) & 15)).astype(dtype), 0
    wide = WIDE[jnp.dtype(dtype).name]
    (found,) = plgpu.elementwise_inline_asm(
        placing(kind, shift, wide),
        args=[codes],
        constraints="=&r,=&r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return found, wide.bias - kind.bias


def placing(kind: Small, shift: int, wide: Small) -> str:
    """PTX that makes two registers, of two wide numbers each, from the four bytes of one."""
    sign = 16 - (8 + shift + kind.bits)  # to the left: a byte lies in the upper half of its 16 bits
    others = sign - (wide.exponent - kind.exponent)  # exponent and digits stay together
    digits = ((1 << kind.bits - 1) - 1) << wide.digits - kind.digits
    lines = [".reg .b32 twice, signs, others;"]
    for out, order in (("$0", "0x1404"), ("$1", "0x3424")):
        lines.append(f"prmt.b32 twice, $2, 0, {order};")
        lines.append(_moved("signs", sign))
        lines.append(_moved("others", others))
        lines.append(f"and.b32 others, others, {digits * 0x10001:#010x};")
        lines.append(f"lop3.b32 {out}, signs, 0x80008000, others, 0xEA;")  # (signs & mask) | others
    return "{ " + " ".join(lines) + " }"


def _moved(name: str, left: int) -> str:
    """Two numbers, moved in their register."""
    return f"{'shl' if left >= 0 else 'shr'}.b32 {name}, twice, {abs(left)};"
