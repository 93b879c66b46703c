"""Products with quantized weights: exact, differentiable, and for whole numbers on a CPU independent of other rows."""

from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.benchmarks.costs import cost
from dflash_jax.kernels.dispatch import using
from dflash_jax.kernels.linear import api, linear, reference, xla_gpu
from dflash_jax.mesh import HEADS, make_mesh, parse_mesh
from dflash_jax.quantised import EightBit, FourBit, each, joined, quantised
from dflash_jax.sharding import gathered

FLOAT32 = jnp.dtype("float32")


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight.astype(FLOAT32), np.float64).T


def in_blocks(rows, M, D):
    """FP8 whose scales differ much, with smaller blocks at the ends."""
    values = (16 * drawn(M, D)).astype(jnp.float8_e4m3fn)
    scale = jnp.exp(drawn(-(-M // rows), -(-D // 128), seed=1)) / 16
    return EightBit(values, scale, block=(rows, 128))


WEIGHTS = {
    "int8": lambda: quantised(drawn(96, 256), "int8"),
    "fp8": lambda: quantised(drawn(96, 256), "fp8"),
    "int4": lambda: quantised(drawn(96, 256), "int4"),
    "blocks": lambda: in_blocks(128, 256, 384),
    "ragged blocks": lambda: in_blocks(128, 200, 320),
    "groups of int8": lambda: EightBit(
        (40 * drawn(96, 256)).astype(jnp.int8), jnp.exp(drawn(96, 8, seed=1)) / 16, block=(1, 32)
    ),
    "rows of blocks": lambda: in_blocks(1, 96, 256),
    "offsets": lambda: quantised(drawn(96, 256), "int4").replace(offset=drawn(96, 4, seed=5)),
    "zero points": lambda: quantised(drawn(96, 256), "int4").replace(
        zero=jax.random.randint(jax.random.key(3), (96, 4), 0, 16).astype(jnp.uint8), gain=jnp.exp(drawn(96))
    ),
    "ordered": lambda: quantised(drawn(96, 256), "int4").replace(order=jax.random.permutation(jax.random.key(4), 256)),
}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [(2, 5), (1, 1)])
def test_products_and_their_gradients(name, rows, platform):
    """By the forms of every platform, which are all XLA's."""
    weight = WEIGHTS[name]()
    x, cotangent = drawn(*rows, weight.shape[1], seed=7), drawn(*rows, weight.shape[0], seed=8)
    with using(None, platform):
        out, pull = jax.vjp(lambda x: linear(x, weight), x)
        (found,) = pull(cotangent)
    expected = exact(x, weight)
    np.testing.assert_allclose(out, expected, atol=2e-6 * np.abs(expected).max())
    expected = np.asarray(cotangent, np.float64) @ np.asarray(weight.astype(FLOAT32), np.float64)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [2, 8, 9, 16])
@pytest.mark.parametrize("name", ["int4", "offsets", "zero points", "ordered", "groups of int8"])
def test_each_group_by_itself(name, rows):
    """As on GPUs whose compiler reads four bits; more rows than have sums of a weight's bytes are several products."""
    weight, x = WEIGHTS[name](), drawn(1, rows, 256, seed=7)
    expected = exact(x, weight)
    np.testing.assert_allclose(xla_gpu.linear(x, weight), expected, atol=2e-6 * np.abs(expected).max())
    products = str(jax.make_jaxpr(xla_gpu.linear)(x, weight)).count("dot_general")
    assert products == -(-rows // 8)
    if jax.__version_info__ >= (0, 12) or name == "groups of int8":
        assert xla_gpu.declines(x, weight) is None
        assert xla_gpu.declines(drawn(1, 17, 256), weight) == "17 rows; it supports 2 to 16"
        assert xla_gpu.declines(drawn(1, 1, 256), weight) == "1 rows; it supports 2 to 16"
    else:
        assert "it supports 0.12 and later" in xla_gpu.declines(x, weight)


def test_what_is_not_multiplied_by_groups():
    x = drawn(1, 8, 256)
    for name in ("int8", "fp8", "rows of blocks"):
        assert "it supports matrices of whole numbers in groups" in xla_gpu.declines(x, WEIGHTS[name]())
    ragged = EightBit(jnp.zeros((96, 48), jnp.int8), jnp.zeros((96, 2)), block=(1, 32))
    assert xla_gpu.declines(drawn(1, 8, 48), ragged) == "48 inputs; it supports multiples of 32"
    mxfp4 = FourBit(jnp.zeros((96, 128), jnp.uint8), jnp.zeros((96, 8), jnp.uint8), code="e2m1")
    assert "weights in MXFP4" in xla_gpu.declines(x, mxfp4)


@pytest.mark.parametrize("largest", [1e-30, 1.0, 1e30])
def test_digits_are_as_exact_as_float32(largest):
    """Whatever the size of a row, and of the numbers in it; of many more inputs than any model has the sum would not
    fit, and a row of zeros, or of what is no number, stays one."""
    weight = quantised(drawn(64, 4096), "int8")
    x = largest * drawn(1, 7, 4096) * jnp.exp2(-20.0 * jax.random.uniform(jax.random.key(2), (1, 7, 4096)))
    x = x.at[0, 3].set(0.0).at[0, 5, 8].set(jnp.nan)
    found, expected = reference.in_digits(x, weight.values), exact(x, weight.replace(scale=jnp.ones(64)))
    for row in (0, 1, 2, 4, 6):
        np.testing.assert_allclose(found[0, row], expected[0, row], atol=4e-7 * np.abs(expected[0, row]).max())
    assert np.all(found[0, 3] == 0)
    assert np.all(np.isnan(found[0, 5]))


def test_a_row_has_the_same_bits_beside_any_others():
    weight, x = quantised(drawn(200, 320), "int8"), drawn(1, 64, 320)
    alone = jax.jit(linear)(x[:, :1], weight)
    for count in (2, 8, 16, 31, 64):
        np.testing.assert_array_equal(jax.jit(linear)(x[:, :count], weight)[:, :1], alone)
        np.testing.assert_array_equal(jax.jit(linear)(x[:, count - 1 :: -1], weight)[:, -1:], alone)


def test_a_cpu_widens_no_weight():
    """What the program of a step needs besides its arguments is less than the weight in bytes."""
    spec = jax.ShapeDtypeStruct
    weight = EightBit(spec((4096, 1024), jnp.int8), spec((4096,), FLOAT32))
    program = jax.jit(linear).lower(spec((1, 16, 1024), FLOAT32), weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4096 * 1024


@pytest.mark.parametrize(("how", "error"), [("int8", 0.01), ("fp8", 0.03), ("int4", 0.11)])
def test_quantisation_errs_as_little_as_its_bits_allow(how, error):
    weight = drawn(64, 512)
    found = quantised(weight, how).astype(FLOAT32)
    assert float(jnp.linalg.norm(found - weight) / jnp.linalg.norm(weight)) < error
    np.testing.assert_array_equal(quantised(jnp.zeros((8, 64)), how).astype(FLOAT32), 0.0)
    again = quantised(found, how).astype(FLOAT32)  # what is quantized stays so
    np.testing.assert_allclose(again, found, rtol=1e-6 if how != "int4" else 0.2, atol=0.0 if how != "int4" else 0.2)


def test_groups_of_what_divides_the_inputs():
    assert quantised(drawn(8, 128), "int4").scale.shape == (8, 2)
    assert quantised(drawn(8, 48), "int4").scale.shape == (8, 3)
    with pytest.raises(ValueError, match="int4 needs .* a multiple of 64 or 32 or 16 or 8, got 36"):
        quantised(drawn(8, 36), "int4")


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_matrices_side_by_side_are_joined_and_parted(how):
    weight = quantised(drawn(3, 8, 64), how)
    plain = weight.astype(FLOAT32)
    np.testing.assert_array_equal(joined(weight).astype(FLOAT32), plain.reshape(24, 64))
    for one, expected in zip(each(weight), plain, strict=True):
        np.testing.assert_array_equal(one.astype(FLOAT32), expected)


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_of_a_table(name):
    weight = WEIGHTS[name]().replace(dtype=FLOAT32)
    if isinstance(weight, FourBit) and weight.order is not None:
        pytest.skip("tables have no order of inputs")
    tokens = jnp.asarray([[3, 0, 95], [17, 3, 64]])
    np.testing.assert_array_equal(weight.rows(tokens), weight.astype(FLOAT32)[tokens])


def test_its_cost_is_what_is_stored():
    weight = jax.eval_shape(partial(quantised, how="int8"), jax.ShapeDtypeStruct((96, 256), FLOAT32))
    found = cost(linear, jax.ShapeDtypeStruct((1, 16, 256), FLOAT32), weight)
    assert found.flops == 2 * 16 * 96 * 256
    assert found.bytes_read[1] == 96 * 256 + 4 * 96


@pytest.mark.parametrize("sizes", ["model=2,data=2", "model=4"])
@pytest.mark.parametrize("axes", [(HEADS, None), (None, HEADS)], ids=["outputs", "inputs"])
@pytest.mark.parametrize("name", ["zero points", "FP8 in blocks", "ordered"])
def test_each_device_of_a_mesh_multiplies_its_part(name, axes, sizes, monkeypatch):
    """By the kernel, where one serves that part; an order of all inputs is not divided."""
    devices, seen = jax.devices()[:4], []
    kernel = ModuleType("kernel")
    kernel.declines = lambda x, weight: None
    kernel.linear = lambda x, weight: (seen.append((x.shape, weight.shape)), reference.linear(x, weight))[1]
    for among in (api.KERNELS, api.IMPLEMENTATIONS):
        monkeypatch.setitem(among, "tpu", kernel)
    weight, x = split_evenly(name), drawn(2, 3, 512, seed=9)
    alone = linear(x, weight, implementation="xla")
    with using("tpu"), jax.set_mesh(make_mesh(parse_mesh(sizes, devices), devices)):
        run = jax.jit(lambda x, weight: linear(x, weight.replace(axes=axes)))
        found = run(x, weight)
    np.testing.assert_allclose(found, alone, atol=3e-6 * float(jnp.max(jnp.abs(alone))))
    rows, parts = (1, 2) if "data" in sizes else (2, 4)
    outputs, inputs = (512 // parts, 512) if axes[0] else (512, 512 // parts)
    assert seen == ([] if name == "ordered" else [((rows, 3, inputs), (outputs, inputs))])


def test_a_part_that_is_not_whole_is_left_to_xla():
    """Of six groups, on four devices."""
    devices, weight = jax.devices()[:4], quantised(drawn(128, 192), "int4").replace(axes=(None, HEADS))
    assert weight.scale.shape == (128, 3)
    with jax.set_mesh(make_mesh(parse_mesh("model=4", devices), devices)):
        assert api._split(drawn(2, 3, 192), weight) is None


def split_evenly(name):
    """A weight of [512, 512] that four devices can divide, either way."""
    four = quantised(drawn(512, 512), "int4")
    if name == "ordered":
        return four.replace(order=jnp.asarray(np.random.default_rng(0).permutation(512)))
    if name == "zero points":
        return four.replace(zero=jnp.asarray(np.random.default_rng(0).integers(0, 16, four.scale.shape), jnp.uint8))
    return EightBit(drawn(512, 512).astype(jnp.float8_e4m3fn), jnp.abs(drawn(4, 4)) + 0.1, block=(128, 128))


def test_a_weight_says_how_the_mesh_splits_it():
    """From the table of rules; a weight that is on every device whole, too."""
    devices, weight = jax.devices()[:4], quantised(drawn(128, 128), "int4")
    assert gathered(weight, "layers_0/mlp/down_proj/weight").axes is None
    with jax.set_mesh(make_mesh(parse_mesh("model=2,data=2", devices), devices)):
        of = lambda path: gathered(weight, path).axes
        assert of("layers_0/mlp/gate_up_proj/weight") == (HEADS, None)
        assert of("layers_0/mlp/down_proj/weight") == (None, HEADS)
        assert of("experts/router") == (None, None)
