"""The instructions that place bits, run here: every byte, for both formats and both dtypes."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.kernels.grouped_matmul.small_floats import E2M1, E4M3, WIDE, placing
from dflash_jax.quantised import e2m1, e4m3

LUT_AND_OR = 0xEA


def run(text, word):
    """The two registers that PTX makes from one."""
    values = {"$2": word}
    read = lambda name: values[name] if name in values else int(name, 0)
    for line in re.findall(r"[^{};]+;", text):
        name, _, rest = line.strip(" ;").partition(" ")
        if name == ".reg":
            continue
        out, *given = (part.strip() for part in rest.split(","))
        a, b, *more = map(read, given)
        if name == "prmt.b32":
            choice = [more[0] >> 4 * i & 15 for i in range(4)]
            source = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
            values[out] = int.from_bytes(bytes(source[i] for i in choice), "little")
        elif name == "lop3.b32":
            assert more[1] == LUT_AND_OR
            values[out] = a & b | more[0]
        else:
            values[out] = {"shl.b32": int.__lshift__, "shr.b32": int.__rshift__, "and.b32": int.__and__}[name](a, b)
            values[out] &= 0xFFFFFFFF
    return values["$0"], values["$1"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kind", "shift"), [(E2M1, 0), (E2M1, 4), (E4M3, 0)])
def test_every_byte_becomes_its_number(kind, shift, dtype):
    codes = np.random.default_rng(0).permutation(256).astype(np.uint8)
    text, wide = placing(kind, shift, WIDE[dtype]), WIDE[dtype]
    words = codes.view("<u4")
    registers = np.array([run(text, int(word)) for word in words], np.uint32)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    got = registers.reshape(-1).view(kinds[dtype]).astype(np.float64) * 2.0 ** (wide.bias - kind.bias)
    whole = jnp.asarray(codes, jnp.int32)
    expected = np.asarray(e4m3(whole) if kind == E4M3 else e2m1(whole >> shift & 15), np.float64)
    finite = (codes & 0x7F) != 0x7F if kind == E4M3 else np.full(256, True)  # E4M3's NaN is none of a checkpoint's
    np.testing.assert_array_equal(got[finite], expected[finite])
    assert (np.signbit(got) == (codes >> (7 if kind == E4M3 else 3 + shift) & 1)).all()
