"""The stretches of a cache that Hopper's kernel visits apart, merged: their weights are powers of two."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.block_attention.mosaic_gpu import MASKED, merged, scaled

B, K, Q, CHUNK, H = 2, 1, 4, 5, 3


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("stretches", [1, 3, 20])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e5])
def test_merged_stretches_are_the_whole(stretches, with_sinks, size):
    """Scores that are close, far apart, and large; of several stretches one sees nothing."""
    rng = np.random.default_rng(0)
    scores = np.float32(rng.normal(0, size, (B, K, stretches, Q, CHUNK)))
    values = np.float32(rng.normal(0, 1, (B, K, stretches, CHUNK, H)))
    sinks = np.float32(rng.normal(0, size, (1, K, Q))) if with_sinks else None
    seen = np.ones(scores.shape, bool)
    seen[:, :, 1:2] = False
    top = np.where(seen, scores, MASKED).max(axis=-1).astype(np.float32)
    factor, exponent = map(np.asarray, scaled(jnp.asarray(top)))
    assert (exponent == np.round(exponent)).all()
    weights = np.exp(np.where(seen, np.float64(scores) - top[..., None], -np.inf))  # as the kernel sums them
    out, total = (weights @ values) * factor[..., None], weights.sum(axis=-1) * factor
    out, total = merged(
        jnp.asarray(np.float32(out)),
        jnp.asarray(exponent),
        jnp.asarray(np.float32(total)),
        sinks=None if sinks is None else jnp.asarray(sinks),
    )

    whole = np.where(seen, np.float64(scores), -np.inf).transpose(0, 1, 3, 2, 4).reshape(B, K, Q, -1)
    beside = (
        whole if sinks is None else np.concatenate([whole, np.broadcast_to(sinks[..., None], (B, K, Q, 1))], axis=-1)
    )
    expected = np.exp(whole - beside.max(axis=-1, keepdims=True))
    expected /= np.exp(beside - beside.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    expected = expected @ values.reshape(B, K, -1, H)
    np.testing.assert_allclose(out / total[..., None], expected, atol=1e-5 + 3e-7 * size)
