"""A block's queries, keys and values in one array, where the kernel for GPUs reads them so."""

import jax
import numpy as np
import pytest

from dflash_jax.kernels.block_attention import together
from dflash_jax.kernels.dispatch import using


def drawn(T, heads=(8, 2, 64)):
    N, K, H = heads
    draw = lambda seed, *size: jax.random.normal(jax.random.key(seed), size)
    return draw(0, 2, T, N, H), draw(1, 2, K, T, H), draw(2, 2, K, T, H)


@pytest.mark.parametrize("T", [1, 3, 16, 64, 65])
def test_on_a_gpu_a_block_is_one_array_of_the_same_numbers(T):
    block = q, k, v = drawn(T)
    assert together(*block) is None
    with using(None, "gpu"):
        joined = jax.jit(lambda *block: together(*block))(*block)
    part = lambda x, first: joined.rows[:, first : first + x.shape[1] * T].reshape(x.shape)
    np.testing.assert_array_equal(part(q.swapaxes(1, 2), 0), q.swapaxes(1, 2))
    np.testing.assert_array_equal(part(k, joined.first_key), k)
    np.testing.assert_array_equal(part(v, joined.first_value), v)
    np.testing.assert_array_equal(joined.rows[:, joined.first_value + 2 * T :], 0.0)


def test_where_queries_are_fewer_than_keys_it_is_not():
    q, k, v = drawn(4)
    with using(None, "gpu"):
        assert together(q[:, 2:], k, v) is None
        assert together(q, k, v[..., :32]) is None
