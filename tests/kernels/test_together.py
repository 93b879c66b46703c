"""A block's queries, keys and values in one array, where the kernel for GPUs reads them so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import KV
from dflash_jax.kernels.block_attention import together
from dflash_jax.kernels.dispatch import using


def drawn(T, heads=(8, 2, 64), slots=128):
    N, K, H = heads
    draw = lambda seed, *size: jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)
    cache = KV(*[jnp.zeros((2, K, slots, H), jnp.bfloat16)] * 2)
    return draw(0, 2, T, N, H), draw(1, 2, K, T, H), draw(2, 2, K, T, H), cache


@pytest.mark.parametrize("T", [1, 3, 16, 64, 65])
def test_on_a_gpu_a_block_is_one_array_of_the_same_numbers(T):
    block = q, k, v, _ = drawn(T)
    assert together(*block) is None
    with using(None, "gpu"):
        joined = jax.jit(lambda *block: together(*block))(*block)
    queries, keys, first_key, first_value = joined.places
    assert {x % 8 for x in (*joined.places, joined.rows.shape[1])} == {0}  # whole tiles

    def part(x, first, every):
        """For each key-value head of what lies there, its rows; the rest are zeros."""
        found = joined.rows[:, first : first + 2 * every].reshape(2, 2, every, 64)
        np.testing.assert_array_equal(found[:, :, x.shape[2] :], 0.0)
        np.testing.assert_array_equal(found[:, :, : x.shape[2]], x)

    part(q.swapaxes(1, 2).reshape(2, 2, 4 * T, 64), 0, queries)
    part(k, first_key, keys)
    part(v, first_value, keys)
    np.testing.assert_array_equal(joined.rows[:, first_value + 2 * keys :], 0.0)


def test_where_queries_are_fewer_than_keys_it_is_not():
    q, k, v, cache = drawn(4)
    with using(None, "gpu"):
        assert together(q[:, 2:], k, v, cache) is None


def test_where_another_kernel_runs_it_is_not():
    with using(None, "gpu"):
        assert together(*drawn(4, slots=100)) is None
        assert together(*drawn(4, heads=(8, 2, 96))) is None
