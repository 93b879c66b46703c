"""Every implementation of the grouped product against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.costs import cost
from dflash_jax.config import ExpertsConfig
from dflash_jax.kernels.grouped_matmul import grouped_matmul, reference
from dflash_jax.kernels.grouped_matmul.trial import Trial
from dflash_jax.models.experts import COMPARED, Experts, by_expert
from dflash_jax.quantised import EightBit, FourBit, quantised
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
    return jnp.asarray(x), jnp.asarray(weights), jnp.asarray(np.cumsum(sizes), jnp.int32), expected


def check(got, expected, dtype):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla(name, dtype):
    x, weights, ends, expected = case(*SIZES[name], 48, 40, dtype)
    check(jax.jit(grouped_matmul)(x, weights, ends), expected, dtype)


@pytest.mark.parametrize("name", ["a block", "idle rows"])
def test_the_loop_and_xlas_own_operation_agree(name):
    """On TPU the second one runs."""
    x, weights, ends, expected = case(*SIZES[name], 48, 40, "float32")
    inside = np.arange(len(x))[:, None] < sum(SIZES[name][0])
    x = jnp.where(inside, x, 0)
    check(np.where(inside, reference.ragged(x, weights, ends), 0), expected, "float32")


@pytest.fixture(params=["tpu", "gpu"])
def interpreted(request, monkeypatch):
    """The Pallas kernels, run by the interpreter."""
    if request.param == "gpu":
        monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
        yield "gpu"
    else:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield "tpu"


DAILY = [
    name if name in ("a block", "many") else pytest.param(name, marks=pytest.mark.slow) for name in SIZES
]  # the interpreter takes long


@pytest.mark.parametrize("name", SIZES)
def test_pallas(name, interpreted):
    x, weights, ends, expected = case(*SIZES[name], 256, 384, "bfloat16")
    check(grouped_matmul(x, weights, ends, implementation=interpreted), expected, "bfloat16")


# In full tiles, and in tiles that are cut at the last outputs and inputs.
@pytest.mark.parametrize(
    ("kind", "N", "D", "block"),
    [
        ("MXFP4", 256, 384, 0),
        ("MXFP4", 160, 96, 0),
        ("FP8", 256, 384, 128),
        ("FP8", 160, 256, 128),
        ("FP8", 160, 256, 1),
        ("int8", 256, 384, 0),
        ("fp8", 160, 256, 0),
    ],
)
@pytest.mark.parametrize("name", DAILY)
def test_pallas_with_quantised_weights(name, kind, N, D, block, interpreted):
    """Numbers and scales of every size; the products are of dequantized weights, which a TPU rounds to bfloat16."""
    if interpreted == "tpu" and block == 1:
        pytest.skip("it declines these")
    (sizes, rows), rng = SIZES[name], np.random.default_rng(1)
    groups, columns = len(sizes), -(-D // 128)
    if not block and kind != "MXFP4":
        weights = quantised(jnp.asarray(rng.standard_normal((groups, N, D)), jnp.float32), kind)
    elif kind == "MXFP4":
        values, scale = rng.integers(0, 256, (groups, N, D // 2)), rng.integers(120, 130, (groups, N, D // 32))
        weights = FourBit(jnp.asarray(values, jnp.uint8), jnp.asarray(scale, jnp.uint8), code="e2m1")
    else:
        values, scale = rng.standard_normal((groups, N, D)), rng.uniform(0.01, 3, (groups, -(-N // block), columns))
        values = jnp.asarray(values * 2.0 ** rng.integers(-9, 6, (N, 1)), jnp.float8_e4m3fn)
        weights = EightBit(values, jnp.float32(scale), block=(block, 128))
    exact = interpreted == "gpu" or (not block and kind != "MXFP4")  # whose scales are apart
    plain = np.asarray(weights.astype(jnp.dtype("float32" if exact else "bfloat16")), np.float64)
    x = np.asarray(rng.standard_normal((rows, D)), jnp.bfloat16)
    group = np.repeat(np.arange(groups), sizes)
    expected = np.zeros((rows, N))
    expected[: len(group)] = np.einsum("md,mnd->mn", x[: len(group)].astype(np.float64), plain[group])
    x[len(group) :] = np.inf
    got = grouped_matmul(jnp.asarray(x), weights, jnp.asarray(np.cumsum(sizes), jnp.int32), implementation=interpreted)
    np.testing.assert_allclose(got, expected, atol=1e-6 * max(1, np.abs(expected).max()) * D**0.5)


def test_declines_by_name():
    x, weights, ends = jnp.zeros((8, 128)), jnp.zeros((2, 128, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="rows in float32"):
        grouped_matmul(x, weights, ends, implementation="tpu")
    x, weights = x[:, :100].astype(jnp.bfloat16), weights[:, :, :100].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="weights of 128 x 100"):
        grouped_matmul(x, weights, ends, implementation="tpu")
    with pytest.raises(ValueError, match="weights in float32 for rows in bfloat16"):
        grouped_matmul(x, weights.astype(jnp.float32), ends, implementation="gpu")
    small = EightBit(weights.astype(jnp.float8_e4m3fn), jnp.ones((2, 128, 25)), block=(1, 4))
    with pytest.raises(ValueError, match="weights in FP8 in blocks of 1 x 4"):
        grouped_matmul(x, small, ends, implementation="gpu")
    values = jax.ShapeDtypeStruct((256, 3072, 3072), jnp.float8_e4m3fn)
    large = EightBit(values, jnp.ones((256, 24, 24)), block=(128, 128))
    with pytest.raises(ValueError, match="2415919104 bytes of weights; it supports less than 2147483648"):
        jax.eval_shape(partial(grouped_matmul, implementation="gpu"), x, large, ends)
    joined = EightBit(jnp.zeros((2, 160, 128), jnp.float8_e4m3fn), jnp.ones((2, 160, 1)), block=(1, 128))
    with pytest.raises(ValueError, match="weights in FP8 in blocks of 1 x 128"):
        grouped_matmul(jnp.zeros((8, 128), jnp.bfloat16), joined, ends, implementation="tpu")


def test_quantised_weights_stay_so_and_no_product_is_dense():
    """On CPU: memory does not grow with the experts."""
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ends = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.jit(grouped_matmul).lower(spec(128, 256), spec(64, 512, 256), ends).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * 512 * 256  # the weights of three


def test_a_trial_is_the_call_in_small():
    mxfp4 = FourBit(jnp.zeros((128, 96, 32), jnp.uint8), jnp.zeros((128, 96, 2), jnp.uint8), code="e2m1")
    fp8 = EightBit(jnp.zeros((128, 96, 64), jnp.float8_e4m3fn), jnp.ones((128, 1, 1)), block=(128, 128))
    joined = fp8.replace(scale=jnp.ones((128, 96, 1)), block=(1, 128))
    assert Trial.of(jnp.zeros((4, 64)), joined) != Trial.of(jnp.zeros((4, 64)), fp8)
    for weights in (jnp.zeros((128, 96, 64)), jnp.zeros((128, 96, 64), jnp.int8), mxfp4, fp8, joined):
        out = Trial.of(jnp.zeros((4096, 64)), weights).run(partial(grouped_matmul, implementation="xla"))
        assert out.shape == (256, 96)
        assert bool(jnp.any(out != 0))
        assert bool(jnp.all(jnp.isfinite(out)))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "N", "D"), [(16, 1536, 2048), (128, 2048, 768), (4096, 1536, 2048)])
def test_the_tpu_compiler(rows, N, D):
    """Qwen3-Coder-30B-A3B's experts on a v5e: a single token, a block, a chunk of a prompt."""
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    call = lambda x, w, ends: grouped_matmul(x, w, ends, implementation="tpu")
    program = jax.jit(call).lower(spec(rows, D), spec(128, N, D), spec(128, dtype=jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 16 * (rows + 512) * (N + D)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "implementation"), [("v5e:2x2", "tpu"), ("h100", "gpu")])
@pytest.mark.parametrize("rows", [4, 64, 512])
def test_compilers_copy_no_quantised_weights(chip, implementation, rows):
    """gpt-oss-20b's experts in MXFP4 and half of MiniMax-M2's, which no device holds whole, in FP8; real compilers."""
    place = SingleDeviceSharding(topology(chip)[0])
    spec = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    call = lambda x, w, ends: grouped_matmul(x, w, ends, implementation=implementation)
    for E, N, D in ((32, 5760, 2880), (32, 2880, 2880)):
        weights = FourBit(spec(E, N, D // 2, dtype=jnp.uint8), spec(E, N, D // 32, dtype=jnp.uint8), code="e2m1")
        arguments = spec(rows, D, dtype=jnp.bfloat16), weights, spec(E, dtype=jnp.int32)
        program = jax.jit(call).lower(*arguments).compile()
        assert program.memory_analysis().temp_size_in_bytes < 4 * (rows + 512) * D
    for E, N, D in ((128, 3072, 3072), (128, 3072, 1536)):
        scale = spec(E, N // 128, D // 128, dtype=jnp.float32)
        blocks = EightBit(spec(E, N, D, dtype=jnp.float8_e4m3fn), scale, block=(128, 128))
        each = EightBit(spec(E, N, D, dtype=jnp.int8), spec(E, N, dtype=jnp.float32))
        for weights in (blocks, each):
            arguments = spec(rows, D, dtype=jnp.bfloat16), weights, spec(E, dtype=jnp.int32)
            program = jax.jit(call).lower(*arguments).compile()
            assert program.memory_analysis().temp_size_in_bytes < 4 * (rows + 512) * D


@pytest.mark.parametrize("M", [1, 100, COMPARED + 1])
def test_rows_by_expert_as_a_stable_sort_has_them(M):
    """By comparing few, by sorting many; those of invalid positions, which name an expert too many, come last."""
    chosen = jnp.asarray(np.random.default_rng(M).integers(0, 9, M), jnp.int32)
    order, back, ends = by_expert(chosen, 8)
    expected = np.argsort(chosen, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(np.asarray(back)[expected], np.arange(M))
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(chosen, minlength=9))[:8])


def test_positions_that_nobody_reads_go_through_no_expert():
    config = ExpertsConfig(8, 2, 16, norm_topk_prob=True)
    layer = Experts(32, config)
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    params = layer.init(jax.random.key(1), x)
    whole = layer.apply(params, x)
    counts = jnp.asarray([4, 0, 2])
    read = np.arange(4)[None] < counts[:, None]
    hostile = jnp.where(read[..., None], x, 1e30)
    some = layer.apply(params, hostile, jnp.asarray(read))
    np.testing.assert_allclose(some, np.where(read[..., None], whole, 0), rtol=1e-6)


def test_its_cost_is_that_of_the_experts_that_rows_hit_by_chance():
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ends = jax.ShapeDtypeStruct((64,), jnp.int32)
    found = cost(grouped_matmul, spec(16, 24), spec(64, 40, 24), ends)
    assert found.flops == 2 * 16 * 40 * 24
    assert found.bytes_read[1] == pytest.approx(64 * (1 - (63 / 64) ** 16) * 40 * 24 * 4)
