"""Products with weights of four bits by the kernels for GPUs and TPUs, in their interpreters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import operands, streamed, tensor_cores
from dflash_jax.kernels.linear import linear, mosaic_gpu
from dflash_jax.kernels.linear.trial import Trial
from dflash_jax.quantised import EightBit, FourBit, quantised
from tests.kernels.plain_fragments import interpreted, ordered_product

BFLOAT16 = jnp.dtype("bfloat16")


def weight(code, group, scale, zero, N=128, D=1024, seed=0):
    rng = np.random.default_rng(seed)
    groups = N, D // group
    if scale == "uint8":
        scales = jnp.asarray(rng.integers(100, 134, groups), jnp.uint8)
    else:
        scales = jnp.asarray(np.exp2(rng.uniform(-8, 1, groups)), scale)
    zeros = jnp.asarray(rng.integers(0, 16, groups), jnp.uint8) if zero else None
    return FourBit(jnp.asarray(rng.integers(0, 256, (N, D // 2)), jnp.uint8), scales, zero=zeros, code=code)


KINDS = {
    "int4, groups of 128": ("int4", 128, "bfloat16", False),
    "int4, zero points": ("int4", 128, "float16", True),
    "int4, groups of 64": ("int4", 64, "bfloat16", False),
    "int4, groups of 32": ("int4", 32, "float16", True),
    "int4, groups of 16": ("int4", 16, "float32", True),
    "int4, groups of 256": ("int4", 256, "bfloat16", False),
    "int4, an output": ("int4", 1024, "float32", True),
    "MXFP4": ("e2m1", 32, "uint8", False),
    "NVFP4": ("e2m1", 16, "float8_e4m3fn", False),
}


@pytest.fixture(params=["tpu", "gpu"])
def kernel(request, monkeypatch):
    """The name of a kernel, which its interpreter runs."""
    with interpreted(monkeypatch) if request.param == "gpu" else pltpu.force_tpu_interpret_mode():
        yield request.param


def rows(count, inputs=1024):
    return jax.random.normal(jax.random.key(1), (1, count, inputs), jnp.bfloat16)


def exact(x, weight):
    """In float64, of what the kernels multiply: the dequantized weight rounded to bfloat16."""
    gain = 1
    if isinstance(weight, FourBit) and weight.gain is not None:
        gain, weight = np.asarray(weight.gain, np.float64), weight.replace(gain=None)
    return np.asarray(x, np.float64) @ np.asarray(weight.astype(BFLOAT16), np.float64).T * gain


def check(kernel, x, weight):
    found, expected = linear(x, weight, implementation=kernel), exact(x, weight)
    atol = 2e-6 * np.abs(expected).max()
    if kernel == "gpu" and weight.scale.dtype in (jnp.float16, jnp.float32):  # in two parts: some ties round otherwise
        assert np.mean(np.abs(found - expected) < atol) > 0.8
        atol = 3 * 2**-8 * float(jnp.max(jnp.abs(weight.astype(BFLOAT16))) * jnp.max(jnp.abs(x)))
    np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("name", KINDS)
def test_products(name, kernel):
    check(kernel, rows(6).reshape(2, 3, 1024), weight(*KINDS[name]))


@pytest.mark.parametrize(("group", "scale"), [(32, "float32"), (32, "float16"), (64, "bfloat16"), (256, "float32")])
def test_offsets(group, scale, kernel):
    """As GGUF has them: no less exact than weights that are rounded once."""
    w, rng = weight("int4", group, scale, False), np.random.default_rng(3)
    offset = np.asarray(w.scale, np.float32) * rng.uniform(3, 13, w.scale.shape)
    w, x = w.replace(offset=jnp.asarray(offset, w.scale.dtype)), rows(6)
    plain = np.asarray(w.astype(jnp.dtype("float32")), np.float64)
    truth = np.asarray(x, np.float64) @ plain.T
    error = lambda found: float(np.sqrt(np.mean((np.asarray(found, np.float64) - truth) ** 2)))
    found = linear(x, w, implementation=kernel)
    assert error(found) <= 1.5 * error(exact(x, w))
    wrong = w.replace(offset=w.offset * 1.01)
    assert error(linear(x, wrong, implementation=kernel)) > 2 * error(found)


def test_an_order_and_a_gain(kernel):
    rng, w = np.random.default_rng(2), weight(*KINDS["int4, groups of 64"], N=256)
    gain = jnp.asarray(rng.uniform(1, 9, 256), jnp.float32)
    check(kernel, rows(5), w.replace(order=jnp.asarray(rng.permutation(1024)), gain=gain))


@pytest.mark.parametrize(("N", "D"), [(128, 256), (384, 1280), (128, 5 * 1024 + 256)])
def test_sizes(N, D, kernel):
    check(kernel, rows(9, D), weight("int4", 128, "bfloat16", False, N, D))


@pytest.mark.parametrize(
    ("D", "name"),
    [
        (128, "int4, groups of 128"),
        (640, "int4, groups of 128"),
        (960, "MXFP4"),
        (192, "NVFP4"),
        (320, "int4, groups of 64"),
    ],
)
def test_an_odd_number_of_tiles(D, name, kernel):
    """Some of half the width."""
    if kernel == "tpu":
        pytest.skip("it supports multiples of 256 inputs")
    check(kernel, rows(9, D), weight(*KINDS[name], 384, D))


@pytest.mark.parametrize("D", [256, 640])
@pytest.mark.parametrize("outputs", [1, 128])
def test_blocks_of_eight_bits(outputs, D, kernel):
    if kernel == "tpu":
        pytest.skip("XLA serves these")
    rng = np.random.default_rng(3)
    values = jnp.asarray(rng.standard_normal((256, D)) * 2.0 ** rng.integers(-9, 6, (256, 1)), jnp.float8_e4m3fn)
    scale = jnp.asarray(rng.uniform(0.01, 3, (256 // outputs, D // 128)), jnp.float32)
    check(kernel, rows(9, D), EightBit(values, scale, block=(outputs, 128)))


@pytest.mark.parametrize(
    ("numbers", "group", "scale", "D"),
    [
        ("int8", 32, "float16", 192),
        ("int8", 16, "float32", 256),
        ("int8", 64, "bfloat16", 640),
        ("e4m3", 32, "float32", 64),
    ],
)
def test_groups_of_eight_bits(numbers, group, scale, D, kernel):
    """As GGUF has them, and others."""
    if kernel == "tpu":
        pytest.skip("XLA serves these")
    rng = np.random.default_rng(4)
    if numbers == "int8":
        values = jnp.asarray(rng.integers(-128, 128, (256, D)), jnp.int8)
    else:
        values = jnp.asarray(rng.standard_normal((256, D)), jnp.float8_e4m3fn)
    scales = jnp.asarray(np.exp2(rng.uniform(-8, 1, (256, D // group))), scale)
    check(kernel, rows(9, D), EightBit(values, scales, block=(1, group)))


@pytest.mark.slow
def test_many_rows(kernel):
    check(kernel, rows(256), weight(*KINDS["MXFP4"]))


def test_a_row_has_the_same_bits_beside_any_others(kernel, monkeypatch):
    """As far as the kernel says in which order it adds; within one product of the tensor cores, they do."""
    if kernel == "tpu":
        pytest.skip("a TPU's products have an order of their own, which the interpreter has not")
    monkeypatch.setattr(tensor_cores, "add_product", ordered_product)
    w, x = weight(*KINDS["int4, groups of 64"], D=1024), rows(72)
    alone = linear(x[:, :1], w, implementation=kernel)
    for count in (2, 8, 31, 64, 72):
        np.testing.assert_array_equal(linear(x[:, :count], w, implementation=kernel)[:, :1], alone)


def test_gradients(kernel):
    w, x, cotangent = weight(*KINDS["int4, zero points"]), rows(4), jax.random.normal(jax.random.key(2), (1, 4, 128))
    of = lambda name: jax.vjp(lambda x: linear(x, w, implementation=name), x)[1](cotangent)[0]
    expected = np.asarray(of("xla"), np.float32)
    np.testing.assert_allclose(np.float32(of(kernel)), expected, atol=8e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int4, zero points", "MXFP4", "NVFP4", "FP8 in blocks"])
def test_the_small_case_that_an_engine_checks(name, kernel):
    """Its rows, codes and scales differ, so the kernel and XLA agree on something."""
    if name in KINDS:
        w = weight(*KINDS[name])
    elif kernel == "tpu":
        pytest.skip("XLA serves these")
    else:
        w = EightBit(jnp.zeros((128, 512), jnp.float8_e4m3fn), jnp.ones((1, 4)), block=(128, 128))
    trial = Trial.of(rows(3, w.shape[1]), w)
    found, expected = (trial.run(partial(linear, implementation=which)) for which in (kernel, "xla"))
    assert found.shape == (1, 8, 128)
    np.testing.assert_allclose(found, expected, atol=trial.tolerance * np.abs(expected).max())
    assert len(np.unique(expected)) > 1000


@pytest.mark.parametrize(
    ("outputs", "inputs", "share"),
    [(4096, 4096, 8), (24576, 4096, 32), (4096, 12288, 20), (6144, 4096, 12), (1024, 1024, 4), (128, 640, 5)],
)
def test_parts_follow_from_the_weights_shape(outputs, inputs, share):
    stored = operands.stored(weight("int4", 128, "bfloat16", False, outputs, inputs))
    assert streamed.share(stored, -(-mosaic_gpu.BLOCKS // (outputs // mosaic_gpu.OUTPUTS))) == share


@pytest.mark.parametrize(
    ("w", "x", "why"),
    [
        (lambda: weight("int4", 128, "bfloat16", False), (1, 4, 1024, "float32"), "rows in float32"),
        (lambda: weight("int4", 128, "bfloat16", False), (1, 300, 1024, "bfloat16"), "300 rows"),
        (lambda: weight("int4", 128, "bfloat16", False, N=192), (1, 4, 1024, "bfloat16"), "192 outputs"),
        (lambda: weight("int4", 32, "bfloat16", False, D=992), (1, 4, 992, "bfloat16"), "992 inputs"),
        (lambda: weight("int4", 8, "bfloat16", False), (1, 4, 1024, "bfloat16"), "128 groups of 1024 inputs"),
        (lambda: quantised(jnp.ones((128, 1024)), "int8"), (1, 4, 1024, "bfloat16"), "weights in INT8"),
    ],
)
def test_what_it_does_not_serve(w, x, why, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    *shape, dtype = x
    with pytest.raises(ValueError, match=why):
        linear(jnp.zeros(shape, dtype), w(), implementation="gpu")
