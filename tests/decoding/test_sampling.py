"""Filters against a sorting reference, and the sampled distribution against exact probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.decoding.sampling import (
    Sampling,
    _units,
    best_score,
    check_sampling,
    filter_scores,
    first_argmax,
    gumbel_noise,
    reference,
    request_key,
    scaled_scores,
    select,
    top_k,
)
from dflash_jax.kernels.dispatch import using
from dflash_jax.mesh import make_mesh, parse_mesh

filtered, selected = jax.jit(filter_scores), jax.jit(select)


def settings(temperature, top_k, top_p, rows=1, min_p=0.0):
    return Sampling(
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, min_p, jnp.float32),
        jax.random.split(jax.random.key(7), rows),
    )


def probabilities(logits, temperature, top_k, top_p):
    """What is sampled from, by sorting in float64."""
    with jax.enable_x64(True):
        scores = reference(jnp.asarray(np.asarray(logits, np.float64)[None, None]), settings(temperature, top_k, top_p))
        return np.asarray(jax.nn.softmax(scores[0, 0]))


def test_scores_are_those_of_the_sorted_reference():
    """Rows of random settings; a part of them is greedy or lacks a filter. Half of the logits are full of ties."""
    rng, scaled, by_sorting = np.random.default_rng(0), jax.jit(scaled_scores), jax.jit(reference)
    some = lambda values, neutral: np.where(rng.random(64) < 0.3, neutral, values)
    for case in range(8):
        logits = jnp.asarray(rng.normal(0, rng.uniform(0.5, 6), (64, 3, 150)), jnp.float32)
        logits = jnp.round(logits) if case % 2 else logits
        sampling = Sampling(
            jnp.asarray(some(rng.uniform(0.05, 3, 64), 0), jnp.float32),
            jnp.asarray(some(rng.integers(1, 200, 64), 0), jnp.int32),
            jnp.asarray(some(rng.uniform(0.01, 1, 64), 1), jnp.float32),
            jnp.asarray(some(rng.uniform(0, 0.3, 64), 0), jnp.float32),
            jax.random.split(jax.random.key(case), 64),
        )
        np.testing.assert_array_equal(scaled(logits, sampling), by_sorting(logits, sampling))


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.05])
def test_filters_keep_what_a_sort_keeps(top_k, top_p):
    logits = 3 * jax.random.normal(jax.random.key(top_k), (1, 6, 200))
    got = filtered(logits, settings(1.0, top_k, top_p))
    for row, kept in zip(logits[0], np.asarray(got[0]), strict=True):
        np.testing.assert_array_equal(np.isfinite(kept), probabilities(row, 1.0, top_k, top_p) > 0)
        np.testing.assert_array_equal(kept[np.isfinite(kept)], np.asarray(row)[np.isfinite(kept)])


@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p_is_a_share_of_the_best(min_p):
    logits = 3 * jax.random.normal(jax.random.key(2), (1, 6, 200))
    kept = np.isfinite(filtered(logits, settings(1.0, 0, 1.0, min_p=min_p)))
    p = np.asarray(jax.nn.softmax(logits, axis=-1))
    np.testing.assert_array_equal(kept, p >= min_p * p.max(axis=-1, keepdims=True) * (1 - 1e-6))
    both = np.isfinite(filtered(logits, settings(1.0, 5, 0.9, min_p=min_p)))
    np.testing.assert_array_equal(both, kept & np.isfinite(filtered(logits, settings(1.0, 5, 0.9))))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (40, 1.0), (40, 0.95), (3000, 0.999), (0, 0.99999)])
def test_every_platform_searches_for_the_same_cut(platform, top_k, top_p):
    """And a tail of rare tokens counts: top_p = 0.99999 ends among those of 1e-9. Sums of float32 may put the end of a
    top-p where float64 would with 2e-7 more or less."""
    logits = 3 * jax.random.normal(jax.random.key(1), (2, 3, 20_000))
    own = jax.jit(lambda *given: filter_scores(*given))  # traced for this platform
    with using(None, platform):
        got = own(logits, settings(1.0, top_k, top_p, rows=2))
    for row, kept in zip(np.asarray(logits).reshape(6, -1), np.asarray(got).reshape(6, -1), strict=True):
        least, most = (probabilities(row, 1.0, top_k, top_p + error) > 0 for error in (-2e-7, 2e-7))
        assert np.isfinite(kept)[least].all()
        assert not np.isfinite(kept)[~most].any()
        assert (most & ~least).sum() <= 0.05 * most.sum()
        np.testing.assert_array_equal(kept[np.isfinite(kept)], row[np.isfinite(kept)])


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_ties_with_the_last_token_are_kept(platform):
    """By top-k and by top-p; zeros of both signs are apart, minus infinity is never kept, and equal tokens all are."""
    inf, count = jnp.inf, lambda kept: np.isfinite(kept).sum(axis=-1).tolist()
    logits = jnp.asarray([[[2.0, 1.0, 1.0, 1.0, 0.0, -0.0, -1.0, -inf], [-3.0] * 8, [5.0, *[-inf] * 7]]])
    own = jax.jit(lambda sampling: filter_scores(logits, sampling))  # traced for this platform
    with using(None, platform):
        kept = {k: count(own(settings(1.0, k, 1.0))) for k in (1, 2, 4, 5, 6, 7)}
        mass = {p: count(own(settings(1.0, 0, p))) for p in (0.3, 0.6, 0.9, 1.0)}
        both = count(own(settings(1.0, 2, 0.5)))
    assert kept == {1: [[1, 8, 1]], 2: [[4, 8, 1]], 4: [[4, 8, 1]], 5: [[5, 8, 1]], 6: [[6, 8, 1]], 7: [[7, 8, 1]]}
    # Of 17.9: 7.4, thrice 2.7, twice 1 and 0.4.
    assert mass == {0.3: [[1, 8, 1]], 0.6: [[4, 8, 1]], 0.9: [[5, 8, 1]], 1.0: [[7, 8, 1]]}
    assert both == [[4, 8, 1]]


def test_masses_of_equal_and_of_rare_tokens_add_up():
    """Of 150,000 equal tokens, and beside one that has nearly everything: each of a third of a unit, 10**-9.5."""
    for mass in (2.0**30 / 150_000, 1 / 3, 0.01):
        units = jax.jit(_units)(jnp.full((1, 1, 150_000), mass, jnp.float32))
        assert abs(int(jnp.sum(units)) - 150_000 * mass) < 100 + 2e-7 * 2**30


def test_rows_are_filtered_by_their_own_settings():
    logits = jax.random.normal(jax.random.key(0), (3, 1, 50))
    mixed = Sampling(
        jnp.ones(3),
        jnp.asarray([0, 3, 0]),
        jnp.asarray([1.0, 1.0, 0.3]),
        jnp.zeros(3),
        jax.random.split(jax.random.key(1), 3),
    )
    kept = np.isfinite(filtered(logits, mixed)).sum(axis=-1)[:, 0]
    assert kept[0] == 50
    assert kept[1] == 3
    assert 1 <= kept[2] < 50


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 4, 1.0), (1.5, 6, 0.8)])
def test_samples_follow_the_exact_distribution(temperature, top_k, top_p):
    """Chi-square of 120,000 draws at successive positions, tiny vocabulary."""
    draws, V = 120_000, 8
    logits = 1.5 * jax.random.normal(jax.random.key(3), (V,))
    sampling = settings(temperature, top_k, top_p)
    noise = gumbel_noise(sampling, jnp.arange(draws)[None], V)
    tokens = np.asarray(selected(jnp.broadcast_to(logits, (1, draws, V)), noise, sampling)[0])
    expected = probabilities(logits, temperature, top_k, top_p) * draws
    seen = np.bincount(tokens, minlength=V)
    assert not np.any(seen[expected == 0])
    live = expected > 0
    chi = ((seen - expected)[live] ** 2 / expected[live]).sum()
    assert chi < 30  # 7 degrees of freedom at most: p < 1e-4 above


def test_greedy_rows_ignore_everything_else():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 40))
    sampling = Sampling(
        jnp.asarray([0.0, 1.0]),
        jnp.asarray([3, 0]),
        jnp.asarray([0.1, 1.0]),
        jnp.zeros(2),
        jax.random.split(jax.random.key(1), 2),
    )
    noise = gumbel_noise(sampling, jnp.broadcast_to(jnp.arange(3)[None], (2, 3)), 40)
    assert not np.any(noise[0])
    np.testing.assert_array_equal(selected(logits, noise, sampling)[0], jnp.argmax(logits[0], axis=-1))


def test_float_edges_stay_near_greedy():
    logits = jnp.asarray([[[1.0, 5.0, 4.0, -2.0]]])
    for temperature, top_p in ((1e-38, 1.0), (1e-30, 0.5), (1.0, float(np.finfo(np.float32).tiny))):
        sampling = settings(temperature, 0, top_p)
        noise = gumbel_noise(sampling, jnp.asarray([[3]]), 4)
        assert selected(logits, noise, sampling).tolist() == [[1]]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_ties_go_to_the_lowest_id_and_nan_stays_in_range(device):
    nan, low = jnp.nan, -jnp.inf
    rows = [[1.0, 5.0, 5.0], [low, low, 0.0], [low] * 3, [nan] * 3, [nan, 1.0, 2.0], [1.0, nan, 2.0], [2.0, 1.0, nan]]
    with using(None, device):
        found = jax.jit(first_argmax)(jnp.asarray([rows]))[0].tolist()
        assert found[:3] == [1, 2, 0]
        assert all(0 <= place < 3 for place in found)
        scores = jnp.asarray(np.random.default_rng(0).integers(0, 40, (3, 5, 301)), jnp.float32)  # many are equal
        best, place = best_score(scores)
    assert (best == jnp.max(scores, axis=2)).all()
    assert (place == jnp.argmax(scores, axis=2)).all()


def test_a_prefix_of_the_vocabulary_draws_the_same_noise():
    """What lets a vocabulary shard compute its own slice."""
    sampling = settings(1.0, 0, 1.0)
    positions = jnp.asarray([[3, 9]])
    whole, part = gumbel_noise(sampling, positions, 64)[..., :40], gumbel_noise(sampling, positions, 40)
    # The same draws; the last bit of a logarithm depends on where the processor's vectors end.
    np.testing.assert_allclose(whole, part, rtol=1e-6, atol=1e-6)


def test_request_keys():
    data = jax.random.key_data
    same = request_key(None, 5, "a")
    assert (data(same) == data(request_key(None, 5, "a"))).all()
    assert (data(same) != data(request_key(None, 5, "b"))).any()
    assert (data(same) != data(request_key(None, 6, "a"))).any()
    assert (data(request_key(2**32, 0, "a")) != data(request_key(0, 0, "a"))).any()
    assert (data(request_key(3, 5, "a")) == data(request_key(3, 9, "b"))).all()


@pytest.mark.parametrize(
    "bad",
    [
        (-0.1, 1.0, 0),
        (float("nan"), 1.0, 0),
        (float("inf"), 1.0, 0),
        (1e39, 1.0, 0),
        (1.0, 0.0, 0),
        (1.0, 1.1, 0),
        (1.0, 1.0, -1),
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        check_sampling(*bad)


@pytest.mark.slow
def test_the_tail_of_the_noise_is_there():
    """Of 100,000 equal tokens the largest noise exceeds 15.94 in 1.2% of draws; a coarse uniform never does."""
    vocabulary, draws, chunk = 100_000, 900, 100
    draw = jax.jit(lambda positions: jnp.max(gumbel_noise(settings(1.0, 0, 1.0), positions, vocabulary), axis=-1))
    largest = np.concatenate([draw(start + jnp.arange(chunk)[None])[0] for start in range(0, draws, chunk)])
    share = lambda x: 1 - np.exp(-vocabulary * np.exp(-x))  # of draws whose largest noise exceeds x
    for threshold in (11.0, 12.5, 14.0, 15.95):
        expected = draws * share(threshold)
        deviation = np.sqrt(expected * (1 - share(threshold)))
        assert abs((largest > threshold).sum() - expected) < 4 * deviation
    assert (largest > 15.95).any()  # eleven are expected


def test_the_best_of_a_split_vocabulary():
    """With the barrier on `jax.lax.top_k`'s own result, XLA aborts here."""
    mesh = make_mesh(parse_mesh("model=2", jax.devices()[:2]), jax.devices()[:2])
    scores = jax.random.normal(jax.random.key(0), (2, 3, 64))
    placed = jax.device_put(scores, NamedSharding(mesh, PartitionSpec(None, None, "model")))
    for got, expected in zip(jax.jit(top_k, static_argnums=1)(placed, 4), jax.lax.top_k(scores, 4), strict=True):
        np.testing.assert_array_equal(got, expected)
