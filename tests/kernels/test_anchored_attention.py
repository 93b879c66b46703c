"""The attention of training and its gradients, by every implementation, against dense attention in float64.

Pallas kernels run in the interpreter; that for GPUs knows no tensor cores, whose two products are replaced here by
plain ones.
"""

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import tensor_cores, verify
from dflash_jax.kernels.anchored_attention import attend_anchored, blocks, reference
from dflash_jax.kernels.anchored_attention.trial import Trial
from dflash_jax.kernels.dispatch import using
from dflash_jax.kernels.interval_attention import api
from dflash_jax.kernels.shapes import TRAINING, Anchored

INTERPRETED = {"xla": nullcontext, "tpu": lambda: pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())}
if hasattr(plgpu, "force_gpu_interpret_mode"):  # from jax 0.12 on
    INTERPRETED["gpu"] = plgpu.force_gpu_interpret_mode
# One row of each kind: two documents, a block that sees nothing, anchors out of order, more than one chunk.
ANCHORS = np.asarray([[3, 150, 150, 290, 0], [20, 300, 140, 7, 64]])
STARTS = np.asarray([[0, 0, 130, 130, 0], [0, 129, 0, 7, 10]])


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    plain = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)
    monkeypatch.setattr(tensor_cores, "product", lambda a, b: plain(a[...], b[...].T))
    monkeypatch.setattr(tensor_cores, "add_product", lambda acc, a, b: acc + plain(a, b[...]))


def dense(shape, arrays, anchors, starts, d_out):
    """What blocks attend to and the gradients of all arrays, one block at a time in float64."""
    q, k, v, context_k, context_v, d_out = (np.asarray(x, np.float64) for x in (*arrays, d_out))
    A, T, F, N, K, H, S, causal, window = shape
    out, d_q, d_k, d_v, d_context_k, d_context_v = map(np.zeros_like, (q, q, k, v, context_k, context_v))
    at = F - T + np.arange(T)
    slots = np.arange(S)
    for b, a, head in itertools.product(range(len(q)), range(A), range(K)):
        anchor, start = anchors[b, a], starts[b, a]
        held = np.concatenate([slots, anchor + np.arange(F)])
        positions = anchor + at
        own = at[:, None] >= np.arange(F) if causal else np.ones((T, F), bool)
        seen = np.concatenate([np.broadcast_to((slots >= start) & (slots < anchor), (T, S)), own], axis=1)
        if window is not None:
            seen = seen & (np.abs(positions[:, None] - held) < window)
        keys, values = (np.concatenate([x[b, head], y[b, a, head]]) for x, y in ((context_k, k), (context_v, v)))
        for n in range(head * N // K, (head + 1) * N // K):
            s = np.where(seen, q[b, a, :, n] @ keys.T * H**-0.5, -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[b, a, :, n] = p @ values
            d = d_out[b, a, :, n]
            d_s = p * (d @ values.T - np.sum(d * out[b, a, :, n], axis=1, keepdims=True)) * H**-0.5
            d_q[b, a, :, n] = d_s @ keys
            d_keys, d_values = d_s.T @ q[b, a, :, n], p.T @ d
            d_context_k[b, head] += d_keys[:S]
            d_context_v[b, head] += d_values[:S]
            d_k[b, a, head] += d_keys[S:]
            d_v[b, a, head] += d_values[S:]
    return out, d_q, d_k, d_v, d_context_k, d_context_v


def check(implementation, shape, anchors, starts, dtype=None):
    dtype = dtype or (jnp.bfloat16 if implementation == "gpu" else jnp.float32)
    A, T, F, N, K, H, S, causal, window = shape
    rng, B = np.random.default_rng(5), len(anchors)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal((B, *sizes)), dtype)
    arrays = draw(A, T, N, H), draw(A, K, F, H), draw(A, K, F, H), draw(K, S, H), draw(K, S, H)
    d_out = draw(A, T, N, H)
    bounds = jnp.asarray(anchors, jnp.int32), jnp.asarray(starts, jnp.int32)
    how = {"visible": "causal" if causal else "full", "window": window, "implementation": implementation}

    def both(*arrays):
        out, pull = jax.vjp(lambda *x: attend_anchored(*x, *bounds, **how), *arrays)
        return out, *pull(d_out)

    with INTERPRETED[implementation]():
        got = jax.jit(both)(*arrays)
    assert all(x.dtype == dtype for x in got)
    tolerance = 0.01 if dtype == jnp.bfloat16 else 3e-6
    for mine, right in zip(got, dense(shape, arrays, anchors, starts, d_out), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), right, atol=tolerance * max(1, np.abs(right).max()))


def packed(shape, count, rows=1):
    """A row's anchors in order, and where their documents start: three of them, and blocks that only fill up."""
    rng, S = np.random.default_rng(7), shape.S
    anchors = np.sort(rng.integers(0, S, (rows, count)), axis=1)
    ends = np.asarray([0, S // 4, S // 2 + 9, S])
    starts = ends[np.searchsorted(ends, anchors, side="right") - 1]
    anchors[:, -2:] = starts[:, -2:] = 0
    return anchors, starts


CASES = [("causal", None), ("full", 3), ("full", 140), ("causal", 140)]


@pytest.mark.parametrize(("visible", "window"), CASES)
def test_blocks_and_their_gradients(visible, window, monkeypatch):
    monkeypatch.setattr(reference, "TILE", 8)  # two blocks a tile, one padded
    check("xla", Anchored(5, 4, 4, 4, 2, 8, 300, visible == "causal", window), ANCHORS, STARTS)


@pytest.mark.parametrize(("visible", "window"), CASES)
def test_loops_of_known_length_give_the_same(visible, window, monkeypatch):
    """As GPUs have them without a kernel: the host need not ask how many chunks there are to see."""
    shape = Anchored(5, 4, 4, 4, 2, 8, 300, visible == "causal", window)
    monkeypatch.setattr(reference, "LARGE", 128)  # more than one chunk
    with using("xla", "gpu"):
        check("xla", shape, ANCHORS, STARTS)
        arrays = [
            jnp.zeros((2, *size)) for size in ((5, 4, 4, 8), (5, 2, 4, 8), (5, 2, 4, 8), (2, 300, 8), (2, 300, 8))
        ]
        call = partial(attend_anchored, visible=visible, window=window)
        text = jax.jit(call).lower(*arrays, ANCHORS, STARTS).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    assert loops
    assert all('"known_trip_count":{' in line for line in loops)


KERNELS = [name for name in INTERPRETED if name != "xla"]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(
    ("visible", "window"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_kernels(implementation, visible, window):
    """Rows in any order; numbers of queries and keys that are no multiples of anything."""
    check(implementation, Anchored(5, 4, 4, 4, 2, 64, 300, visible == "causal", window), ANCHORS, STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", TRAINING)
def test_real_shapes(implementation, name):
    """Whole rows and blocks of real drafters, with the query heads of one key-value head and fewer blocks."""
    shape = TRAINING[name]
    count = min(shape.A, 48 * 16 // shape.T, 200)
    shape = shape._replace(A=count, N=shape.N // shape.K, K=1)
    check(implementation, shape, *packed(shape, count))


@pytest.mark.slow
def test_bfloat16_on_tpu():
    shape = Anchored(40, 7, 10, 4, 2, 128, 700, True, 100)
    check("tpu", shape, *packed(shape, 40, rows=2), dtype=jnp.bfloat16)


def test_what_is_not_seen_is_not_visited():
    """Of sorted anchors, a tile visits its documents' chunks up to its anchors, and those of its own blocks."""
    T, S, A = 16, 3072, 96
    anchors = np.linspace(0, S - 1, A).astype(np.int32)[None]
    starts = np.where(anchors >= 1500, 1500, 0).astype(np.int32)
    bounds = blocks.intervals(jnp.asarray(anchors), jnp.asarray(starts), T, T, S, False, None)
    seen = np.asarray(api.seen_chunks(bounds, 128, 128))[0]  # [2, tiles, 2]: first and count
    for tile in range(A * T // 128):
        some = slice(tile * 8, tile * 8 + 8)
        low, high = starts[0, some].min(), anchors[0, some].max()
        first, count = seen[0, tile]
        assert (first, count) == ((low // 128, -(-high // 128) - low // 128) if high else (0, 0))
        assert tuple(seen[1, tile]) == (S // 128 + tile, 1)
    seeing = np.asarray(api.seeing_tiles(bounds, 128, 128, S, S + A * T))[0]
    for chunk in range(S // 128):
        sees = (starts[0] < (chunk + 1) * 128) & (anchors[0] > chunk * 128)
        tiles = np.unique(np.nonzero(sees)[0] // 8)
        assert tuple(seeing[chunk]) == (tiles[0], tiles[-1] - tiles[0] + 1)
    assert [tuple(x) for x in seeing[S // 128 :]] == [(tile, 1) for tile in range(A * T // 128)]
    visited = int(seen[0, :, 1].sum())
    assert visited < 0.35 * (A * T // 128) * (S // 128)  # two documents, each half of it seen on average


def test_what_kernels_decline():
    def call(implementation, dtype, H):
        spec = lambda *size: jax.ShapeDtypeStruct((1, *size), dtype)
        ints = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        arrays = spec(8, 4, 4, H), spec(8, 2, 4, H), spec(8, 2, 4, H), spec(2, 256, H), spec(2, 256, H)
        return jax.eval_shape(
            partial(attend_anchored, visible="full", implementation=implementation), *arrays, ints, ints
        )

    with pytest.raises(
        ValueError, match="does not support this case: queries in float32, .* supports bfloat16 and float16"
    ):
        call("gpu", jnp.float32, 128)
    with pytest.raises(ValueError, match="does not support this case: head dim 256; it supports 64, 128"):
        call("gpu", jnp.bfloat16, 256)
    with pytest.raises(ValueError, match="does not support this case: queries in float16"):
        call("tpu", jnp.float16, 128)
    with pytest.raises(ValueError, match="head dim 96"):
        call("tpu", jnp.float32, 96)


@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_pass_their_trial(implementation):
    dtype = "bfloat16" if implementation == "gpu" else "float32"
    trial = Trial(1, 9, 16, 16, 2, 1, 64, 200, dtype, "causal", 50, 0.125)
    with INTERPRETED[implementation]():
        assert verify._compared(implementation, trial, attend_anchored) == verify.Finding(None)


@pytest.mark.parametrize("name", TRAINING)
def test_trials_are_small_and_fit_the_same_tiles(name):
    A, T, F, N, K, H, S, causal, window = TRAINING[name]
    made, spec = [], lambda *size: jax.ShapeDtypeStruct((2, *size), jnp.bfloat16)
    options = {"visible": "causal" if causal else "full", "window": window, "scale": 0.1}
    take = lambda q, k, context: made.append(Trial.of(q, k, context, **options))
    jax.eval_shape(take, spec(A, T, N, H), spec(A, K, F, H), spec(K, S, H))
    (trial,) = made
    assert (trial.T, trial.F, trial.H, trial.N // trial.K) == (T, F, H, N // K)
    assert trial.A * T <= 5120
    assert trial.S <= 1024
    rounded = lambda count: -(-count // 128) * 128
    for mine, real in ((trial.A * T, A * T), (trial.A * F, A * F), (trial.S, S)):
        assert (mine % 128 == 0) is (real % 128 == 0)
        assert all((rounded(mine) % tile == 0) is (rounded(real) % tile == 0) for tile in (256, 512, 1024))
