"""Which compiler options a program of blocks gets on this CPU."""

import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine import compiler_options
from dflash_jax.kernels import verdicts
from tests import tiny

OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Programs of these options "take" so many seconds; returns what was measured."""
    compiler_options.fastest_options.cache_clear()
    monkeypatch.setattr(verdicts, "directory", lambda: tmp_path)
    taken, seconds = [], {"with": 1.0, "without": 1.0}
    monkeypatch.setattr(compiler_options, "block_compiler_options", lambda: OPTIONS)
    monkeypatch.setattr(compiler_options, "MEASURED", 1)

    def measured(program, x, weights):
        name = ("with", "without")[len(taken) % 2]
        taken.append((x.shape, weights[0][0].shape))
        return seconds[name]

    monkeypatch.setattr(compiler_options, "_seconds", measured)
    yield taken, seconds
    compiler_options.fastest_options.cache_clear()


def test_the_faster_way_is_chosen_for_large_models(clock):
    taken, seconds = clock
    seconds["without"] = 0.8
    assert compiler_options.fastest_options(576, 1536, 16) is None
    assert set(taken) == {((1, 16, 576), (3072, 576))}
    seconds["without"] = 0.99  # not worth another rounding
    assert compiler_options.fastest_options(576, 1536, 8) == OPTIONS


def test_what_was_found_is_kept_on_disk(clock):
    """Or the next process, which measures a little differently, might need another program."""
    taken, seconds = clock
    seconds["without"] = 0.8
    assert compiler_options.fastest_options(576, 1536, 16) is None
    taken.clear()
    seconds["without"] = 1.2
    compiler_options.fastest_options.cache_clear()  # as in another process
    assert compiler_options.fastest_options(576, 1536, 16) is None
    assert not taken
    assert compiler_options.fastest_options(576, 1536, 8) == OPTIONS


def test_nothing_is_measured_for_small_models_or_without_the_clock(clock):
    taken, _ = clock
    assert compiler_options.fastest_options(256, 768, 16) == OPTIONS
    assert compiler_options.fastest_options(576, 1536, 16, clock=False) == OPTIONS
    assert not taken


def test_real_products_are_timed():
    compiler_options.fastest_options.cache_clear()
    assert compiler_options.fastest_options(512, 768, 4) in (None, compiler_options.block_compiler_options())


@pytest.mark.slow
def test_answers_do_not_depend_on_them(target, drafter, monkeypatch):
    answers = []
    for options in (OPTIONS, None):
        monkeypatch.setattr("dflash_jax.infer.engine.calls.fastest_options", lambda *sizes, clock, given=options: given)
        answers.append(Engine(target, drafter, max_length=64).generate([tiny.ask([1, 2, 3], 24)])[0].token_ids)
    assert answers[0] == answers[1]
