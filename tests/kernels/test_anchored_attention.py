"""The attention of training and its gradients against dense attention, block by block."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.anchored_attention import attend_anchored

# One row of each kind: two documents, a block that sees nothing, anchors out of order, more than one chunk.
ANCHORS = [[3, 150, 150, 290, 0], [20, 300, 140, 7, 64]]
STARTS = [[0, 0, 130, 130, 0], [0, 129, 0, 7, 10]]


def anchored_case(S=300):
    rng = np.random.default_rng(5)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    (B, A), T, N, K, H = np.shape(ANCHORS), 4, 4, 2, 8
    blocks = draw(B, A, T, N, H), draw(B, A, K, T, H), draw(B, A, K, T, H)
    return *blocks, draw(B, K, S, H), draw(B, K, S, H)


def one_by_one(q, k, v, cache_k, cache_v, *, visible, window):
    """Every block alone, densely: [B, A, T, N, H]."""
    (B, A), T, group = np.shape(ANCHORS), q.shape[2], q.shape[3] // k.shape[2]
    rows = []
    for b in range(B):
        blocks = []
        for a in range(A):
            positions = ANCHORS[b][a] + np.arange(T)
            keys = jnp.concatenate([cache_k[b], k[b, a]], axis=1).repeat(group, axis=0)
            values = jnp.concatenate([cache_v[b], v[b, a]], axis=1).repeat(group, axis=0)
            slots = np.arange(cache_k.shape[2])
            seen = np.broadcast_to((slots >= STARTS[b][a]) & (slots < ANCHORS[b][a]), (T, len(slots)))
            own = np.tril(np.ones((T, T), bool)) if visible == "causal" else np.ones((T, T), bool)
            seen, held = np.concatenate([seen, own], axis=1), np.concatenate([slots, positions])
            if window is not None:
                seen = seen & (np.abs(positions[:, None] - held[None]) < window)
            scores = jnp.einsum("tnh,nsh->nts", q[b, a], keys) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(jnp.asarray(seen)[None], scores, -jnp.inf), axis=-1)
            blocks.append(jnp.einsum("nts,nsh->tnh", weights, values))
        rows.append(jnp.stack(blocks))
    return jnp.stack(rows)


@pytest.mark.parametrize(("visible", "window"), [("causal", None), ("full", 3), ("full", 140), ("causal", 140)])
def test_anchored_blocks_and_their_gradients(visible, window, monkeypatch):
    monkeypatch.setattr("dflash_jax.kernels.anchored_attention.reference.TILE", 8)  # two blocks a tile, one padded
    arguments = anchored_case()
    anchors, starts = jnp.asarray(ANCHORS), jnp.asarray(STARTS)

    def ours(q, k, v, cache_k, cache_v):
        return attend_anchored(q, k, v, cache_k, cache_v, anchors, starts, visible=visible, window=window)

    expected = one_by_one(*arguments, visible=visible, window=window)
    np.testing.assert_allclose(ours(*arguments), expected, atol=3e-6)
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(expected.shape), jnp.float32)
    loss = lambda f: lambda *x: jnp.sum(f(*x) * weights)
    got = jax.grad(loss(ours), argnums=range(5))(*arguments)
    dense = jax.grad(loss(partial(one_by_one, visible=visible, window=window)), argnums=range(5))(*arguments)
    for ours_d, dense_d in zip(got, dense, strict=True):
        np.testing.assert_allclose(ours_d, dense_d, atol=2e-5)
