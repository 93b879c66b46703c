"""Drafters of every kind in an engine: their state through chunks, copied prompts, slots and meshes."""

import json

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target, spec_generate
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

KINDS = tiny.kinds()
EVERY_DAY = "dflash", "eagle3"  # dflash2: tests/oracle/test_dflash2.py
# What states have in common shows with a cache of one pass, and of one pass for each token.
TWO = [kind if kind in ("dflash", "eagle3") else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [7, 7, 30, 31, 2, 19, 50]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    tiny.write_target(directory / "target", tiny.target_config())
    for name, raw in KINDS.items():
        tiny.write_drafter(directory / name, raw)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def drafter_of(directory, kind, mesh=None):
    return load_drafter(directory / kind, mesh=mesh, num_target_layers=4)


def asked(count, temperature=0.0):
    head = [i % 50 + 1 for i in range(16)]
    return [tiny.ask([*head, i], 12, temperature * (i % 2), id=str(i), repetition_penalty=1.2) for i in range(count)]


def outcome(engine, requests):
    return [(done.token_ids, done.acceptance_lengths) for done in engine.generate(requests)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["dflash", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS if kind != "dflash")]
)
def test_copied_prompts_and_chunks_leave_the_same_state(kind, directory, target):
    """What is accepted tells whether the drafter saw the same."""
    drafter = drafter_of(directory, kind)
    make = lambda **settings: Engine(target, drafter, slots=2, max_length=64, proposals="coupled", **settings)
    whole, plain = make(prefill_chunk=32), Engine(target, None, slots=2, max_length=64)
    copied = make(prefill_chunk=8, prefix_chunks=4)
    expected = outcome(whole, asked(5, 0.8))
    assert outcome(copied, asked(5, 0.8)) == expected
    assert copied.stats.prefix_tokens > 0
    assert [tokens for tokens, _ in expected] == [tokens for tokens, _ in outcome(plain, asked(5, 0.8))]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [pytest.param("model=2", marks=pytest.mark.exhaustive), "data=2,model=2"])
@pytest.mark.parametrize("kind", TWO)
def test_a_mesh_gives_the_same_answers_and_acceptance(kind, axes, directory, target):
    devices = jax.devices()[: int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    settings = {"max_new_tokens": 16, "stop_token_ids": [], "temperature": 0.8, "seed": 3, "proposals": "coupled"}
    alone = spec_generate(target, drafter_of(directory, kind), PROMPTS, **settings)
    pair = load_target(directory / "target", mesh=mesh), drafter_of(directory, kind, mesh)
    split = spec_generate(*pair, PROMPTS, **settings)
    assert split.tokens == alone.tokens
    assert split.acceptance_lengths == alone.acceptance_lengths


@pytest.mark.lossless
@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("kind", [k if k in EVERY_DAY else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_the_output_never_depends_on_the_drafter(kind, temperature, directory, target):
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    plain = spec_generate(target, None, PROMPTS, **settings).tokens
    for size in (2, None):
        drafted = spec_generate(target, drafter_of(directory, kind), PROMPTS, block_size=size, **settings)
        assert drafted.tokens == plain
        accepted = [length for row in drafted.acceptance_lengths for length in row]
        assert temperature == 0 or max(accepted) > 1  # the noise that both share decides most of these tokens


def test_taps_that_follow_from_the_target(directory):
    """The official EAGLE-3 drafters do not say which layers they tap."""
    raw = KINDS["eagle3.1"] | {"architectures": ["LlamaForCausalLMEagle3"], "num_target_layers": 8}
    del raw["target_layer_ids"]
    tiny.write_drafter(directory / "official", raw)
    del raw["num_target_layers"]
    (directory / "official" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="target_layer_ids or num_target_layers"):
        load_drafter(directory / "official")
    assert load_drafter(directory / "official", num_target_layers=8).taps == (1, 3, 4)
