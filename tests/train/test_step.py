"""The optimiser step: what it must not depend on, and what it must learn."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import spec_generate
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.drafters import new_drafter
from dflash_jax.train.step import Batch, init_state, make_optimizer, make_schedule, muon_dimensions, train_step
from tests import tiny

CONFIG = TrainConfig(
    block_size=6, num_layers=2, length=32, anchors=12, row_anchors=12, batch_size=4, learning_rate=1e-3, remat=False
)


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 30, 12)
    return [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) > 3) for n in sizes]


@pytest.fixture(scope="module")
def batch(examples):
    return Batch(*map(jnp.asarray, Packing(examples, 32, 4, 0).batch(0)))


def one_step(target, batch, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    drafter, _ = new_drafter(target, config, tiny.MASK)
    state = init_state(drafter, config, 100)
    return jax.jit(partial(train_step, config, 100))(target, drafter, state, batch), (drafter, state)


@pytest.fixture(scope="module")
def plain(target, batch):
    return one_step(target, batch)[0]


CHANGES = {"in parts": {"accumulate": 4}, "recomputing layers": {"remat": True}, "small loss chunks": {"loss_chunk": 7}}


@pytest.mark.parametrize("name", [n if n == "in parts" else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_the_step_does_not_depend_on_how_it_is_computed(target, batch, plain, name):
    (state, metrics), _ = one_step(target, batch, **CHANGES[name])
    for key in ("loss", "accuracy", "teacher_forced_tau", "labels", "gradient_norm"):
        np.testing.assert_allclose(metrics[key], plain[1][key], rtol=2e-4)
    # Adam's first update is the sign of the gradient: compare the moments, which are the gradient itself.
    moments = lambda state: jax.tree.leaves(optax.tree.get(state.optimizer, "mu"))
    for a, b in zip(moments(state), moments(plain[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"weighting": "dpace"}, {"kl": 0.5}, {"cross_entropy": 0.1, "total_variation": 0.9}]
)
def test_other_losses_are_finite_and_differ(target, batch, plain, changes):
    _, metrics = one_step(target, batch, **changes)[0]
    assert metrics["finite"]
    assert abs(float(metrics["loss"] - plain[1]["loss"])) > 1e-3


def test_distillation_compares_with_the_target_at_the_position_before(target):
    """KL of one conversation alone in its row, against the target's and the drafter's plain passes."""
    from dflash_jax.train.blocks import Blocks, draw_blocks, target_features

    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 60, (1, 32)), jnp.int32)
    rows = Batch(tokens, jnp.zeros((1, 32), jnp.int32), jnp.arange(32)[None] > 3)
    config = {"batch_size": 1, "cross_entropy": 0.0, "kl": 1.0, "row_anchors": 32, "anchors": 32}
    (_, metrics), (drafter, _) = one_step(target, rows, **config)

    @jax.jit
    def passes(tokens, blocks):
        hidden, _, _ = target.forward(tokens, jnp.arange(32)[None], None, target.init_cache(1, 32))
        features, _ = target_features(target, drafter.taps, tokens, rows.starts)
        draft = drafter.teacher_forced(target, features, blocks)[0]
        return jax.nn.log_softmax(target.unembed(hidden)[0]), jax.nn.log_softmax(drafter.unembed(target, draft))

    blocks: Blocks = draw_blocks(  # all of them, so that the key does not matter
        jax.random.key(0)[None], *rows[:3], count=32, per_document=32, block_size=6, predictions=5
    )
    p, q = passes(tokens, blocks)
    weights = np.where(blocks.labelled[0], np.exp(-np.arange(5) / TrainConfig(block_size=6).decay)[None], 0)
    kl = lambda shift: jnp.sum(jnp.exp(p[at + shift]) * (p[at + shift] - q), axis=-1)
    at = np.minimum(np.asarray(blocks.anchors[0])[:, None] + 1 + np.arange(5)[None], 31)
    right, wrong = (float((kl(shift) * weights).sum() / weights.sum()) for shift in (-1, 0))
    assert metrics["loss"] == pytest.approx(right, rel=1e-4)
    assert abs(right - wrong) > 10 * abs(metrics["loss"] - right)


@pytest.mark.slow
def test_feature_noise_changes_the_loss_a_little(target, batch, plain):
    _, metrics = one_step(target, batch, feature_noise=0.05)[0]
    assert 0 < abs(float(metrics["loss"] - plain[1]["loss"])) < 0.5


def test_cached_features_give_the_same_step(target, batch, plain):
    from dflash_jax.train.blocks import target_features

    drafter, _ = new_drafter(target, CONFIG, tiny.MASK)
    features, hidden = target_features(target, drafter.taps, batch.tokens, batch.starts)
    _, metrics = one_step(target, batch._replace(features=features, hidden=hidden))[0]
    np.testing.assert_allclose(metrics["loss"], plain[1]["loss"], rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing(target, batch):
    broken = target.replace(params=target.params | {"embed_tokens": target.params["embed_tokens"] * jnp.nan})
    (state, metrics), (_, before) = one_step(broken, batch)
    assert not metrics["finite"]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_without_labels_is_no_step_in_any_direction(target, batch):
    (state, metrics), (_, before) = one_step(target, batch._replace(supervised=jnp.zeros_like(batch.supervised)))
    assert metrics["finite"]
    assert metrics["labels"] == metrics["loss"] == metrics["gradient_norm"] == 0
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(before.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_bfloat16_computes_with_float32_parameters(target, batch, plain):
    half = target.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    (state, metrics), _ = one_step(half, batch)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(metrics["loss"], plain[1]["loss"], rtol=0.02)
    np.testing.assert_allclose(metrics["gradient_norm"], plain[1]["gradient_norm"], rtol=0.1)


def test_embedding_and_head_are_frozen_and_all_else_learns(target, batch):
    own = {name: target.params["embed_tokens"] * scale for name, scale in (("embed_tokens", 0.9), ("lm_head", 1.1))}
    drafter, _ = new_drafter(target, CONFIG, tiny.MASK)
    owner = dataclasses.replace(drafter.config, own_embedding=True, own_head=True)
    drafter = drafter.replace(params=drafter.params | own, config=owner)
    state = init_state(drafter, CONFIG, 100)
    state, metrics = jax.jit(partial(train_step, CONFIG, 100))(target, drafter, state, batch)
    assert metrics["finite"]
    assert set(drafter.params) - set(state.params) == {"embed_tokens", "lm_head"}
    drafter = drafter.replace(params={name: drafter.params[name] for name in state.params})
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, drafter.params)
    assert all(jax.tree.leaves(changed))


def test_muon_takes_every_matrix_and_nothing_else(target, batch):
    (state, metrics), (drafter, before) = one_step(target, batch, optimizer="muon")
    assert metrics["finite"]
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, before.params)
    assert all(jax.tree.leaves(changed))
    dimensions = muon_dimensions(drafter.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(drafter.params):
        taken = dimensions
        for key in path:
            taken = taken[key.key]
        name = jax.tree_util.keystr(path)
        assert (taken is not None) == (leaf.ndim >= 2 and "norm" not in name), name


def test_schedules():
    at = lambda config, steps: [float(make_schedule(config, 100)(step)) for step in steps]
    cosine = TrainConfig(learning_rate=1.0, warmup=0.1, final_learning_rate=0.1)
    values = at(cosine, [0, 4, 9, 10, 55, 100])
    np.testing.assert_allclose(values, [0.1, 0.5, 1.0, 1.0, 0.55, 0.1], atol=1e-5)
    wsd = at(dataclasses.replace(cosine, schedule="wsd"), [9, 50, 79, 90, 100])
    np.testing.assert_allclose(wsd, [1.0, 1.0, 1.0, 0.55, 0.1], atol=1e-5)
    constant = at(dataclasses.replace(cosine, schedule="constant"), [0, 9, 100])
    np.testing.assert_allclose(constant, [0.1, 1.0, 1.0], atol=1e-5)
    make_optimizer(cosine, 1)  # a run of one step


@pytest.mark.slow
def test_overfitting_reaches_the_block_size(target):
    """A drafter trained on the target's answers to three prompts is accepted nearly whole on these prompts."""
    prompts = [[5, 9, 2, 40], [11, 3, 3, 8, 20], [30, 31, 17]]
    answers = spec_generate(target, None, prompts, max_new_tokens=25, stop_token_ids=[]).tokens
    examples = [
        Example(np.asarray(prompt + answer, np.int32), np.arange(len(prompt) + 25) >= len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    config = dataclasses.replace(CONFIG, anchors=24, row_anchors=24, batch_size=3, learning_rate=3e-3)
    drafter, _ = new_drafter(target, config, tiny.MASK)
    steps, packing = 250, Packing(examples, 32, 3, 0)
    state = init_state(drafter, config, steps)
    step = jax.jit(partial(train_step, config, steps), donate_argnums=2)
    for i in range(steps):
        state, _ = step(target, drafter, state, Batch(*map(jnp.asarray, packing.batch(i))))
    trained = drafter.replace(params=state.params)
    out = spec_generate(target, trained, prompts, max_new_tokens=25, stop_token_ids=[])
    assert out.tokens == answers
    whole = [lengths[:-1] for lengths in out.acceptance_lengths]  # the last step ends at the budget
    assert np.mean(np.concatenate(whole)) > 5.9  # of 6
