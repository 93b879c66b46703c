"""A prompt in chunks against one token at a time: both must have read the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.benchmarks import reading
from dflash_jax.benchmarks.random_weights import random_target
from tests import tiny


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_both_ways_leave_the_same_cache(family):
    raw = tiny.target_config(**tiny.FAMILIES.get(family, {}) | {"model_type": family})
    target = random_target(raw, jnp.float32)
    tokens = jax.random.randint(jax.random.key(0), (1, 96), 0, tiny.VOCAB)
    cache = target.init_cache(1, 96, 48)
    chunks, single = (jax.tree.leaves(reading._read(target, tokens, cache, width)) for width in (48, 1))
    assert any(np.any(np.asarray(x)) for x in single)
    for a, b in zip(chunks, single, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_the_rule_alone_leaves_the_same_state():
    raw = tiny.target_config(**tiny.FAMILIES["qwen3_next"] | {"model_type": "qwen3_next"})
    linear = random_target(raw, jnp.float32).config.layers[0].mixer
    inputs = reading._inputs(linear, 96)
    (chunks, sums), (single, other) = (reading._read_alone(*inputs, width) for width in (48, 1))
    np.testing.assert_allclose(chunks, single, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums, other, rtol=1e-3, atol=1e-3)


def test_the_command(capsys):
    small = ["--layers", "4", "--width", "32", "--rounds", "1"]
    assert reading.main(["--target", "nowhere", *small]) == 2
    assert "for targets of dflash_jax.benchmarks.presets" in capsys.readouterr().err
    assert reading.main(["--target", "qwen3.5-4b", *small, "--tokens", "100", "--chunk", "64"]) == 2
    assert "multiple of --chunk" in capsys.readouterr().err
