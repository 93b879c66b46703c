"""Norms that leave their division to the products that read them, as on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter, load_target, spec_generate
from dflash_jax.drafters import dflash
from dflash_jax.kernels.dispatch import using
from dflash_jax.models import attention, norms
from dflash_jax.models.gpt_oss import Float32RMSNorm
from dflash_jax.models.layers import Linear, matmul
from dflash_jax.models.norms import Normed, RMSNorm, divides_last
from dflash_jax.models.qwen3_next import Norm
from tests import tiny

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40]]


@pytest.fixture
def last(monkeypatch):
    """Call it, and every norm before products divides last, whatever is compiled for."""

    def set_so():
        jax.clear_caches()
        monkeypatch.setattr(norms, "divides_last", lambda dtype, shape: True)
        for module in (attention, dflash):
            monkeypatch.setattr(module, "platform", lambda: "gpu")

    yield set_so
    jax.clear_caches()


@pytest.mark.parametrize("T", [1, 16, 40])
@pytest.mark.parametrize("kind", [RMSNorm, Float32RMSNorm, Norm])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_what_is_normed(kind, T, dtype, last):
    """To rounding: in bfloat16 no farther from the exact product than it is with the division first."""
    rng = np.random.default_rng(T)
    draw = lambda *size: rng.standard_normal(size).astype(np.float32)
    x, weight, w = (jnp.asarray(a, dtype) for a in (7 * draw(1, T, 384), draw(384), draw(96, 384)))
    normed = lambda: kind(384, 1e-5).apply({"params": {"weight": weight}}, x, method="for_products")[0]
    call = lambda: matmul(normed(), w)
    first = call()
    last()
    got = call()
    assert isinstance(normed(), Normed)
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    exact = (exact * (np.asarray(weight, np.float64) + kind.added)) @ np.asarray(w, np.float64).T
    worst = lambda y: np.abs(np.asarray(y, np.float64) - exact).max() / np.abs(exact).max()
    assert worst(got) < (1e-6 if dtype == "float32" else 0.01)
    assert worst(got) < 1.5 * worst(first) + 1e-6


def test_it_is_for_few_positions_in_bfloat16_on_gpus():
    shape = 1, 16, 4096
    assert not divides_last(jnp.dtype(jnp.bfloat16), shape)
    with using(None, "gpu"):
        assert divides_last(jnp.dtype(jnp.bfloat16), shape)
        assert not divides_last(jnp.dtype(jnp.float32), shape)
        assert not divides_last(jnp.dtype(jnp.bfloat16), (32, 16, 4096))
        assert not divides_last(jnp.dtype(jnp.bfloat16), (1, 16, 4099))  # a prime: no pieces


def test_a_module_reads_it_as_it_is(last):
    x = jax.random.normal(jax.random.key(0), (2, 3, 64))
    linear = Linear((64, 8), use_bias=True)
    params = linear.init(jax.random.key(1), x)
    scale = {"params": {"weight": jnp.linspace(0.5, 2, 64)}}
    normed = lambda: RMSNorm(64, 1e-5).apply(scale, x, method="for_products")[0]
    first = linear.apply(params, normed())
    last()
    np.testing.assert_allclose(linear.apply(params, normed()), first, atol=1e-6)


@pytest.mark.parametrize(
    "family", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]
)
def test_every_family_computes_the_same(family, tmp_path, last):
    raw = tiny.target_config(model_type=family) | tiny.FAMILIES[family]
    raw.pop("quantization_config", None)
    target = load_target(tiny.write_target(tmp_path, raw))
    at = lambda T: (jnp.arange(T)[None] % 50 + 3, jnp.arange(T)[None], None, target.init_cache(1, 32))
    run = lambda: [target.unembed(target.forward(*at(T))[0]) for T in (1, 11)]
    first = run()
    last()
    for one, other in zip(run(), first, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


KINDS = tiny.kinds()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "dflash")) for kind in KINDS])
def test_every_drafter_proposes_the_same(kind, tmp_path, last):
    target = load_target(tiny.write_target(tmp_path / "target", tiny.target_config()))
    drafter = load_drafter(tiny.write_drafter(tmp_path / "drafter", KINDS[kind]), num_target_layers=4)
    run = lambda: spec_generate(target, drafter, PROMPTS, max_new_tokens=12, stop_token_ids=[])
    first = run()
    last()
    second = run()
    assert (second.tokens, second.acceptance_lengths) == (first.tokens, first.acceptance_lengths)
