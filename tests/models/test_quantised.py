"""Quantized weights: the product understands them, and block scales decode and encode."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint import Packed, Scaled, Stored
from dflash_jax.kernels.grouped_matmul import grouped_matmul
from dflash_jax.models.layers import project
from dflash_jax.quantised import EightBit, FourBit


@pytest.mark.parametrize("groups", [None, 1, 4])
def test_a_product_with_a_quantised_weight(groups):
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (6, 8)).astype(np.int8)
    scale = rng.random(6 if groups is None else (6, groups)).astype(np.float32)
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    plain = values * np.repeat(scale.reshape(6, -1), 8 // (groups or 1), axis=1)
    got = project(
        jnp.asarray(x),
        EightBit(jnp.asarray(values), jnp.asarray(scale), block=None if groups is None else (1, 8 // groups)),
    )
    np.testing.assert_allclose(got, x @ plain.T, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "block"), [("I8", (4, 3)), ("F8_E4M3", (4, 4)), ("I8", (5, 7))])
def test_block_scales(dtype, block):
    """Any box of the matrix, the smaller blocks at its edges included; what was decoded is encoded as it was."""
    rng, shape = np.random.default_rng(1), (-(-10 // block[0]), -(-12 // block[1]))
    source = Scaled(Stored("v", (10, 12), (dtype,)), Stored("s", shape), block)
    stored = source.write(rng.standard_normal((10, 12)).astype(np.float32))
    read = lambda name, box: stored[name][box]
    whole = source.read(read, (slice(0, 10), slice(0, 12)))
    for box in ((slice(0, 10), slice(5, 9)), (slice(3, 10), slice(0, 12)), (slice(9, 10), slice(11, 12))):
        np.testing.assert_array_equal(source.read(read, box), whole[box])
    again = source.write(whole)
    np.testing.assert_array_equal(again["v"].astype(np.float32), stored["v"].astype(np.float32))
    np.testing.assert_allclose(again["s"], stored["s"], rtol=1e-6)


def in_int4(E, N, D):
    """Random numbers with their scales, packed, and plain."""
    rng = np.random.default_rng(2)
    numbers = rng.integers(-8, 8, (E, N, D))
    scale = np.asarray(rng.random((E, N, D // 32)) + 0.5, "bfloat16")
    words = sum((numbers[..., i::8] & 15) << 4 * i for i in range(8)).astype(np.uint32).view(np.uint8)
    return FourBit(jnp.asarray(words), jnp.asarray(scale)), numbers * np.repeat(scale.astype(np.float32), 32, axis=2)


def test_numbers_of_four_bits():
    """Every number in every place of a word; the last one reaches the sign."""
    packed, plain = in_int4(3, 40, 64)
    assert packed.shape == (3, 40, 64)
    assert set(np.unique(np.asarray(packed.values) >> 4)) == set(range(16))
    np.testing.assert_array_equal(packed.astype(jnp.dtype("float32")), plain)
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    one = FourBit(packed.values[0], packed.scale[0])
    np.testing.assert_allclose(project(jnp.asarray(x), one), x @ plain[0].T, rtol=1e-5, atol=1e-5)


def test_experts_of_four_bits():
    """XLA multiplies them expert by expert; the other kernels decline by name."""
    packed, plain = in_int4(4, 48, 96)
    sizes, x = [3, 0, 5, 1], np.random.default_rng(0).standard_normal((12, 96)).astype(np.float32)
    group = np.repeat(np.arange(4), sizes)
    expected = np.zeros((12, 48))
    expected[:9] = np.einsum("md,mnd->mn", x[:9].astype(np.float64), plain[group])
    np.testing.assert_allclose(
        grouped_matmul(jnp.asarray(x), packed, jnp.asarray(np.cumsum(sizes), jnp.int32)), expected, atol=1e-4
    )
    rows = jnp.asarray(x, jnp.bfloat16)
    for implementation in ("tpu", "gpu"):
        with pytest.raises(ValueError, match="does not support this case: weights in INT4"):
            grouped_matmul(rows, packed, jnp.asarray(np.cumsum(sizes), jnp.int32), implementation=implementation)


def test_packed_words_come_with_a_shape():
    source = Packed("experts.0.down_proj.weight", (40, 32))
    words = np.arange(1280, dtype=np.int32).astype(np.uint8).reshape(40, 32)
    stored = source.write(words)
    assert {name: x.shape for name, x in stored.items()} == {name: shape for name, (shape, *_) in source.stored.items()}
    assert stored["experts.0.down_proj.weight_shape"].tolist() == [40, 64]
    read = lambda name, box: stored[name][box]
    np.testing.assert_array_equal(source.read(read, (slice(3, 9), slice(0, 32))), words[3:9])
    np.testing.assert_array_equal(source.read(read, (slice(3, 9), slice(6, 21))), words[3:9, 6:21])
