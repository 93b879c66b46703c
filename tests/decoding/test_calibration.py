"""Proposals learn how far to trust the drafter; what is emitted never depends on it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.decoding.calibration import MEMORY, MOST, SHARPNESS, Lessons, init_calibration
from dflash_jax.decoding.selection import likeliest, pick
from dflash_jax.drafters import drafter_config
from dflash_jax.infer.engine import timing
from tests import tiny

DEPTH, V = 5, 40


def test_every_sharpness_is_tried():
    choice = tiny.choice_of(6, DEPTH, V, 0.7)
    logits = jax.random.normal(jax.random.key(1), (6, DEPTH, V)) * 2
    for best, c in enumerate(SHARPNESS):
        ours = pick(choice.replace(sharpness=jnp.full(DEPTH, best)), logits)
        for d in range(DEPTH):
            noise = 0 if math.isinf(c) else choice.noise[:, d] / c  # c x + g and x + g / c have the same best
            expected = jnp.argmax(logits[:, d] / 0.7 + noise, axis=1)
            np.testing.assert_array_equal(ours.tokens[:, d], expected)
            np.testing.assert_array_equal(ours.lessons.trials[:, d, best], expected)
    coupled = choice.tokens(logits)
    np.testing.assert_array_equal(ours.lessons.trials[..., 0], coupled)
    assert np.mean(ours.lessons.trials[..., -1] != coupled) > 0.1  # the control: the noise matters


@pytest.mark.parametrize("c", SHARPNESS)
def test_the_noise_decides_which_candidates_are_looked_at(c):
    """A drafter that scores a few candidates gets those that may be picked: a row without noise the likeliest ones."""
    choice = tiny.choice_of(2, DEPTH, V, 0.7)
    temperature = jnp.asarray([0.0, 0.7])
    choice = choice.replace(sampling=choice.sampling.replace(temperature=temperature))
    logits = jax.random.normal(jax.random.key(1), (2, DEPTH, V)) * 2
    ours = choice.replace(sharpness=jnp.full(DEPTH, SHARPNESS.index(c)))
    noise = 0 if math.isinf(c) else np.asarray(choice.noise[1, :DEPTH]) / c
    keys = np.stack([logits[0], logits[1] / 0.7 + noise])
    scores, places = likeliest(ours, logits, 4)
    np.testing.assert_array_equal(np.sort(places), np.sort(np.argsort(-keys)[..., :4]))
    np.testing.assert_array_equal(scores, np.take_along_axis(np.asarray(logits), np.asarray(places), axis=2))
    likely = np.argsort(-np.asarray(logits))[..., :4]
    greedy = choice.sampling.replace(temperature=jnp.zeros(2))
    for other in (choice.replace(plain=True), choice.replace(sampling=greedy)):
        np.testing.assert_array_equal(likeliest(other, logits, 4)[1], likely)
    differs = np.any(np.sort(places[1]) != np.sort(likely[1]))
    assert differs == (not math.isinf(c))


def test_greedy_rows_propose_the_best_token_beside_sampled_ones():
    choice = tiny.choice_of(2, DEPTH, V, 1.0)
    temperature = jnp.asarray([0.0, 1.0])
    noise = jnp.where(temperature[:, None, None] > 0, choice.noise, 0)
    choice = choice.replace(sampling=choice.sampling.replace(temperature=temperature), noise=noise)
    logits = jax.random.normal(jax.random.key(1), (2, DEPTH, V))
    trials = pick(choice.replace(sharpness=jnp.zeros(DEPTH, jnp.int32)), logits).lessons.trials
    np.testing.assert_array_equal(trials[0], np.argmax(logits[0], axis=1)[:, None].repeat(len(SHARPNESS), 1))


def test_counters_fade_and_find_the_better_one():
    calibration = init_calibration(DEPTH)
    assert calibration.best.tolist() == [0] * DEPTH
    trials = jnp.zeros((3, DEPTH, len(SHARPNESS)), jnp.int32).at[..., 2].set(7)
    right, judged = jnp.full((3, DEPTH), 7), jnp.zeros((3, DEPTH), bool).at[:2, :4].set(True)
    learn = lambda known, right: known.learn(Lessons(trials), right, None, judged, jnp.ones(3, bool))
    after = learn(calibration, right)
    assert after.best.tolist() == [2, 2, 2, 2, 0]
    assert after.hits[:, 2].tolist() == [2, 2, 2, 2, 0]
    again = learn(after, right * 0)
    np.testing.assert_allclose(again.hits[0, 2], 2 * math.exp(-2 / MEMORY))
    assert again.hits[0, 0] == 2
    frozen = calibration.replace(frozen=True)
    assert learn(frozen, right) is frozen


def test_the_sharpness_stored_with_a_drafter_is_where_it_begins():
    raw = tiny.drafter_config(dflash_config={"proposal_sharpness": [1.4, 1000]})
    start = drafter_config(raw).proposal_sharpness
    assert init_calibration(3, start).best.tolist() == [1, 4, 4]
    with pytest.raises(ValueError, match="proposal_sharpness"):
        drafter_config(tiny.drafter_config(dflash_config={"proposal_sharpness": [-1]}))


def test_what_is_stored_of_depths_that_were_never_right():
    hits = jnp.zeros((DEPTH, len(SHARPNESS)))
    assert init_calibration(DEPTH).sharpness == []
    learnt = init_calibration(DEPTH).replace(hits=hits.at[0, 1].set(3).at[2, 4].set(1))
    assert learnt.sharpness == [1.5, 1.5, MOST, MOST, MOST]


def test_timing_the_steps_of_an_engine_teaches_nothing(tmp_path):
    """Steps are timed on random tokens, which say nothing of how far the drafter's scores are to be trusted."""
    target = load_target(tiny.write_target(tmp_path / "target", tiny.target_config()))
    drafter = load_drafter(tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config()))
    engine = Engine(target, drafter, slots=1, max_length=64, tree=6)
    learned = engine.batch.state.calibration
    learned = learned.replace(hits=learned.hits + 2, weights=learned.weights - 0.3)
    before = jax.device_get(learned)
    engine.batch.state = engine.batch.state.replace(calibration=learned)
    assert all(seconds > 0 for seconds in timing.step_seconds(engine.batch).values())
    after = engine.batch.state.calibration
    np.testing.assert_array_equal(after.hits, before.hits)
    np.testing.assert_array_equal(after.weights, before.weights)
    np.testing.assert_array_equal(after.information, before.information)


@pytest.mark.slow
def test_an_engine_learns_unless_it_is_deterministic(tmp_path):
    target = load_target(tiny.write_target(tmp_path / "target", tiny.target_config()))
    drafter = load_drafter(tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config()))
    prompts = [[5, 9, 11], [1, 2, 3, 4, 5, 6]]
    requests = [tiny.ask(prompt, 24, 1.0, seed=i, stop_token_ids=()) for i, prompt in enumerate(prompts)]
    plain = [done.token_ids for done in Engine(target, None, slots=2, max_length=256).generate(requests)]
    for deterministic in (False, True):
        engine = Engine(target, drafter, slots=2, max_length=256, deterministic=deterministic)
        answers = [done.token_ids for done in engine.generate(requests)]
        hits = np.asarray(engine.batch.state.calibration.hits)
        assert (hits.sum() > 0) == (not deterministic)
        assert answers == plain
    assert hits.shape == (7, len(SHARPNESS))
