"""The XLA implementation: every case against a dense softmax over an explicit list of visible keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import KV, Cache, Fresh, commit
from dflash_jax.kernels.block_attention import attend, reference

TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)


def dense(q, k, v, prefix_k, prefix_v, lengths, positions, mask, window):
    """Loops over rows, queries and heads in float64."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    B, T, N, H = q.shape
    K = k.shape[1]
    out = np.zeros((B, T, N, H))
    for b in range(B):
        for t in range(T):
            p = positions[b, t]
            seen = [c for c in range(lengths[b]) if window is None or p - c < window]
            fresh = [j for j in range(T) if mask[t, j] and (window is None or abs(p - positions[b, j]) < window)]
            for n in range(N):
                g = n // (N // K)
                keys = np.concatenate([prefix_k[b, g, seen], k[b, g, fresh]]).astype(np.float64)
                values = np.concatenate([prefix_v[b, g, seen], v[b, g, fresh]]).astype(np.float64)
                s = keys @ q[b, t, n].astype(np.float64) * H**-0.5
                w = np.exp(s - s.max())
                out[b, t, n] = w @ values / w.sum()
    return out


def case(seed, lengths, T, N, K, H, S):
    rng = np.random.default_rng(seed)
    B = len(lengths)
    fill = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    positions = np.asarray(lengths)[:, None] + np.arange(T)
    block = (jnp.asarray(fill(*shape)) for shape in ((B, T, N, H), (B, K, T, H), (B, K, T, H)))
    return *block, fill(B, K, S, H), fill(B, K, S, H), positions


@pytest.mark.parametrize(
    ("visible", "window"), [("causal", None), ("full", None), ("tree", None), ("causal", 3), ("full", 40)]
)
@pytest.mark.parametrize(
    ("lengths", "S", "heads"),
    [([0, 5, 64], 64, (4, 2)), ([300, 1, 129, 128], 300, (2, 1)), ([0, 0], 7, (3, 3)), ([256], 256, (8, 2))],
)
def test_equals_dense_attention(visible, window, lengths, S, heads):
    (N, K), T = heads, 4
    q, k, v, prefix_k, prefix_v, positions = case(1, lengths, T, N, K, 8, S)
    mask = {"causal": np.tril(np.ones((T, T), bool)), "full": np.ones((T, T), bool), "tree": TREE}[visible]
    expected = dense(q, k, v, prefix_k, prefix_v, lengths, positions, mask, window)
    for row, length in enumerate(lengths):  # poison what was never written
        prefix_k[row, :, length:] = np.nan
        prefix_v[row, :, length:] = np.nan
    got = jax.jit(attend, static_argnames=("window", "visible") if visible != "tree" else ("window",))(
        q,
        jnp.asarray(positions, jnp.int32),
        k,
        v,
        KV(jnp.asarray(prefix_k), jnp.asarray(prefix_v)),
        jnp.asarray(lengths, jnp.int32),
        visible=jnp.asarray(TREE) if visible == "tree" else visible,
        window=window,
    )
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("length", [3, 9, 10, 11, 30])
def test_ring_reads_the_last_window(length):
    """A ring of W - 1 slots gives what a full cache gives under the window."""
    window, T = 10, 4
    q, k, v, prefix_k, prefix_v, positions = case(2, [length], T, 4, 2, 8, 40)
    ring = KV(jnp.full((1, 2, window - 1, 8), jnp.nan), jnp.full((1, 2, window - 1, 8), jnp.nan), True)
    cache = Cache((ring,), (0,))
    for start in range(0, length, 4):  # written in chunks, as a prefill does
        count = min(4, length - start)
        part = slice(start, start + 4)
        fresh = Fresh(jnp.asarray(prefix_k[:, :, part]), jnp.asarray(prefix_v[:, :, part]))
        cache = commit(cache, [fresh], jnp.asarray([start]), jnp.asarray([count]))
    lengths = jnp.asarray([length])
    got = attend(q, jnp.asarray(positions), k, v, cache.entries[0], lengths, visible="causal", window=window)
    mask = np.tril(np.ones((T, T), bool))
    expected = dense(q, k, v, prefix_k, prefix_v, [length], positions, mask, window)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_rows_of_a_larger_cache():
    q, k, v, prefix_k, prefix_v, positions = case(3, [5, 20], 3, 4, 2, 8, 32)
    entry = KV(jnp.asarray(prefix_k), jnp.asarray(prefix_v))
    lengths = jnp.asarray([5, 20])
    whole = attend(q, jnp.asarray(positions), k, v, entry, lengths, visible="causal")
    one = attend(
        q[1:],
        jnp.asarray(positions[1:]),
        k[1:],
        v[1:],
        entry,
        lengths[1:],
        visible="causal",
        rows=jnp.asarray([1]),
    )
    np.testing.assert_allclose(one, whole[1:], atol=1e-6)
    turned = (jnp.asarray(x)[::-1] for x in (q, positions, k, v))
    first, second, *fresh = turned
    rows = {"visible": "causal", "rows": jnp.asarray([1, 0])}
    both = attend(first, second, *fresh, entry, lengths[::-1], **rows)
    np.testing.assert_allclose(both[::-1], whole, atol=1e-6)


def test_bfloat16_stays_close_to_float32():
    q, k, v, prefix_k, prefix_v, positions = case(4, [200], 4, 4, 2, 16, 256)
    wide = attend(
        q,
        jnp.asarray(positions),
        k,
        v,
        KV(jnp.asarray(prefix_k), jnp.asarray(prefix_v)),
        jnp.asarray([200]),
        visible="full",
    )
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, prefix_k, prefix_v)]
    got = attend(half[0], jnp.asarray(positions), *half[1:3], KV(*half[3:]), jnp.asarray([200]), visible="full")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), wide, atol=0.03)


def test_packed_documents_do_not_see_each_other():
    """A chunk that holds the end of one document and the start of another, after a cache of the first."""
    length, T, starts = 140, 6, np.asarray([[0, 0, 142, 142, 142, 145]])
    q, k, v, prefix_k, prefix_v, positions = case(7, [length], T, 4, 2, 8, 160)
    got = attend(
        q,
        jnp.asarray(positions),
        k,
        v,
        KV(jnp.asarray(prefix_k), jnp.asarray(prefix_v)),
        jnp.asarray([length]),
        visible="causal",
        starts=jnp.asarray(starts),
    )
    own = np.tril(np.ones((T, T), bool)) & (positions[0][None] >= starts[0][:, None])
    expected = dense(q, k, v, prefix_k, prefix_v, [length], positions, own, None)
    np.testing.assert_allclose(got[:, :2], expected[:, :2], atol=2e-6)
    alone = dense(q, k, v, prefix_k, prefix_v, [0], positions, own, None)
    np.testing.assert_allclose(got[:, 2:], alone[:, 2:], atol=2e-6)


def test_a_long_block_alone_is_taken_head_by_head(monkeypatch):
    q, k, v, *_, positions = case(8, [0, 0], 20, 4, 2, 8, 1)
    empty = KV(jnp.zeros((2, 2, 0, 8)), jnp.zeros((2, 2, 0, 8)))
    call = (q, jnp.asarray(positions), k, v, empty, jnp.zeros(2, jnp.int32))
    options = {"visible": "causal", "window": 9, "sinks": q[0, 0, :, 0]}
    together = attend(*call, **options)
    monkeypatch.setattr(reference, "MOST_SCORES", 1)
    np.testing.assert_allclose(attend(*call, **options), together, atol=1e-6)
