"""A block's queries, keys and values as parts of one array, where the kernel for GPUs reads them so."""

import jax
import numpy as np
import pytest

from dflash_jax.kernels.block_attention import together
from dflash_jax.kernels.dispatch import using


@pytest.mark.parametrize(("T", "joined"), [(16, True), (64, True), (3, False)])  # three positions are padded to a tile
def test_on_a_gpu_a_block_is_one_array_of_the_same_numbers(T, joined):
    draw = lambda seed, *size: jax.random.normal(jax.random.key(seed), size)
    block = draw(0, 2, T, 8, 64), draw(1, 2, 2, T, 64), draw(2, 2, 2, T, 64)
    assert "concatenate" not in str(jax.make_jaxpr(lambda *block: together(*block))(*block))
    with using(None, "gpu"):
        got = jax.jit(lambda *block: together(*block))(*block)
        assert ("concatenate" in str(jax.make_jaxpr(lambda *block: together(*block))(*block))) is joined
    for one, other in zip(got, block, strict=True):
        np.testing.assert_array_equal(one, other)
