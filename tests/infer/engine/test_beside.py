"""Prompts that are read beside rows that decode: answers are those of one row alone, and no row waits longer than for
the budget."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import pages
from dflash_jax.constraints.constraint import regex
from dflash_jax.infer.engine import prefixes, timing
from dflash_jax.infer.engine.calls import Decode
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.prompts import BesideShape, PrefillCost, PrefillShape
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.fakes import vocabulary

KINDS = [
    pytest.param(kind, marks=() if kind == "dflash" else pytest.mark.slow)
    for kind in ("dflash", "dflash2", "dspark", "eagle3", "lilicorr", "treeflash")
]
SETTINGS = {"max_length": 96, "constraints": True, "logprobs": 2, "steps_per_visit": 4, "prefill_chunk": 32}
HEAD = [(5 * i) % 60 + 1 for i in range(40)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vocabulary.write_models(tmp_path_factory.mktemp("beside"))


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def requests():
    """Prompts short and long, of which some begin alike; answers with penalties, constraints and an early end."""
    asked = []
    for i in range(14):
        more = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 6} if i % 3 == 2 else {}
        if i % 4 == 1:
            more["constraint"] = regex("([a-f]{3}-){3,6}x")
        prompt = [(7 * i + 3 * j) % 60 + 1 for j in range((1, 50, 9, 33)[i % 4])]
        prompt = [*HEAD, i + 1, 5] if i % 5 == 4 else prompt
        given = {"eos_token_ids": (vocabulary.END,), "logprobs": 2 if i % 2 else None}
        asked.append(tiny.ask(prompt, (25, 1, 9)[i % 3], (0.0, 0.7, 1.3)[i % 3], id=str(i), **given, **more))
    return asked


def answers(engine, asked=None):
    done = engine.generate(asked or requests())
    return [(one.token_ids, one.finish_reason) for one in done], [one.logprobs for one in done]


@pytest.fixture(scope="module")
def plain(target):
    return answers(Engine(target, None, slots=1, **SETTINGS))


def is_plain(got, plain, error=1e-4):
    assert got[0] == plain[0]
    for one, other in zip(got[1], plain[1], strict=True):
        assert one == pytest.approx(other, abs=error)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_budget": 8, "cache_tokens": 320, "prefix_chunks": 8},
        {"prefill_budget": 7, "tree": 9, "prefix_chunks": 2},
        pytest.param({"prefill_budget": 32, "verify_budget": 2, "slots": 16}, marks=pytest.mark.slow),
        pytest.param({"prefill_budget": 1, "proposals": "independent"}, marks=pytest.mark.slow),
        pytest.param({"prefill_budget": 12, "block_size": "auto", "tree": 5}, marks=pytest.mark.slow),
        pytest.param({"prefill_budget": 200, "prefix_chunks": 8, "prefill_chunk": 16}, marks=pytest.mark.slow),
        pytest.param({"prefill_budget": 12, "cache_dtype": "int8", "draft_window": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_of_one_row_alone(settings, directory, target, plain):
    if "cache_dtype" in settings:
        plain = answers(Engine(target, None, slots=1, cache_dtype="int8", **SETTINGS))
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, drafter, **({"slots": 4} | SETTINGS | settings))
    if settings.get("block_size") == "auto":
        engine.warm_up()
    is_plain(answers(engine), plain, error=1e-2 if "cache_dtype" in settings else 1e-4)  # codes may be rounded apart
    assert engine.stats.beside_tokens > 60
    if "prefix_chunks" in settings:
        assert engine.stats.prefix_tokens > 0


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4", "kimi_k25"])
def test_long_chunks_of_other_kinds_of_layers(family, tmp_path, monkeypatch):
    """Longer ones than a block of linear attention, and than a window; states are kept where chunks end."""
    monkeypatch.setattr(prefixes, "STATE_EVERY", 16)
    raw = tiny.target_config(model_type=family) | tiny.FAMILIES[family]
    raw.pop("quantization_config", None)
    target = load_target(tiny.write_target(tmp_path / "target", raw))
    drafter = load_drafter(tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config()))
    heads = [[(5 * j + 7 * i) % 50 + 1 for j in range(80)] for i in range(5)]  # of which two come again
    asked = [
        tiny.ask([*heads[i % 5], *range(1, 4 + 30 * (i % 3))], 6 + 9 * (i % 2), 0.8 * (i % 2), id=str(i))
        for i in range(7)
    ]
    expected = answers(Engine(target, None, slots=1, max_length=176, prefill_chunk=80), asked)
    engine = Engine(target, drafter, slots=3, max_length=176, prefill_chunk=80, prefix_chunks=9, prefill_budget=80)
    assert answers(engine, asked)[0] == expected[0]
    assert engine.stats.beside_tokens > 150
    assert engine.stats.prefix_tokens > 0


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_and_none(kind, directory, target, plain):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    is_plain(answers(Engine(target, drafter, slots=3, prefill_budget=6, plain=True, **SETTINGS)), plain)
    asked = [replace(request, max_block_size=(1, None, 4)[i % 3]) for i, request in enumerate(requests())]
    engine = Engine(target, drafter, slots=3, prefill_budget=6, plain=True, **SETTINGS)
    is_plain(answers(engine, asked), plain)
    if kind == "dflash":
        is_plain(answers(Engine(target, None, slots=3, prefill_budget=6, **SETTINGS)), plain)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data=2", "data=2,model=2"])
def test_each_part_of_a_mesh_reads_its_share(axes, directory, plain):
    devices = jax.devices()[: int(np.prod([int(part[-1]) for part in axes.split(",")]))]
    on = make_mesh(parse_mesh(axes, devices), devices)
    pair = load_target(directory / "target", mesh=on), load_drafter(directory / "dflash", num_target_layers=4, mesh=on)
    engine = Engine(*pair, slots=4, prefill_budget=16, **SETTINGS)
    is_plain(answers(engine), plain)
    assert engine.stats.beside_tokens > 0


def test_between_two_steps_of_a_row_no_more_is_read_than_the_budget(directory, target, monkeypatch):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, drafter, slots=4, prefill_budget=8, **SETTINGS)
    read, decode, per_step = Slots.read, Slots.decode, []

    def alone(self, prompts):
        assert not engine._admission.decoding
        return read(self, prompts)

    def beside(self, draft, steps, leave_below, slots, given=None):
        trace = decode(self, draft, steps, leave_below, slots, given)
        plans, counts = given.plans if given else [], np.asarray(trace.count)
        taken = int(np.sum(counts.any(axis=1)))
        assert given is None or steps <= len(plans)  # or a step would read what is left over
        for step, plan in enumerate(plans[:taken]):
            committed = np.asarray(self.state.lengths)[plan.batch.rows]
            assert (committed >= plan.batch.counts).all()
            per_step.append(int(sum(plan.batch.counts)))
            ended = [plan.batch.rows[i] for i in np.flatnonzero(plan.batch.last)]
            assert not counts[: step + 1, ended].any()  # decodes from the next step on
            if step + 1 < taken:
                left = np.asarray(trace.first.count)[step, np.flatnonzero(plan.batch.last)]
                assert left.all()
        return trace

    monkeypatch.setattr(Slots, "read", alone)
    monkeypatch.setattr(Slots, "decode", beside)
    answers(engine)
    assert max(per_step) == 8
    assert min(per_step) > 0
    assert sum(per_step) == engine.stats.beside_tokens > 200
    assert engine.stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests())


@pytest.mark.slow
def test_cancelled_and_stopped_requests(directory, target, plain):
    """While their prompt is read, or with their first token."""
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, drafter, slots=4, prefill_budget=4, cache_tokens=256, **SETTINGS)
    asked = requests()
    asked[6] = replace(asked[6], find_stop=lambda ids, new: 1)
    tickets, done = [engine.submit(request) for request in asked], {}
    while not (engine._admission.decoding and engine._admission.filling):
        done |= dict(engine.step())
    gone = [row.ticket for row in engine._admission.filling.values()]
    engine.cancel(*gone)
    while engine.busy or engine.waiting:
        done |= dict(engine.step())
    for i, ticket in enumerate(tickets):
        if ticket in gone:
            continue
        expected = plain[0][i][0][:1] if i == 6 else plain[0][i][0]
        assert done[ticket].token_ids == expected
    assert engine.batch.pages is not None
    assert engine.batch.pages.free == engine.batch.pages.tokens


def test_the_shape_of_what_a_step_reads():
    of = BesideShape.of
    assert of(256, 32, 1, 256) == (4, 256, 256)
    assert of(256, 2, 1, 256) == (2, 256, 256)
    assert of(255, 3, 1, 256) == (3, 255, 255)
    assert of(255, 8, 1, 256) == (4, 252, 252)
    assert of(1024, 32, 1, 256) == (4, 256, 1024)
    assert of(9999, 32, 1, 32) == (4, 32, 128)
    assert of(32, 8, 4, 256) == (2, 8, 8)
    assert of(5, 8, 4, 256) == (1, 1, 1)


def test_where_steps_read_prompts_by_themselves():
    auto = EngineConfig(slots=8, prefill_budget="auto", prefill_chunk=64)
    assert [auto.beside(backend) for backend in ("cpu", "gpu", "tpu")] == [None, 64, 64]
    assert replace(auto, slots=1).beside("gpu") is None
    assert replace(auto, deterministic=True).beside("gpu") is None
    assert replace(auto, prefill_budget=None).beside("gpu") is None
    assert replace(auto, prefill_budget=5).beside("cpu") == 5
    for wrong, message in ((0, "prefill_budget must be at least 1"), (8, "cannot be combined")):
        with pytest.raises(ValueError, match=message):
            EngineConfig(prefill_budget=wrong, deterministic=wrong > 0)


@pytest.mark.slow
def test_it_is_left_where_it_does_not_pay(directory, target, monkeypatch):
    monkeypatch.setattr(EngineConfig, "beside", lambda self, backend: 32)
    assert not Engine(target, None, slots=4, prefill_budget="auto", **SETTINGS).batch.reads_beside  # not measured
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, drafter, slots=4, prefill_budget="auto", **SETTINGS)
    costs = {PrefillShape(1, 32): PrefillCost(0.005), PrefillShape(4, 32): PrefillCost(0.016)}  # for 32 tokens 4 ms
    for beside, pays in ((0.0139, True), (0.0141, False)):
        times = {name: beside if name.reads else 0.01 for name in engine.batch.used if isinstance(name, Decode)}
        monkeypatch.setattr(timing, "timed_steps", lambda slots, check, *, brief, times=times: times)
        monkeypatch.setattr(timing, "prefill_cost", lambda slots, shape, *, brief: costs[shape])
        engine.warm_up()
        assert engine.batch.reads_beside is pays
    answers(engine)
    assert engine.stats.beside_tokens == 0
