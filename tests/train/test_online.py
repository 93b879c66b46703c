"""A drafter that learns from rollouts: from the features of a teacher-forced pass, with the trainer's own steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, Mixture, Ngram, Rollouts, SamplingParams, load_drafter, load_target, rollouts
from dflash_jax.infer.engine.rollouts import RolloutStats
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.train.blocks import target_features
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.online import DEFAULTS, OnlineDrafter
from dflash_jax.train.step import Batch, init_state, train_step
from tests import tiny

SETTINGS = {"slots": 3, "max_length": 96, "prefill_chunk": 16, "logprobs": 0, "sampled_logprobs": True}
KINDS = [pytest.param(kind, marks=() if kind == "dflash" else pytest.mark.slow) for kind in tiny.kinds()]
PROMPTS = [[1, 2, 3], [(5 * i) % 50 + 3 for i in range(40)], [7] * 20]
PARAMS = SamplingParams(24, 0.8, eos_token_ids=(tiny.EOS,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("online")
    tiny.write_target(directory / "target", tiny.target_config())
    for kind, raw in tiny.kinds().items():
        tiny.write_drafter(directory / kind, raw)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def made_by(engine, **given):
    return rollouts(engine, PROMPTS, 3, PARAMS, width=96, **given)


def engine_of(directory, target, kind="dflash", **settings):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    return Engine(target, drafter, keep_features=True, **(SETTINGS | settings))


slow = lambda settings: pytest.param(settings, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_chunks": 4},
        slow({}),
        slow({"tree": 9, "verify_budget": 3}),
        slow({"prefill_budget": 8, "prefix_chunks": 4}),
        slow({"slots": 16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_one_pass(kind, settings, directory, target):
    engine = engine_of(directory, target, kind, **settings)
    made = made_by(engine)
    plain = rollouts(Engine(target, None, **SETTINGS), PROMPTS, 3, PARAMS, width=96)
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert plain.features is None
    expected, _ = target_features(target, engine.drafter.taps, jnp.asarray(made.tokens), jnp.zeros_like(made.tokens))
    for found, right, length in zip(made.features, expected, made.lengths, strict=True):
        np.testing.assert_allclose(found[: length - 1], right[: length - 1], atol=1e-4)
        assert not found[length - 1 :].any()
    if settings.get("prefix_chunks"):
        assert engine.stats.prefix_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["model=2", "data=2,model=2"])
def test_features_of_a_mesh_are_those_of_one_device(axes, directory, target):
    devices = jax.devices()[:4] if "data" in axes else jax.devices()[:2]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    split = load_target(directory / "target", mesh=mesh)
    drafter = load_drafter(directory / "dflash", num_target_layers=4, mesh=mesh)
    found = made_by(Engine(split, drafter, keep_features=True, **(SETTINGS | {"slots": 4})))
    alone = made_by(engine_of(directory, target, slots=4))
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_allclose(found.features, alone.features, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_trainers(kind, directory, target):
    """With the features of a pass of its own, and as little of the target's logits, it comes to the same."""
    engine = engine_of(directory, target, kind)
    first, made = engine.drafter, made_by(engine)
    size = first.config.block_size
    config = TrainConfig(block_size=size, **(DEFAULTS | {"batch_size": 9, "remat": False}))
    online = OnlineDrafter(engine, config)
    (figures,) = online.learn(made)
    order = np.random.default_rng((config.seed, 0)).permutation(9)
    rows = [jnp.asarray(x[order]) for x in (made.tokens, np.zeros_like(made.tokens), made.mask)]
    batch = Batch(*rows, features=target_features(target, first.taps, *rows[:2])[0])
    state, expected = train_step(config, 1, target, first, init_state(first, config, 1), batch)
    np.testing.assert_allclose(figures["loss"], expected["loss"], rtol=1e-4)
    assert figures["labels"] > 0
    new = jax.tree.leaves(online.state.params)
    for ours, theirs in zip(new, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), engine.drafter.params, first.params)
    assert any(jax.tree.leaves(changed))


def test_it_learns_and_answers_stay(directory, target):
    drafter = Mixture(load_drafter(directory / "dflash", num_target_layers=4))
    engine = Engine(target, drafter, keep_features=True, **SETTINGS)
    engine.warm_up()
    config = TrainConfig(block_size=5, **(DEFAULTS | {"learning_rate": 1e-2, "batch_size": 4}))
    online, losses = OnlineDrafter(engine, config, every=2), []
    plain = Engine(target, None, **SETTINGS)
    for step in range(8):
        made = made_by(engine)
        np.testing.assert_array_equal(made.tokens, made_by(plain).tokens)
        found = online.learn(made)
        assert len(found) == (5 if step % 2 else 0)  # 18 answers, four at a time
        losses += [figures["loss"] for figures in found]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert isinstance(engine.drafter, Mixture)
    trained = {name: engine.drafter.drafter.params[name] for name in online.state.params}
    jax.tree.map(np.testing.assert_array_equal, trained, online.state.params)


def test_every_answer_is_learnt_from(directory, target):
    """The last step begins again with the first answers, of both rollouts."""
    online = OnlineDrafter(engine_of(directory, target), TrainConfig(block_size=5, **(DEFAULTS | {"batch_size": 4})))
    rows = [np.arange(9) + 9 * i for i in range(2)]
    rows = [x[:, None].astype(np.int32) for x in rows]
    nothing = np.zeros((9, 1), np.float32)
    made = [
        Rollouts(
            x, x > 0, nothing, nothing, x[:, 0], x[:, 0], x[:, 0], nothing[..., None], [], RolloutStats(0, None, 0)
        )
        for x in rows
    ]
    batches = [batch.tokens[:, 0].tolist() for batch in online._batches(made)]
    assert [len(batch) for batch in batches] == [4] * 5
    seen = [row for batch in batches for row in batch]
    assert sorted(seen[:18]) == list(range(18))
    assert seen[18:] == seen[:2]


def test_features_of_requests_that_end_on_the_host_or_are_read_again(directory, target):
    """At a stop string, while a visit is in flight; with new weights; and of requests that do not speculate."""
    engine = engine_of(directory, target, plain=True, steps_per_visit=2, slots=2)
    stop = lambda tokens, new: 9 if len(tokens) >= 9 else None
    asked = [tiny.ask(PROMPTS[i % 3], 40, 0.8, id=str(i), find_stop=stop if i % 2 else None) for i in range(6)]
    asked = [replace(request, max_block_size=1 if i == 2 else None) for i, request in enumerate(asked)]
    done, other = {}, load_target(directory / "target").params
    for index, completion in engine.stream(asked):
        if len(completion.token_ids) > 5 and not engine.weights.version:
            engine.update(target=other, when="now")
        if completion.finish_reason:
            done[index] = completion
    assert engine.weights.version
    for index, completion in done.items():
        tokens = jnp.asarray([[*asked[index].prompt_token_ids, *completion.token_ids]])
        expected, _ = target_features(target, engine.drafter.taps, tokens, jnp.zeros_like(tokens))
        assert completion.features.shape[0] == tokens.shape[1] - 1
        np.testing.assert_allclose(completion.features, expected[0, :-1], atol=1e-4)


def test_an_engine_on_a_drafter_that_keeps_nothing_is_refused(directory, target):
    with pytest.raises(ValueError, match="keep_features needs a drafter that reads features"):
        Engine(target, Ngram(), keep_features=True)
    for settings in ({"cache_tokens": 2048}, {"draft_window": 16}):
        with pytest.raises(ValueError, match="keep_features cannot be combined"):
            engine_of(directory, target, **settings)
    engine = Engine(target, load_drafter(directory / "dflash", num_target_layers=4), **SETTINGS)
    with pytest.raises(ValueError, match="make the engine with keep_features=True"):
        OnlineDrafter(engine)
    online = OnlineDrafter(engine_of(directory, target), every=2)
    with pytest.raises(ValueError, match="these rollouts have no features"):
        online.learn(made_by(engine))
    with pytest.raises(ValueError, match="every must be at least 1"):
        OnlineDrafter(engine_of(directory, target), every=0)
    for given, message in (
        ({"kl": 1.0}, "neither the target's distribution"),
        ({"schedule": "cosine"}, "must be constant"),
        ({"block_size": 4}, "block_size must be the drafter's, 5"),
    ):
        with pytest.raises(ValueError, match=message):
            OnlineDrafter(engine_of(directory, target), TrainConfig(**({"block_size": 5} | DEFAULTS | given)))
    drafter = load_drafter(directory / "dflash", num_target_layers=4, quantize={"drafter": "fp8"})
    with pytest.raises(ValueError, match="needs plain weights"):
        OnlineDrafter(Engine(target, drafter, keep_features=True, **SETTINGS))
    with pytest.raises(ValueError, match="proposes something"):
        engine_of(directory, target, block_size=1)
    assert rollouts(engine_of(directory, target), [], 3, PARAMS).features is None
