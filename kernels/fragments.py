"""Weights in the registers of a Hopper GPU's warpgroup, as its tensor cores take an operand.

For each of 64 outputs four threads share what stands in 64 bytes (or 32), 16 bytes each, and each makes its part of the
operand from them: no number changes its thread. The tensor cores want two neighbors of every eight columns from a
thread, so an operand has its inputs in another order than the bytes. The other operand, which is smaller, is put in
that order beforehand, by `arranged`.

Here are the steps that only rename registers, or have an instruction of their own. Each says what it gives for plain
arrays, which is all that the interpreter needs.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from . import tensor_cores

ROWS = 64  # outputs of a warpgroup's operand
THREADS = 4  # that share what stands of an output in one operand


def arranged(x: Float[Array, "*B D"], bits: int, words: int) -> Float[Array, "*B D"]:
    """Inputs in the order in which weights of so many bits give them to the tensor cores; D is a multiple of what an
    operand has.

    A thread has so many words of 32 bits. Of each it makes pairs: the numbers whose places in the word are 16 bits
    apart.
    """
    parts = x.reshape(*x.shape[:-1], -1, THREADS, words, 2, 16 // bits)
    return jnp.moveaxis(parts, (-4, -2), (-2, -1)).reshape(x.shape)


def layout(name: str):
    """A layout of Mosaic's, of 64 rows: "operand" of [64, 8 n], "single", which has a register for every number; or as
    many columns as are said, side by side in a register of each of four threads, or each for several threads. "codes"
    of [64, 64 n] gives a thread eight neighbors. "column" is a number for each column of an operand, "two" are two."""
    from jax.experimental.mosaic.gpu import fragmented_array as mosaic
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if name == "operand":
        return plgpu.Layout.WGMMA
    if name == "1":
        return plgpu.Layout.WGMMA.reduce(1)
    if name == "column":
        return plgpu.Layout.WGMMA.reduce(0)
    if name == "two":
        every = mosaic.Replicated(4), mosaic.Replicated(8)
        tiling = mosaic.Tiling(((16,), (4,)))
        return plgpu.Layout.TILED(tiling, warp_dims=every[:1], lane_dims=(every[1], -2), vector_dim=-1)
    if name == "single":
        tiling = mosaic.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1)
    if name == "codes":
        tiling = mosaic.Tiling(((64, 64), (16, 64), (4, 64), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
    columns = int(name)
    tiling = mosaic.Tiling(((64, columns), (16, columns), (8, columns), (max(1, columns // THREADS),)))
    repeated = [mosaic.Replicated(THREADS // columns)] if columns < THREADS else []
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2, *repeated), vector_dim=-1)


def renamed(step, of: tuple[str, ...], *to: tuple[str, tuple[int, ...], DTypeLike]):
    """A function of arrays in layouts `of`, whose results have these layouts, shapes and types.

    Args:
        step: of one register of each array; gives those of each result.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mosaic
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kinds = tuple(plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout(name)) for name, shape, dtype in to)

    @plgpu.inline_mgpu(arg_types=tuple(map(layout, of)), return_type=kinds)
    def run(_, *arrays):
        found = [step(*registers) for registers in zip(*(array.registers.flat for array in arrays), strict=True)]
        results = []
        for (name, shape, dtype), registers in zip(to, zip(*found, strict=True), strict=True):
            there = np.empty(layout(name).to_mgpu().registers_shape(shape), object)
            there.flat[:] = list(itertools.chain(*registers))
            signed = True if jnp.issubdtype(dtype, jnp.integer) else None
            at = layout(name).to_mgpu()
            results.append(mosaic.FragmentedArray(_registers=there, _layout=at, _is_signed=signed))
        return tuple(results)

    return run


def instruction(text: str, *registers):
    """What an instruction makes of registers of 32 bits, in PTX; of the type of the first one."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    word = ir.IntegerType.get_signless(32)
    one = ir.VectorType.get((1,), word)
    inside = [vector.extract(vector.bitcast(one, register), [], [0]) for register in registers]
    found: Any = llvm.inline_asm(word, inside, text, ",".join(["=r", *["r"] * len(registers)]))
    return vector.bitcast(registers[0].type, vector.broadcast(one, found))


def words(stored):
    """Arrays [64, 4] of the 32-bit words of rows of 64 bytes, four, or of 32, two: the i-th has the i-th word of every
    thread."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    count = stored.shape[1] * stored.dtype.itemsize // (4 * THREADS)

    def step(register):
        word = ir.IntegerType.get_signless(32)
        whole = vector.bitcast(ir.VectorType.get((count,), word), register)
        one = ir.VectorType.get((1,), word)
        return [[vector.extract_strided_slice(one, whole, [i], [1], [1])] for i in range(count)]

    return renamed(step, (str(stored.shape[1]),), *[("4", (ROWS, 4), jnp.int32)] * count)(stored)


def masked(word, mask: int, turned: int):
    """`word & mask ^ turned`: one instruction, where compilers make two of constants."""
    step = lambda register: [[instruction(f"lop3.b32 $0, $1, {mask:#x}, {turned:#x}, 0x6A;", register)]]
    return renamed(step, ("4",), ("4", (ROWS, 4), jnp.int32))(word)[0]


def pairs(word):
    """The two bfloat16 numbers of each word, that of its lower half first: [64, 4] as [64, 8]."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    step = lambda register: [[vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), register)]]
    return renamed(step, ("4",), ("operand", (ROWS, 8), jnp.bfloat16))(word)[0]


def scaled(word, factor):
    """`pairs(word) * factor`, of subnormal numbers, too."""
    return pairs(word) * factor


def twice(x):
    """Operands [64, 8] whose neighbors are alike, of bfloat16 numbers: one of [64], [64, 2] or [64, 4], in which a
    column serves as many threads as there are left; or two of [64, 8], of the even columns and of the odd ones."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    columns = x.shape[1] if x.ndim == 2 else 1
    count = 2 if columns == 8 else 1

    def step(register):
        both = ir.VectorType.get((2,), ir.BF16Type.get())
        return [[vector.broadcast(both, vector.extract(register, [], [i]))] for i in range(count)]

    of = "operand" if columns == 8 else str(columns)
    return renamed(step, (of,), *[("operand", (ROWS, 8), jnp.bfloat16)] * count)(x)


def alike(x):
    """An operand [64, 8] of one number, in a tuple as `twice` has it."""
    return (tensor_cores.full((ROWS, 8), x, dtype=x.dtype),)


def fused(a, b, c):
    """`a * b + c` of bfloat16 operands, rounded once: one instruction, where compilers make several in float32."""
    step = lambda *registers: [[instruction("fma.rn.bf16x2 $0, $1, $2, $3;", *registers)]]
    return renamed(step, ("operand",) * 3, ("operand", a.shape, a.dtype))(a, b, c)[0]


def unzipped(x):
    """The even and the odd ones of numbers in the layout "two"."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    def step(register):
        both = ir.VectorType.get((2,), ir.F32Type.get())
        numbers = [vector.extract(register, [], [i]) for i in range(4)]
        return [[vector.from_elements(both, numbers[i::2])] for i in range(2)]

    return renamed(step, ("two",), *[("column", (x.shape[0] // 2,), x.dtype)] * 2)(x)


def joined(parts):
    """Operands [64, 8] side by side."""
    from jax.experimental.mosaic.gpu import fragmented_array as mosaic
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kind = plgpu.ShapeDtypeStruct((ROWS, 8 * len(parts)), parts[0].dtype, layout=layout("operand"))

    @plgpu.inline_mgpu(arg_types=(layout("operand"),) * len(parts), return_type=kind)
    def run(_, *arrays):
        registers = np.concatenate([array.registers for array in arrays], axis=1)
        return mosaic.FragmentedArray(_registers=registers, _layout=layout("operand").to_mgpu(), _is_signed=None)

    return run(*parts)


def apart(x):
    """Sums of the tensor cores, [64, 8 n], with a register for every number."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    def step(register):
        one = ir.VectorType.get((1,), ir.F32Type.get())
        return [[vector.extract_strided_slice(one, register, [i], [1], [1]) for i in range(2)]]

    return renamed(step, ("operand",), ("single", x.shape, x.dtype))(x)[0]
