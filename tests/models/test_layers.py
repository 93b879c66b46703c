"""The layers that families share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_target
from dflash_jax.cache import attention as cache_attention
from tests import tiny


@pytest.mark.slow
def test_layers_that_are_alike_are_traced_once(tmp_path, monkeypatch):
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 5,
        "use_sliding_window": True,
    }
    target = load_target(tiny.write_target(tmp_path, tiny.target_config(**kinds)))
    traced = []
    attend = cache_attention.attend
    spy = lambda *x, **options: traced.append(options["window"]) or attend(*x, **options)
    monkeypatch.setattr(cache_attention, "attend", spy)
    forward = lambda tokens, cache: target.forward(tokens, jnp.arange(11)[None], None, cache)[0]
    hidden = jax.jit(forward)(jnp.arange(11)[None], target.init_cache(1, 16))
    assert traced == [5, None]
    with jax.disable_jit():
        np.testing.assert_allclose(hidden, forward(jnp.arange(11)[None], target.init_cache(1, 16)), atol=1e-5)
    assert traced == [5, None] * 3
