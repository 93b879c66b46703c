"""Rows in pages: answers are those of rows that have room of their own, whatever is preempted and read again."""

import random

import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target, make_mesh
from dflash_jax.cache import Pages
from dflash_jax.cache.pages import PAGE
from dflash_jax.infer.engine.pages import PageTable
from dflash_jax.mesh import parse_mesh
from tests import tiny

LENGTH = 3 * PAGE
SETTINGS = {"slots": 4, "max_length": LENGTH, "steps_per_visit": 4, "prefill_chunk": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages")
    tiny.write_target(directory / "target", tiny.target_config())
    for name, raw in tiny.kinds().items():
        tiny.write_drafter(directory / name, raw)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def requests(count=9, **given):
    """Prompts and answers of many lengths, greedy and sampled, some of them penalised."""
    rng, asked = random.Random(0), []
    for i in range(count):
        prompt = [rng.randrange(1, 60) for _ in range(rng.choice([3, 40, 127, 128, 150]))]
        penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3} if i % 3 == 2 else {}
        asked.append(tiny.ask(prompt, rng.choice([20, 130, 200]), 1.3 * (i % 2), id=str(i), **penalties, **given))
    return asked


def outcome(done):
    return [(one.token_ids, one.finish_reason) for one in done]


@pytest.fixture(scope="module")
def plain(target):
    return outcome(Engine(target, None, **SETTINGS).generate(requests()))


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("dflash", {}),
        pytest.param("dflash", {"tree": 9}, marks=pytest.mark.slow),
        pytest.param("dflash", {"prefix_chunks": 6}, marks=pytest.mark.slow),
        pytest.param("dflash", {"block_size": "auto"}, marks=pytest.mark.slow),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in tiny.kinds() if kind != "dflash"),
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(kind, given, directory, target, plain):
    """With memory for less than half of what all rows may need."""
    drafter = load_drafter(directory / kind, num_target_layers=4)
    engine = Engine(target, drafter, cache_tokens=5 * PAGE, **SETTINGS | given)
    assert outcome(engine.generate(requests())) == plain
    assert engine.stats.preempted > 0
    assert engine.batch.pages.free == engine.batch.pages.tokens == 5 * PAGE
    assert engine.batch.pages.table.max() == 0
