"""Every implementation of the grouped product against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.costs import cost
from dflash_jax.config import ExpertsConfig
from dflash_jax.kernels.grouped_matmul import grouped_matmul, reference
from dflash_jax.kernels.grouped_matmul.trial import Trial
from dflash_jax.models.experts import Experts
from tests.chips import topology

SIZES = {
    "one row": ([0, 1, 0, 0], 1),
    "a block": ([5, 0, 9, 2], 16),
    "idle rows": ([3, 0, 0, 1], 24),
    "no rows at all": ([0, 0, 0, 0], 8),
    "all in one group": ([0, 0, 40, 0], 40),
    "many": ([100, 7, 0, 393], 512),
}


def case(sizes, rows, N, D, dtype):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((rows, D)), rng.standard_normal((len(sizes), N, D))
    x, weights = (np.asarray(a, dtype) for a in (x, weights))
    expected, start = np.zeros((rows, N)), 0
    for group, size in enumerate(sizes):
        at = slice(start, start + size)
        expected[at] = x[at].astype(np.float64) @ weights[group].astype(np.float64).T
        start += size
    x[start:] = np.inf  # what belongs to no group may be anything
    return jnp.asarray(x), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32), expected


def check(got, expected, dtype):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla(name, dtype):
    x, weights, sizes, expected = case(*SIZES[name], 48, 40, dtype)
    check(jax.jit(grouped_matmul)(x, weights, sizes), expected, dtype)


@pytest.mark.parametrize("name", ["a block", "idle rows"])
def test_the_loop_and_xlas_own_operation_agree(name):
    """Elsewhere than on CPU the second one runs."""
    x, weights, sizes, expected = case(*SIZES[name], 48, 40, "float32")
    inside = np.arange(len(x))[:, None] < sum(SIZES[name][0])
    x = jnp.where(inside, x, 0)
    check(np.where(inside, reference.ragged(x, weights, sizes), 0), expected, "float32")


@pytest.mark.parametrize("name", SIZES)
def test_tpu(name):
    x, weights, sizes, expected = case(*SIZES[name], 256, 384, "bfloat16")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = grouped_matmul(x, weights, sizes, implementation="tpu")
    check(got, expected, "bfloat16")


def test_declines_by_name():
    x, weights, sizes = jnp.zeros((8, 128)), jnp.zeros((2, 128, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="rows in float32"):
        grouped_matmul(x, weights, sizes, implementation="tpu")
    x, weights = x[:, :100].astype(jnp.bfloat16), weights[:, :, :100].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="weights of 128 x 100"):
        grouped_matmul(x, weights, sizes, implementation="tpu")


def test_no_weights_are_widened_and_no_product_is_dense():
    """On CPU: memory does not grow with the experts."""
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.jit(grouped_matmul).lower(spec(128, 256), spec(64, 512, 256), sizes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * 512 * 256  # the weights of three


def test_a_trial_is_the_call_in_small():
    trial = Trial.of(jnp.zeros((4096, 64)), jnp.zeros((128, 96, 64)))
    out = trial.run("xla")
    assert out.shape == (256, 96)
    assert bool(jnp.any(out != 0))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "N", "D"), [(16, 1536, 2048), (128, 2048, 768), (4096, 1536, 2048)])
def test_the_tpu_compiler(rows, N, D):
    """Qwen3-Coder-30B-A3B's experts on a v5e: a single token, a block, a chunk of a prompt."""
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    call = lambda x, w, sizes: grouped_matmul(x, w, sizes, implementation="tpu")
    program = jax.jit(call).lower(spec(rows, D), spec(128, N, D), spec(128, dtype=jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 16 * (rows + 512) * (N + D)


def test_positions_that_nobody_reads_go_through_no_expert():
    config = ExpertsConfig(8, 2, 16, norm_topk_prob=True)
    layer = Experts(32, config)
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    params = layer.init(jax.random.key(1), x)
    whole = layer.apply(params, x)
    counts = jnp.asarray([4, 0, 2])
    read = np.arange(4)[None] < counts[:, None]
    hostile = jnp.where(read[..., None], x, 1e30)
    some = layer.apply(params, hostile, counts)
    np.testing.assert_allclose(some, np.where(read[..., None], whole, 0), rtol=1e-6)


def test_its_cost_is_that_of_the_experts_that_rows_hit_by_chance():
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    found = cost(grouped_matmul, spec(16, 24), spec(64, 40, 24), sizes)
    assert found.flops == 2 * 16 * 40 * 24
    assert found.bytes_read[1] == pytest.approx(64 * (1 - (63 / 64) ** 16) * 40 * 24 * 4)
