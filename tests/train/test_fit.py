"""A run: killed and continued, refused where it is another, stopped where it must, exported and loaded."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dflash_jax import SamplingParams, load_drafter, spec_generate
from dflash_jax.chips import Chip
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.train.config import NotFiniteError, TrainConfig
from dflash_jax.train.data import Example
from dflash_jax.train.drafters import choose_mask_token, new_drafter, save_drafter
from dflash_jax.train.evaluate import evaluate
from dflash_jax.train.features import FeatureCache, write_features
from dflash_jax.train.opening import open_run
from dflash_jax.train.operations import _active, operations
from dflash_jax.train.plot import plot
from dflash_jax.train.run import load_run
from tests import tiny

CONFIG = TrainConfig(
    block_size=4,
    num_layers=1,
    length=32,
    anchors=6,
    batch_size=2,
    epochs=2,
    learning_rate=1e-3,
    remat=False,
    save_every=3,
    log_every=1,
)


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    return [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) > 3) for n in rng.integers(8, 30, 16)]


@pytest.fixture(scope="module")
def start(target):
    return new_drafter(target, CONFIG, tiny.MASK)


@pytest.fixture(scope="module")
def whole(target, start, examples, tmp_path_factory):
    """A run that nothing interrupted, its directory and last metrics."""
    directory = tmp_path_factory.mktemp("whole")
    run = open_run(directory, target, *start, examples, CONFIG)
    return run, directory, run.fit()


def equal(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def lines(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_per_second")} for row in rows]


@pytest.mark.parametrize("how", ["signal", pytest.param("killed", marks=pytest.mark.slow)])
def test_an_interrupted_run_continues_to_the_same_parameters(target, start, examples, whole, how, tmp_path):
    assert whole[0].steps > 6
    stopped = open_run(tmp_path, target, *start, examples, CONFIG)

    def stop(step, metrics):
        if step == 5 and how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif step == 5:
            raise SystemExit  # as good as a kill: nothing is saved on the way out

    with pytest.raises(KeyboardInterrupt if how == "signal" else SystemExit):
        stopped.fit(stop)
    again = open_run(tmp_path, target, *start, examples, CONFIG)
    assert int(again.state.step) == (6 if how == "signal" else 3)  # the next was sent before figures were read
    assert len(lines(tmp_path)) == int(again.state.step)  # what was logged later is dropped
    again.fit()
    assert equal(again.state, whole[0].state)
    assert lines(tmp_path) == lines(whole[1])
    assert equal(load_drafter(tmp_path / "last").params, load_drafter(whole[1] / "last").params)


def test_a_finished_run_has_nothing_left_to_do(target, start, examples, whole):
    before = lines(whole[1])
    again = open_run(whole[1], target, *start, examples, CONFIG)
    again.fit()
    assert equal(again.state, whole[0].state)
    assert lines(whole[1]) == before


def test_another_run_is_refused(target, start, examples, whole, tmp_path):
    other = dataclasses.replace(CONFIG, learning_rate=1e-4)
    began = start[0].replace(params=jax.tree.map(lambda x: x * 1.01, start[0].params))
    with pytest.raises(ValueError, match="initial drafter"):
        open_run(whole[1], target, began, start[1], examples, CONFIG)
    with pytest.raises(ValueError, match=r"another run: learning_rate 0.001, now 0.0001"):
        open_run(whole[1], target, *start, examples, other)
    with pytest.raises(ValueError, match="data"):
        open_run(whole[1], target, *start, examples[1:], CONFIG)
    open_run(whole[1], target, *start, examples, dataclasses.replace(CONFIG, log_every=7, accumulate=2, remat=True))
    masked = [Example(np.asarray([1, 2, tiny.MASK, 4], np.int32), np.ones(4, bool))]
    with pytest.raises(ValueError, match="mask token 63 occurs"):
        open_run(tmp_path / "a", target, *start, masked, CONFIG)
    decoded = dataclasses.replace(CONFIG, anchor_placement="decoded")
    known = [example._replace(begins=example.supervised) for example in examples]
    with pytest.raises(ValueError, match="1 of 16 do not: make them with `regenerate --drafter`"):
        open_run(tmp_path / "c", target, *start, [*known[:-1], examples[-1]], decoded)
    with pytest.raises(ValueError, match="not the drafter's 4"):
        open_run(tmp_path / "b", target, *start, examples, dataclasses.replace(CONFIG, block_size=8))


def test_what_is_refused_writes_nothing(target, start, examples, tmp_path):
    devices = jax.devices()[:2]
    split = target.replace(mesh=make_mesh(parse_mesh("data=2", devices), devices))
    with pytest.raises(ValueError, match="batch_size 2 must be a multiple of accumulate 2 times the 2 data-parallel"):
        open_run(tmp_path / "new", split, *start, examples, dataclasses.replace(CONFIG, accumulate=2))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("run.json", b"[]", "must hold a JSON object"),
        ("run.json", b"{", "must be JSON"),
        ("run.json", b"[" * 100_000, "must be JSON: it is nested too deeply"),
        ("run.json", b"{}", "holds another run"),
        ("run.json", None, "must hold run.json"),
        ("config.json", b'{"a": \xff}', "must be JSON"),
        ("drafter.json", b"null", "must hold a JSON object"),
        ("metrics.jsonl", b'{"step": 1, "loss": 1.0}\n{"step"\n', "is damaged in line 2"),
        ("metrics.jsonl", b'{"step": null}\n', "is damaged in line 1: step must be a whole number"),
        ("metrics.jsonl", b'{"step": 1, "tau": []}\n', "is damaged in line 1: tau must be a number"),
        ("checkpoints", b"no directory", "checkpoints"),
    ],
)
def test_a_damaged_run_is_refused_in_a_line_that_names_the_file(
    target, start, examples, whole, name, content, named, tmp_path
):
    directory = shutil.copytree(whole[1], tmp_path / "run")
    path = directory / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, OSError), match=named) as failed:
        open_run(directory, target, *start, examples, CONFIG)
    assert str(directory) in str(failed.value)
    assert str(failed.value).isprintable()


def test_a_damaged_checkpoint_is_trained_again_to_the_same_parameters(target, start, examples, whole, tmp_path, caplog):
    directory = shutil.copytree(whole[1], tmp_path / "run")
    newest = directory / "checkpoints" / str(whole[0].steps)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    load_run(directory)
    again = open_run(directory, target, *start, examples, CONFIG)
    assert int(again.state.step) < whole[0].steps
    for told in (f"the checkpoint of step {whole[0].steps} cannot be read", f"step {int(again.state.step)} is taken"):
        assert caplog.text.count(told) == 2  # when it was loaded, too
    again.fit()
    assert equal(again.state, whole[0].state)
    assert newest.is_dir()


def test_what_is_not_finite_stops_the_run_and_keeps_the_state(target, start, examples, tmp_path):
    run = open_run(tmp_path, target, *start, examples, CONFIG)
    step = run._step

    def broken(target, drafter, state, rows, going):
        # The drafter's logits go through the target's embedding: a broken one makes the loss NaN.
        bad = target.replace(params=target.params | {"embed_tokens": target.params["embed_tokens"] * np.nan})
        return step(bad if int(state.step) == 4 else target, drafter, state, rows, going)

    run._step = broken
    with pytest.raises(NotFiniteError, match="step 5: loss nan"):
        run.fit()
    again = open_run(tmp_path, target, *start, examples, CONFIG)
    assert int(again.state.step) == 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.state.params))


def test_speed_is_told_in_tokens_labels_and_the_share_of_the_chip(target, start, examples, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_jax.train.operations.chip_of", lambda kind: Chip(1.0, 1.0, 1e12, 1.0))
    run = open_run(tmp_path, target, *start, examples, CONFIG)
    asked = operations(CONFIG, target, run.drafter, run.state.params)
    parameters = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    embedding = target.params["embed_tokens"].size
    blocks = CONFIG.batch_size * CONFIG.blocks
    expected = 2 * (parameters(target.params) - embedding) * CONFIG.batch_size * CONFIG.length
    expected += 6 * parameters(run.state.params) * blocks * 4 + 4 * embedding * blocks * 3
    assert asked == expected
    assert operations(CONFIG, target, run.drafter, run.state.params, cached=True) < asked
    last = run.fit()
    rate = last["steps_per_second"]
    np.testing.assert_allclose(last["tokens_per_second"], rate * CONFIG.batch_size * CONFIG.length)
    np.testing.assert_allclose(last["labels_per_second"], rate * last["labels"])
    np.testing.assert_allclose(last["share_of_peak"], rate * asked / 1e12)


@pytest.mark.slow
def test_a_run_compiles_one_step_whether_new_or_resumed(target, start, examples, tmp_path):
    compiled = []
    listen = lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    for stop in (3, None):
        compiled.clear()
        jax.clear_caches()
        run = open_run(tmp_path, target, *start, examples, CONFIG)

        def end(step, metrics, stop=stop):
            if step == stop:
                raise SystemExit

        with pytest.raises(SystemExit) if stop else contextlib.nullcontext():
            run.fit(end)
        assert len([name for name in compiled if "train_step" in name]) == 1, compiled


def test_a_token_meets_the_experts_that_it_is_sent_to():
    layers = [
        SimpleNamespace(experts=None),
        SimpleNamespace(experts=SimpleNamespace(num_experts_per_tok=2, num_experts=8)),
    ]
    params = {"embed_tokens": np.zeros((64, 8)), "layers_0": {"mlp": {"weight": np.zeros((16, 8))}}}
    params |= {"layers_1": {"experts": {"gate_up_proj": np.zeros((8, 16, 8))}}}
    target = SimpleNamespace(params=params, config=SimpleNamespace(layers=layers))
    assert _active(target) == 16 * 8 + 2 * 16 * 8


def test_a_step_after_one_that_is_not_finite_changes_nothing(target, start, examples, tmp_path):
    run = open_run(tmp_path, target, *start, examples, CONFIG)
    step, state, rows = run._step, run.state, run.batch(0)
    kept = jax.tree.map(np.array, state)
    state, values = step(run.target, run.drafter, state, rows, np.bool_(False))
    assert not values["finite"]
    assert equal(state, kept)
    state, values = step(run.target, run.drafter, state, rows, np.bool_(True))
    assert values["finite"]
    assert int(state.step) == 1


@pytest.mark.slow
def test_feature_cache(target, start, examples, whole, tmp_path):
    drafter, raw = start
    config = dataclasses.replace(CONFIG, epochs=1)
    writing = write_features(tmp_path / "f", target, drafter.taps, examples, 32)
    assert 0 < next(writing) < len(examples)
    writing.close()  # interrupted
    with pytest.raises(ValueError, match="not finished"):
        FeatureCache(tmp_path / "f", target, drafter.taps, examples, False)
    assert list(write_features(tmp_path / "f", target, drafter.taps, examples, 32))[-1] == len(examples)
    cache = FeatureCache(tmp_path / "f", target, drafter.taps, examples, False)
    cached = open_run(tmp_path / "cached", target, drafter, raw, examples, config, features=cache)
    cached.fit()
    online = open_run(tmp_path / "online", target, drafter, raw, examples, config)
    online.fit()
    for a, b in zip(lines(tmp_path / "cached"), lines(tmp_path / "online"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    with pytest.raises(ValueError, match="no final hidden states"):
        FeatureCache(tmp_path / "f", target, drafter.taps, examples, True)
    with pytest.raises(ValueError, match="target_layer_ids"):
        FeatureCache(tmp_path / "f", target, (0,), examples, False)
    other = target.replace(params=jax.tree.map(lambda x: x * 1.5, target.params))
    with pytest.raises(ValueError, match="made for another run: target"):
        FeatureCache(tmp_path / "f", other, drafter.taps, examples, False)
    with pytest.raises(ValueError, match="no feature cache"):
        FeatureCache(tmp_path / "none", target, drafter.taps, examples, False)


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_nothing(target, start, examples, tmp_path):
    def judge(drafter):
        raise RuntimeError("no memory")

    run = open_run(tmp_path, target, *start, examples, dataclasses.replace(CONFIG, evaluate_every=4), evaluate=judge)
    with pytest.raises(RuntimeError, match="no memory"):
        run.fit()
    late = open_run(tmp_path, target, *start, examples, CONFIG, evaluate=lambda drafter: {"tau": 1.5})
    assert int(late.state.step) == 4
    late.fit()
    assert [line["step"] for line in lines(tmp_path) if "tau" in line] == [*range(4, late.steps + 1)]


def test_the_best_drafter_is_the_one_that_decodes_best(target, start, examples, tmp_path):
    taus = iter([2.0, 3.0, 2.5])
    config = dataclasses.replace(CONFIG, evaluate_every=3)
    seen = []

    def judge(drafter):
        seen.append(jax.tree.map(np.array, drafter.params))  # the run goes on with these buffers
        return {"tau": next(taus, 1.0), "proposal_sharpness": [1.0, 1000.0 + len(seen)]}

    run = open_run(tmp_path, target, *start, examples, config, evaluate=judge)
    run.fit()
    assert load_drafter(tmp_path / "best").config.proposal_sharpness == (1.0, 1002.0)
    assert load_run(tmp_path)[1]["proposal_sharpness"] == [1.0, 1002.0]
    assert [line["tau"] for line in lines(tmp_path) if "tau" in line][:3] == [2.0, 3.0, 2.5][: len(seen)]
    assert equal(load_drafter(tmp_path / "best").params, seen[1])


@pytest.mark.slow
def test_evaluation_decodes(target, start):
    requests = [tiny.ask([5, 9, 2], id="a"), tiny.ask([8, 1], id="b")]
    figures = evaluate(target, start[0], requests, params=SamplingParams(9), baseline=True)
    assert figures["tokens"] == 18
    assert figures["equal_outputs"] == 2
    assert figures["tau"] >= 1
    assert figures["speedup"] > 0
    assert "proposal_sharpness" not in figures
    sampled = evaluate(target, start[0], requests, params=SamplingParams(9, 1.0))
    assert len(sampled["proposal_sharpness"]) == start[0].depth(start[0].config.block_size)


@pytest.mark.slow
def test_exports_load_and_decode_alike(target, whole, tmp_path):
    drafter, raw = load_run(whole[1])
    assert equal(drafter.params, whole[0].trained().params)
    save_drafter(tmp_path / "a", drafter, raw)
    loaded = load_drafter(tmp_path / "a")
    assert loaded.config == drafter.config
    a, b = (spec_generate(target, d, [[3, 4, 5]], max_new_tokens=12) for d in (drafter, loaded))
    assert a == b
    save_drafter(tmp_path / "a", drafter, raw, "bfloat16")  # over the old one
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    for x, y in zip(jax.tree.leaves(load_drafter(tmp_path / "a").params), jax.tree.leaves(drafter.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2)
    with pytest.raises(ValueError, match="no checkpoint of step 1"):
        load_run(whole[1], 1)


@pytest.mark.slow
def test_a_published_drafter_can_be_continued(target, drafter, pair_directory, examples, tmp_path):
    raw = json.loads((pair_directory / "drafter" / "config.json").read_text())
    run = open_run(tmp_path, target, drafter, raw, examples, dataclasses.replace(CONFIG, epochs=1, block_size=8))
    assert equal(run.trained().params, drafter.params)
    run.fit()
    assert load_drafter(tmp_path / "last").config == drafter.config


def test_mask_tokens(target, pair_directory, tmp_path):
    with pytest.raises(ValueError, match="set mask_token_id"):
        choose_mask_token(target, None)  # no tokenizer: nobody knows what is free
    assert choose_mask_token(target, 17) == 17
    for bad in (tiny.EOS, tiny.VOCAB, -1):
        with pytest.raises(ValueError, match="neither pad nor end"):
            choose_mask_token(target, bad)
    tiny.write_tokenizer(tmp_path)
    assert choose_mask_token(target.replace(directory=str(tmp_path)), None) == tiny.MASK
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (tmp_path / name).exists():
            text = (tmp_path / name).read_text().replace('"mask_token"', '"unused"')
            (tmp_path / name).write_text(text)
    wider = dataclasses.replace(target.config, vocab_size=tiny.VOCAB + 4)
    without = target.replace(directory=str(tmp_path), config=wider)
    assert choose_mask_token(without, None) == tiny.VOCAB + 3


def test_plot(whole, tmp_path):
    plot(whole[1], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="metrics.jsonl"):
        plot(tmp_path, tmp_path / "other.png")
