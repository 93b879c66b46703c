"""Quantised weights: the product understands them, and block scales decode and encode."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint import BlockScaled
from dflash_jax.models.layers import project
from dflash_jax.quantised import Quantised


@pytest.mark.parametrize("groups", [None, 1, 4])
def test_a_product_with_a_quantised_weight(groups):
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (6, 8)).astype(np.int8)
    scale = rng.random(6 if groups is None else (6, groups)).astype(np.float32)
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    plain = values * np.repeat(scale.reshape(6, -1), 8 // (groups or 1), axis=1)
    got = project(jnp.asarray(x), Quantised(jnp.asarray(values), jnp.asarray(scale)))
    np.testing.assert_allclose(got, x @ plain.T, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "block"), [("I8", (4, 3)), ("F8_E4M3", (4, 4)), ("I8", (5, 7))])
def test_block_scales(dtype, block):
    """Any box of the matrix, the smaller blocks at its edges included; what was decoded is encoded as it was."""
    source = BlockScaled("v", "s", (10, 12), block, dtype)
    rng = np.random.default_rng(1)
    stored = source.write(rng.standard_normal((10, 12)).astype(np.float32))
    read = lambda name, box: stored[name][box]
    whole = source.read(read, (slice(0, 10), slice(0, 12)))
    for box in ((slice(0, 10), slice(5, 9)), (slice(3, 10), slice(0, 12)), (slice(9, 10), slice(11, 12))):
        np.testing.assert_array_equal(source.read(read, box), whole[box])
    again = source.write(whole)
    np.testing.assert_array_equal(again["v"].astype(np.float32), stored["v"].astype(np.float32))
    np.testing.assert_allclose(again["s"], stored["s"], rtol=1e-6)
