"""Other weights for an engine: every part of an answer is that of the weights it names, and nothing is compiled."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import pages
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

SETTINGS = {"slots": 2, "max_length": 96, "prefill_chunk": 32, "steps_per_visit": 2}
HEAD = [(5 * i) % 50 + 3 for i in range(33)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Two targets and two drafters of the same shapes."""
    directory = tmp_path_factory.mktemp("update")
    for i in (0, 1):
        tiny.write_target(directory / f"target{i}", tiny.target_config(), seed=i)
        tiny.write_drafter(directory / f"drafter{i}", tiny.drafter_config(), seed=10 + i)
    return directory


@pytest.fixture(scope="module")
def targets(directory):
    return [load_target(directory / f"target{i}") for i in (0, 1)]


@pytest.fixture(scope="module")
def drafters(directory):
    return [load_drafter(directory / f"drafter{i}") for i in (0, 1)]


def requests(count=5):
    """Greedy and sampled, of which some begin alike."""
    prompts = [[*HEAD, i] if i % 2 else [7 * i + 3, 9] for i in range(count)]
    more = {"repetition_penalty": 1.1, "stop_token_ids": ()}
    return [tiny.ask(prompt, 9 + 6 * i, 0.9 * (i % 3), id=str(i), **more) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(targets):
    """The answers of each target."""
    return [tokens(Engine(target, None, **SETTINGS).generate(requests())) for target in targets]


def tokens(done):
    return [one.token_ids for one in done]


@pytest.fixture
def compiled():
    names = []
    listen = lambda event, _, fun_name="", **__: names.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def warm(*pair, **settings):
    engine = Engine(*pair, **(SETTINGS | settings))
    engine.warm_up()
    return engine


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_chunks": 4, "cache_tokens": 192, "prefill_budget": 8},
        pytest.param({"block_size": "auto"}, marks=pytest.mark.slow),
        pytest.param({"tree": 9, "prefix_chunks": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_of_the_new_weights(settings, targets, drafters, plain, compiled, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    engine = warm(targets[0], drafters[0], **settings)
    compiled.clear()
    for i, given in enumerate((None, targets[1], targets[0].params)):
        if given is not None:
            assert engine.update(target=given, drafter=drafters[i % 2]) == i
        done = engine.generate(requests())
        assert tokens(done) == plain[i % 2]
        assert {tuple(one.versions) for one in done} == {((i, 0),)}
    assert compiled == []
    assert engine.stats.prefix_tokens > 0 or "prefix_chunks" not in settings
    assert engine.batch.pages is None or engine.batch.pages.available == engine.batch.pages.tokens


def in_progress(engine, asked, steps):
    tickets, done = [engine.submit(request) for request in asked], {}
    for _ in range(steps):
        done |= dict(engine.step())
    return tickets, done


def finished(engine, tickets, done):
    while engine.busy or engine.waiting:
        done |= dict(engine.step())
    return [done[ticket] for ticket in tickets]


@pytest.mark.lossless
@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 128, "prefix_chunks": 2}], ids=str)
def test_requests_in_progress_go_on_with_the_new_weights(settings, targets, drafters, compiled, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    engine = warm(targets[0], drafters[0], **settings)
    compiled.clear()
    asked = requests()
    tickets, done = in_progress(engine, asked, 4)
    engine.update(target=targets[1], when="now")
    for _ in range(4):
        done |= dict(engine.step())
    engine.update(target=targets[0], drafter=drafters[1], when="now")
    found = finished(engine, tickets, done)
    assert compiled == []
    assert len(found[0].versions) == 3 or len(found[1].versions) == 3
    alone = [Engine(target, None, **(SETTINGS | {"slots": 1})) for target in targets]
    for request, one in zip(asked, found, strict=True):
        starts = [*(first for _, first in one.versions), len(one.token_ids)]
        assert starts[0] == 0
        for (version, first), end in zip(one.versions, starts[1:], strict=True):
            # The same prefix, read as a prompt and an answer so far, and autoregressive decoding of these weights.
            (ticket,) = [alone[version % 2].submit(request)]
            row = alone[version % 2]._admission.waiting[0]
            row.completion.token_ids.extend(one.token_ids[:first])
            row.read = first
            (expected,) = finished(alone[version % 2], [ticket], {})
            assert expected.token_ids[first:end] == one.token_ids[first:end]
        assert len(one.token_ids) == request.params.max_new_tokens
    assert engine.stats.preempted == 0 or "cache_tokens" in settings


@pytest.mark.lossless
def test_requests_in_progress_end_first(targets, drafters, plain):
    engine = warm(targets[0], drafters[0])
    tickets, done = in_progress(engine, requests(), 2)
    assert engine.busy == 2
    begun = {row.ticket for _, row in engine._admission.taken}
    assert engine.update(target=targets[1]) == 1
    assert engine.weights.version == 0
    found = finished(engine, tickets, done)
    assert engine.weights.version == 1
    for ticket, one, *of_each in zip(tickets, found, *plain, strict=True):
        old = ticket in begun
        assert one.versions == [(0 if old else 1, 0)]
        assert one.token_ids == of_each[0 if old else 1]
    assert 0 < len(begun) < len(tickets)


def test_one_update_after_another(targets, drafters, plain):
    """Before the first is in use: what each changes holds, and one that does not wait makes both not wait."""
    engine = warm(targets[0], drafters[0])
    tickets, done = in_progress(engine, requests(), 2)
    engine.update(target=targets[1])
    engine.update(drafter=drafters[1], when="now")
    found = finished(engine, tickets, done)
    assert found[0].versions[-1][0] == found[-1].versions[-1][0] == 2
    assert engine.target.params["norm"]["weight"].tolist() == targets[1].params["norm"]["weight"].tolist()
    assert engine.drafter.params["norm"]["weight"].tolist() == drafters[1].params["norm"]["weight"].tolist()
    assert tokens(engine.generate(requests())) == plain[1]


def changed(params, path, change):
    """Parameters of which one is another."""
    first, *rest = path
    if not rest:
        return {**params, first: change(params[first])}
    return {**params, first: changed(params[first], rest, change)}


def test_what_does_not_fit_is_named_and_changes_nothing(targets, drafters, plain):
    engine = warm(targets[0], drafters[0])
    params = targets[1].params
    wrong = changed(params, ["norm", "weight"], lambda x: x[:-1])
    wrong = changed(wrong, ["layers_0", "mlp", "down_proj", "weight"], lambda x: x.astype(jnp.bfloat16))
    del wrong["embed_tokens"]
    said = r"missing embed_tokens, \[64, 32\] float32; .*down_proj/weight: expected .* float32, got .* bfloat16; "
    with pytest.raises(ValueError, match=said + r"norm/weight: expected \[32\] float32, got \[31\] float32"):
        engine.update(target=wrong)
    with pytest.raises(ValueError, match=r"the new weights of the drafter .* and \d+ more"):
        engine.update(drafter=jax.tree.map(lambda x: x[None], drafters[0].params))
    with pytest.raises(ValueError, match="unexpected more"):
        engine.update(target=params | {"more": jnp.zeros(3)})
    nan = changed(params, ["norm", "weight"], lambda x: x.at[3].set(jnp.nan))
    with pytest.raises(ValueError, match="weights of the target are not finite: norm/weight"):
        engine.update(target=nan, drafter=drafters[1], check=True)
    with pytest.raises(ValueError, match="another configuration: .*rms_norm_eps"):
        engine.update(target=targets[1].replace(config=tiny_config(rms_norm_eps=0.1)))
    with pytest.raises(ValueError, match="no drafter"):
        Engine(targets[0], None, **SETTINGS).update(drafter=drafters[0])
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight \[32\]"):
        engine.update_from_tensors(target={})
    assert engine.weights.version == 0
    assert tokens(engine.generate(requests())) == plain[0]


def tiny_config(**changes):
    from dflash_jax.models import target_config

    return target_config(tiny.target_config(**changes))


def test_the_engine_has_its_own_copy_unless_it_may_have_the_given_one(targets, drafters, plain):
    engine = warm(targets[0], drafters[0])
    given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), targets[1].params)
    engine.update(target=given)
    jax.tree.map(lambda x: x.delete(), given)  # as a training step does that donates them
    assert tokens(engine.generate(requests())) == plain[1]
    both = make_mesh(parse_mesh("data=2", jax.devices()[:2]), jax.devices()[:2])
    everywhere = jax.sharding.NamedSharding(both, jax.sharding.PartitionSpec())
    given = jax.device_put(jax.tree.map(np.asarray, targets[0].params), everywhere)  # of a trainer on two devices
    engine.update(target=given)
    jax.tree.map(lambda x: x.delete(), given)
    assert tokens(engine.generate(requests())) == plain[0]
    given = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), targets[0].params)
    engine.update(target=given, donate=True)
    where = lambda params: params["norm"]["weight"].unsafe_buffer_pointer()
    assert where(engine.target.params) == where(given)
    assert tokens(engine.generate(requests())) == plain[0]


EIGHT = {"target": "int8", "drafter": "int8", "head": "int8"}


@pytest.mark.parametrize("quantize", [{}, EIGHT, pytest.param({"target": "int4"}, marks=pytest.mark.slow)], ids=str)
def test_tensors_by_their_names_and_quantised_weights(quantize, directory, targets, compiled):
    of = lambda i: (
        load_target(directory / f"target{i}", quantize=quantize),
        load_drafter(directory / f"drafter{i}", quantize=quantize),
    )
    expected = tokens(Engine(of(1)[0], None, **SETTINGS).generate(requests()))
    tensors = [load_file(directory / f"{name}1" / "model.safetensors") for name in ("target", "drafter")]
    engine = warm(*of(0))
    engine.update_from_tensors(*tensors)
    same = lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    jax.tree.map(same, (engine.target.params, engine.drafter.params), tuple(model.params for model in of(1)))
    assert tokens(engine.generate(requests())) == expected
    given = jax.device_put(load_target(directory / "target0").params, jax.devices()[1])
    engine.update(target=given)  # plain, to be quantized, and elsewhere
    jax.tree.map(same, engine.target.params, of(0)[0].params)
    compiled.clear()
    engine.update(target=given)
    engine.update_from_tensors(*tensors)
    engine.generate(requests())
    assert compiled == []


def test_weights_of_another_kind_of_array(targets, drafters, plain, compiled):
    """Arrays of numpy, and such whose dtype is weak."""
    engine = warm(targets[0].replace(params=jax.tree.map(np.asarray, targets[0].params)), drafters[0])
    weak = lambda x: jnp.full(x.shape, 1.0) if x.ndim == 1 else np.asarray(x)
    given = jax.tree.map(weak, targets[1].params)
    expected = tokens(Engine(targets[1].replace(params=given), None, **SETTINGS).generate(requests()))
    compiled.clear()
    engine.update(target=given)
    assert tokens(engine.generate(requests())) == expected
    assert [name for name in compiled if "convert" not in name] == []


def test_old_weights_are_given_up(directory):
    engine = warm(load_target(directory / "target0"), load_drafter(directory / "drafter0"), constraints=True)
    alive = lambda: sum(x.nbytes for x in jax.live_arrays())
    gc.collect()
    before = alive()
    for i in (1, 0):
        engine.update(target=load_target(directory / f"target{i}"))
        gc.collect()
        assert alive() == before


def test_requests_that_gave_back_their_memory_end_first(targets, drafters, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    engine = warm(targets[0], drafters[0], slots=3, cache_tokens=112)
    asked = [tiny.ask([i + 3, 9], 80, id=str(i), stop_token_ids=()) for i in range(5)]
    tickets, done = in_progress(engine, asked, 3)
    assert engine.busy == 3
    engine.update(target=targets[1])
    found = finished(engine, tickets, done)
    assert engine.stats.preempted > 0
    assert [one.versions for one in found] == [[(0, 0)]] * 3 + [[(1, 0)]] * 2
    expected = [tokens(Engine(target, None, **SETTINGS).generate(asked)) for target in targets]
    assert tokens(found) == expected[0][:3] + expected[1][3:]


def test_new_weights_are_in_use_as_soon_as_nothing_is_in_progress(targets, drafters):
    engine = warm(targets[0], drafters[0])
    for end in ("ends", "is canceled"):
        tickets, done = in_progress(engine, requests(1), 1)
        version = engine.update(target=targets[1])
        assert engine.weights.version == version - 1
        if end == "ends":
            finished(engine, tickets, done)
        else:
            engine.cancel(*tickets)
        assert engine.weights.version == version
        assert engine.weights.waiting is None
    row = in_progress(engine, [tiny.ask(HEAD + HEAD[:20], 5)], 0)[0]
    engine.update(target=targets[0])
    engine.step()
    engine.update(target=targets[1], when="now")
    (one,) = finished(engine, row, {})
    assert one.versions[0][1] == 0
    assert len({first for _, first in one.versions}) == len(one.versions)  # no part without tokens
    with pytest.raises(ValueError, match="give a target, a drafter or both"):
        engine.update()


def test_tensors_that_are_not_finite(directory, targets):
    tensors = load_file(directory / "target1" / "model.safetensors")
    tensors["model.norm.weight"][3] = np.inf
    with pytest.raises(ValueError, match="'model.norm.weight' holds infinite numbers or NaN"):
        Engine(targets[0], None, **SETTINGS).update_from_tensors(target=tensors)


@pytest.mark.parametrize("axes", ["data=2", pytest.param("data=2,model=2", marks=pytest.mark.slow)])
def test_weights_from_elsewhere_are_put_on_the_mesh(axes, directory, targets, plain, compiled):
    devices = jax.devices()[: int(np.prod([int(part[-1]) for part in axes.split(",")]))]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    engine = warm(load_target(directory / "target0", mesh=mesh), load_drafter(directory / "drafter0", mesh=mesh))
    engine.generate(requests())
    compiled.clear()
    if "model" in axes:
        with pytest.raises(ValueError, match="loaded for 1 parts of its heads .* load it with the same mesh"):
            engine.update(target=targets[1])
        with pytest.raises(ValueError, match="the mesh splits heads or experts"):
            engine.update(target=targets[1].params)
        engine.update_from_tensors(target=load_file(directory / "target1" / "model.safetensors"))
    else:
        engine.update(target=targets[1])
    assert tokens(engine.generate(requests())) == plain[1]
    assert compiled == []
