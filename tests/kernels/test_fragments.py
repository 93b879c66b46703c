"""Weights in the registers of a Hopper GPU: which thread has which number, by Mosaic's own layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import fragments
from dflash_jax.kernels.fragments import THREADS
from tests.kernels.plain_fragments import PLAIN


def held(layout, shape):
    """Where an array's numbers are: for 128 threads, their registers, and what a register holds, the flat index.

    By the definition of a tiled layout: the shape is cut into tiles, each tile's shape into smaller ones; then warps,
    lanes and the numbers of a register count along some axes of what came out, registers along the rest.
    """
    at = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept, cut = at.shape[: at.ndim - len(tile)], at.shape[at.ndim - len(tile) :]
        split = [size for whole, part in zip(cut, tile, strict=True) for size in (whole // part, part)]
        at = at.reshape(*kept, *split)
        first = len(kept)
        order = [*range(first), *range(first, at.ndim, 2), *range(first + 1, at.ndim, 2)]
        at = at.transpose(order)
    counted = []
    for dims in (layout.warp_dims, layout.lane_dims, (layout.vector_dim,)):
        axes = []
        for axis in dims:
            if not isinstance(axis, int):  # repeated: an axis of its own along which nothing changes
                at = np.broadcast_to(at[None], (axis.times, *at.shape))
                axis = -at.ndim
            axes.append(axis)
        counted.append(axes)
    (warps, lanes, vector) = counted
    chosen = [axis % at.ndim for axis in (*warps, *lanes)]
    rest = [axis for axis in range(at.ndim) if axis not in chosen and axis != vector[0] % at.ndim]
    found = at.transpose([*chosen, *rest, vector[0] % at.ndim])
    return found.reshape(128, -1, at.shape[vector[0]])


def test_a_layout_is_what_the_instruction_set_says():
    """Of the operand of `wgmma.m64nNk16`: thread t of a warp has columns 2 (t % 4) and the next one, of rows t / 4 and
    8 + t / 4, and the same 8 columns further."""
    found = held(fragments.layout("operand").to_mgpu(), (64, 16)).reshape(128, 2, 2, 2)
    thread, column, row, i = np.indices(found.shape)
    rows = 16 * (thread // 32) + 8 * row + thread % 32 // 4
    np.testing.assert_array_equal(found, 16 * rows + 8 * column + 2 * (thread % 4) + i)


def registers(array, name):
    layout = fragments.layout(name).to_mgpu()
    return np.asarray(array).reshape(-1)[held(layout, np.shape(array))]


STEPS = {  # the layouts of what goes in and comes out, and what happens to a register's bits
    "words": ("64", "4", 4, lambda x, i: x.view(np.int32)[..., i : i + 1]),
    "half the words": ("32", "4", 2, lambda x, i: x.view(np.int32)[..., i : i + 1]),
    "words of bfloat16": ("32", "4", 4, lambda x, i: x.view(np.int32)[..., i : i + 1]),
    "pairs": ("4", "operand", 1, lambda x, i: x.view(np.uint16)),
    "apart": ("operand", "single", 1, lambda x, i: x.reshape(128, -1, 1)),
    "unzipped": ("two", "column", 2, lambda x, i: x[..., i::2]),
    "of one column": ("1", "operand", 1, lambda x, i: np.repeat(x, 2, axis=-1)),
    "of two columns": ("2", "operand", 1, lambda x, i: np.repeat(x, 2, axis=-1)),
    "of four columns": ("4", "operand", 1, lambda x, i: np.repeat(x, 2, axis=-1)),
    "of eight columns": ("operand", "operand", 2, lambda x, i: np.repeat(x[..., i : i + 1], 2, axis=-1)),
}


@pytest.mark.parametrize("name", STEPS)
def test_renamed_registers_hold_what_plain_arrays_say(name):
    of, to, count, step = STEPS[name]
    rng = np.random.default_rng(0)
    columns = {"operand": 8, "two": 32}.get(of) or int(of)
    shape = (columns,) if of == "two" else (64,) if columns == 1 else (64, columns)
    if name in ("words", "half the words"):
        given = rng.integers(0, 256, shape, np.uint8)
    elif name == "pairs":
        given = rng.integers(-(2**31), 2**31, shape, np.int32)
    else:
        given = np.asarray(rng.standard_normal(shape), jnp.bfloat16)
    function = "words" if "words" in name else name if name in PLAIN else "twice"
    found = PLAIN[function](jnp.asarray(given))
    for i, plain in enumerate(found if isinstance(found, tuple) else (found,)):
        expected = np.asarray(plain)
        expected = expected.view(np.uint16) if name == "pairs" else expected
        np.testing.assert_array_equal(step(registers(given, of), i), registers(expected, to))
    assert count == (len(found) if isinstance(found, tuple) else 1)


def test_every_code_is_in_one_register():
    """Eight neighbors, so that they are stored as 16 bytes once they are widened."""
    found = held(fragments.layout("codes").to_mgpu(), (64, 128))
    np.testing.assert_array_equal(np.sort(found.reshape(-1)), np.arange(64 * 128))
    assert found.shape[2] == 8
    assert (np.diff(found, axis=2) == 1).all()


@pytest.mark.parametrize(("bits", "words"), [(4, 4), (4, 2), (8, 4), (8, 2), (16, 4)])
def test_inputs_are_arranged_as_threads_hold_them(bits, words):
    """Column by column: a thread's words lie where the tensor cores look for its pairs."""
    size = THREADS * words * 32 // bits
    arranged = np.asarray(fragments.arranged(jnp.arange(2.0 * size), bits, words))
    for place, number in enumerate(arranged[:size].astype(int)):
        pair, thread, half = place // 8, place % 8 // 2, place % 2
        word, pair = divmod(pair, 16 // bits)
        assert number == (thread * words + word) * 32 // bits + pair + half * 16 // bits
    np.testing.assert_array_equal(arranged[size:], arranged[:size] + size)
