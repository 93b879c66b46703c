"""The optimizer step: what it must not depend on, and what it must learn."""

import dataclasses
import re
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
from dflash_jax.train.optimizer import make_optimizer, make_schedule, muon_dimensions, optimizing
from dflash_jax.train.step import Batch, init_state, split_params, train_step
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


@pytest.mark.slow
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


DOT = re.compile(r"dot_general.*?: \(tensor<([^>]*)>, tensor<([^>]*)>\)")


def products(target, batch, **changes):
    """The operands of the products of a step with a target in bfloat16, which are two texts each."""
    half = target.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    config = dataclasses.replace(CONFIG, **changes)
    drafter, _ = new_drafter(half, config, tiny.MASK)
    state = init_state(drafter, config, 100)
    text = jax.jit(partial(train_step, config, 100)).lower(half, drafter, state, batch).as_text()
    return DOT.findall(text)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "lilicorr", "treeflash", "eagle3"])
def test_no_product_of_a_bfloat16_step_has_a_float32_operand(target, batch, kind):
    """Forward and backward, attention, head and loss; Adam has none."""
    found = products(target, batch, drafter=kind, remat=True)
    assert len(found) > 100
    assert not [both for both in found if any("f32" in operand for operand in both)]


def test_gradients_by_the_logits_may_stay_float32(target, batch):
    found = products(target, batch, round_logit_gradients=False)
    assert len([both for both in found if any("f32" in operand for operand in both)]) == 1


@pytest.mark.slow
def test_rounded_gradients_by_the_logits_point_the_same_way(target, batch):
    half = target.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    moments = []
    for rounded in (True, False):
        (state, _), _ = one_step(half, batch, round_logit_gradients=rounded)
        found = jax.tree.leaves(optax.tree.get(state.optimizer, "mu"))
        moments.append(np.concatenate([np.ravel(x) for x in found]))
    a, b = moments
    assert (a != b).any()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.9999


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


@pytest.mark.parametrize("kind", ["dflash", *(pytest.param(k, marks=pytest.mark.slow) for k in ("dspark", "dflash2"))])
def test_muon_takes_every_matrix_and_no_table_of_tokens(target, batch, kind):
    (state, metrics), (drafter, before) = one_step(target, batch, optimizer="muon", drafter=kind)
    assert metrics["finite"]
    if kind == "dflash":  # others have matrices that begin as zero, behind which nothing learns at first
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, before.params)
        assert all(jax.tree.leaves(changed))
    trained, _ = split_params(drafter)
    dimensions = muon_dimensions(trained, drafter.by_token)
    tables = {"dflash": (), "dspark": ("markov_w1", "markov_w2")}.get(
        kind, ("predecessor_codebook", "successor_codebook")
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        taken = dimensions
        for key in path:
            taken = taken[key.key]
        name = jax.tree_util.keystr(path)
        table = any(table in name for table in tables)
        assert (taken is not None) == (leaf.ndim >= 2 and "norm" not in name and not table), name
    assert len([path for path, _ in jax.tree_util.tree_leaves_with_path(trained) if path[-1].key in tables]) == len(
        tables
    )


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_moments_in_bfloat16_take_half_the_memory_and_little_else(target, batch, optimizer):
    """The first update is the same; the second differs by the rounding of what is kept."""
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    half = dataclasses.replace(config, moments="bfloat16")
    drafter, _ = new_drafter(target, config, tiny.MASK)
    states, memory = [], []
    for one in (config, half):
        step, state = jax.jit(partial(train_step, one, 100)), init_state(drafter, one, 100)
        memory.append(sum(x.nbytes for x in jax.tree.leaves(state.optimizer) if x.ndim > 1))
        after = [state := step(target, drafter, state, batch)[0] for _ in range(2)]
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        states.append(after)
    assert memory[0] == 2 * memory[1]
    flat = lambda state: np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])
    begin = flat(init_state(drafter, config, 100))
    np.testing.assert_allclose(flat(states[0][0]), flat(states[1][0]), atol=1e-8)
    a, b = (flat(after[1]) - flat(after[0]) for after in states)
    assert 0 < np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)
    assert np.linalg.norm(flat(states[0][0]) - begin) > 0


def test_moments_that_would_stand_still_are_refused():
    with pytest.raises(ValueError, match="moments bfloat16 needs b2 of at most 0.99"):
        TrainConfig(moments="bfloat16", b2=0.999)


def test_muon_multiplies_in_bfloat16_where_the_model_does():
    x = jax.random.normal(jax.random.key(0), (32, 64))

    def update(x):
        return optax.contrib.scale_by_muon().update(x, optax.contrib.scale_by_muon().init(x))[0]

    found = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        with optimizing(jnp.dtype(dtype)):
            found[dtype] = jax.jit(update).lower(x).as_text()
    products = lambda text: [line for line in text.splitlines() if "dot_general" in line]
    assert len(products(found[jnp.float32])) == len(products(found[jnp.bfloat16])) > 2
    assert all("HIGHEST" in line for line in products(found[jnp.float32]))
    assert all("lhs_precision_type = bf16" in line for line in products(found[jnp.bfloat16]))


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
