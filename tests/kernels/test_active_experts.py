"""Products of a few tokens with the weights of active experts: by XLA, by the kernel for Hopper in its interpreter, and
in a layer of experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import tensor_cores
from dflash_jax.kernels.active_experts import active, multiply, serves
from dflash_jax.kernels.active_experts.trial import Trial
from dflash_jax.kernels.dispatch import using
from dflash_jax.kernels.verify import TOLERANCE
from dflash_jax.models.experts import apply_experts
from dflash_jax.quantised import EightBit, FourBit, quantised
from tests.kernels.plain_fragments import interpreted, ordered_product

E, N, D = 5, 192, 320
BFLOAT16 = jnp.dtype("bfloat16")


def mxfp4(outputs=N, inputs=D, seed=0):
    rng, shape = np.random.default_rng(seed), (E, outputs, inputs)
    values, scale = rng.integers(0, 256, (*shape[:2], inputs // 2)), rng.integers(118, 124, (*shape[:2], inputs // 32))
    return FourBit(jnp.asarray(values, jnp.uint8), jnp.asarray(scale, jnp.uint8), code="e2m1")


def blocks(outputs=256, inputs=384):
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.standard_normal((E, outputs, inputs)), jnp.float8_e4m3fn)
    scale = jnp.asarray(rng.uniform(0.1, 1, (E, outputs // 128, inputs // 128)), jnp.float32)
    return EightBit(values, scale, block=(128, 128))


def groups(size, outputs=N, inputs=D):
    """As GGUF has them."""
    rng = np.random.default_rng(2)
    values = jnp.asarray(rng.integers(-128, 128, (E, outputs, inputs)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.1, 1, (E, outputs, inputs // size)), jnp.float32)
    return EightBit(values, scale, block=(1, size))


WEIGHTS = {
    "MXFP4": mxfp4,
    "FP8 in blocks": blocks,
    "FP8": lambda: quantised(jax.random.normal(jax.random.key(0), (E, N, D)), "fp8"),
    "int8": lambda: quantised(jax.random.normal(jax.random.key(0), (E, N, D)), "int8"),
    "int8 in groups": lambda: groups(32),
    "bfloat16": lambda: jax.random.normal(jax.random.key(0), (E, N, D), jnp.bfloat16),
    "int4": lambda: quantised(jax.random.normal(jax.random.key(0), (E, N, D), jnp.bfloat16), "int4"),
}


@pytest.fixture(params=["xla", "gpu"])
def implementation(request, monkeypatch):
    if request.param == "xla":
        yield "xla"
    else:
        with interpreted(monkeypatch):
            yield "gpu"


@pytest.mark.parametrize("chosen", [[3], [4, 0, 4, 1], [0, 1, 2, 3, 4] * 3, [5, 5, 2], [5]])
def test_active_experts(chosen):
    """In their order; 5 is no expert."""
    slots, slot = map(np.asarray, active(jnp.asarray(chosen), E))
    expected = sorted({e for e in chosen if e < E})
    assert slots[-1] == len(expected)
    assert slots[: len(expected)].tolist() == expected
    assert len(slots) == 1 + min(E, len(chosen))
    assert [slot[e] for e in expected] == list(range(len(expected)))


@pytest.mark.parametrize("each", [False, True], ids=["the same tokens", "those of each slot"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(name, each, implementation):
    weights, slots = WEIGHTS[name](), jnp.asarray([4, 0, 3, 1, 3])  # the fourth is not in use
    x = jax.random.normal(jax.random.key(2), (4 if each else 1, 11, weights.shape[2]), jnp.bfloat16)
    found = multiply(x, weights, slots, implementation=implementation)
    plain = np.asarray(weights.astype(BFLOAT16), np.float64)[np.asarray(slots[:3])]
    expected = np.einsum(
        "std,snd->stn", np.broadcast_to(x[:3] if each else x, (3, 11, x.shape[2])).astype(float), plain
    )
    assert found.shape == (4, 11, weights.shape[1])
    # Scales that are not rounded with the numbers, or in two parts.
    own = implementation == "gpu" and name in ("FP8", "int8", "int8 in groups", "int4")
    np.testing.assert_allclose(found[:3], expected, atol=(4e-3 if own else 1e-4) * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_a_row_is_the_same_beside_any_others(name, monkeypatch):
    """To the bit, as far as the kernel says in which order it adds; and what XLA gives."""
    weights, slots = WEIGHTS[name](), jnp.asarray([4, 0, 1, 2])  # the third is not in use
    x = jax.random.normal(jax.random.key(2), (1, 64, D), jnp.bfloat16)
    with interpreted(monkeypatch):
        monkeypatch.setattr(tensor_cores, "add_product", ordered_product)
        alone = multiply(x[:, :1], weights, slots, implementation="gpu")[:2]
        for count in (8, 16, 31, 64):
            rows = jnp.concatenate([x[:, :1], x[:, 65 - count :]], axis=1)
            found = multiply(rows, weights, slots, implementation="gpu")[:2]
            expected = multiply(rows, weights, slots, implementation="xla")[:2]
            np.testing.assert_allclose(found, expected, atol=TOLERANCE["bfloat16"] * np.abs(expected).max())
            np.testing.assert_array_equal(found[:, :1], alone)


def test_every_number_of_eight_bits_is_decoded_exactly(monkeypatch):
    """At all places of a word."""
    codes = (np.arange(64)[:, None] + np.arange(256)[None]) % 256 - 128
    values, scale = jnp.asarray(codes[None], jnp.int8), jnp.full((1, 64), 0.5)
    one_by_one = jnp.eye(256, dtype=jnp.bfloat16).reshape(4, 64, 256)
    with interpreted(monkeypatch):
        found = multiply(one_by_one, EightBit(values, scale), jnp.asarray([0, 0, 0, 0, 4]), implementation="gpu")
    np.testing.assert_array_equal(found.reshape(256, 64).T, codes * 0.5)


def test_a_slot_that_is_not_in_use_is_not_computed(monkeypatch):
    with interpreted(monkeypatch):
        weights, x = mxfp4(), jnp.ones((1, 8, D), jnp.bfloat16)
        found = multiply(x, weights, jnp.asarray([2, 1, 1]), implementation="gpu")
    assert np.isfinite(found[0]).all()
    assert not np.isclose(found[1], multiply(x, weights, jnp.asarray([1, 1]), implementation="xla")[0]).all()


LAYERS = {
    "MXFP4": lambda weight: weight,
    "int8": lambda weight: quantised(weight.astype(BFLOAT16), "int8"),
    "bfloat16": lambda weight: weight.astype(BFLOAT16),
}


@pytest.mark.parametrize(("name", "biases"), [("MXFP4", False), ("MXFP4", True), ("int8", False), ("bfloat16", False)])
def test_a_layer_gives_what_sorted_tokens_give(name, biases, monkeypatch):
    """With tokens that are none, and experts that nobody goes to."""
    gate_up, down = LAYERS[name](mxfp4(2 * N, D)), LAYERS[name](mxfp4(D, N, seed=1))
    bias = jax.random.normal(jax.random.key(4), (E, 2 * N), jnp.bfloat16) if biases else None
    x = jax.random.normal(jax.random.key(2), (2, 3, D), jnp.bfloat16)
    chosen = jnp.asarray([[[0, 3], [3, 1], [E, E]], [[1, 0], [E, E], [3, 0]]])
    weights = jnp.where(chosen < E, jax.random.uniform(jax.random.key(3), chosen.shape), 0.0)
    run = partial(apply_experts, x, weights, chosen, gate_up, bias, down, 7.0 if biases else None)
    expected = np.float32(jax.jit(run)())
    with interpreted(monkeypatch), using("gpu"):
        assert serves(6, 12, x.dtype, gate_up, down)
        found = np.float32(jax.jit(run)())
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    np.testing.assert_array_equal(found[0, 2], 0.0)


def test_many_tokens_and_wide_numbers_are_sorted(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    plain = jnp.zeros((E, N, D), BFLOAT16)
    with using("gpu"):
        assert serves(64, 128, BFLOAT16, mxfp4(), mxfp4())
        assert serves(64, 128, BFLOAT16, plain, WEIGHTS["int8"]())
        assert not serves(65, 130, BFLOAT16, mxfp4(), mxfp4())
        assert not serves(8, 16, BFLOAT16, mxfp4(), plain.astype("float32"))
        assert not serves(8, 16, jnp.dtype("float32"), mxfp4(), mxfp4())
    assert not serves(8, 16, BFLOAT16, mxfp4(), mxfp4())


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_small_case_that_an_engine_checks(name, implementation):
    """Its tokens and weights differ, so the kernel and XLA agree on something."""
    weights = WEIGHTS[name]()
    trial = Trial.of(jnp.zeros((1, 5, weights.shape[2]), BFLOAT16), weights, 6)
    found, expected = (trial.run(partial(multiply, implementation=which)) for which in (implementation, "xla"))
    np.testing.assert_allclose(found, expected, atol=trial.tolerance * np.abs(expected).max())
    assert len(np.unique(expected)) > 1000
