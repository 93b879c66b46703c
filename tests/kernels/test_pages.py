"""Attention to caches in pages, by every implementation, against the same oracle as that to whole rows."""

from functools import partial

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels.block_attention import attend, pallas_tpu
from dflash_jax.kernels.block_attention.trial import Trial
from dflash_jax.kernels.shapes import SHAPES, Shape
from tests.kernels import test_codes, test_conformance
from tests.kernels.test_conformance import INTERPRETED, SLOTS, check, small, small_chunks  # noqa: F401

NAMES = "qwen3-8b verify", "gpt-oss verify, sliding", "kimi-k2.5 verify"


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("kimi")) for name in NAMES]
)
def test_rows_whose_pages_lie_anywhere(implementation, name):
    """Pages beyond a row's length hold what was never written."""
    if implementation == "gpu" and SHAPES[name].values is not None:
        pytest.skip("it has no kernel for latents")
    check(implementation, small(SHAPES[name]), [0, 1, 64, 201, SLOTS], page=64)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_row_may_be_one_page(implementation):
    check(implementation, small(SHAPES["qwen3-8b draft"]), [0, 201, SLOTS], page=SLOTS)


@pytest.mark.parametrize(
    ("several", "cores"),
    [(2, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1), (2, 1), (4, 1), (4, 2)])],
)
def test_several_pages_in_a_step(monkeypatch, capsys, several, cores):
    """The kernel for TPUs copies them itself; the interpreter copies when a copy is waited for, and looks for races."""
    monkeypatch.setattr(pallas_tpu, "pages_at_once", lambda *_: several)
    monkeypatch.setattr(pallas_tpu, "cores", lambda: cores)
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    monkeypatch.setitem(INTERPRETED, "tpu", lambda: pltpu.force_tpu_interpret_mode(params))
    for module in (test_conformance, test_codes):
        monkeypatch.setattr(module, "SLOTS", 5 * 128)
    lengths = [300, 0, 128, 640, 1]
    check("tpu", Shape(3, 4, 2, 128), lengths, page=128)
    check("tpu", Shape(2, 4, 2, 64, window=100), lengths, page=128)
    test_codes.check("tpu", Shape(1, 4, 2, 128), lengths, page=128)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("window", [None, 300])
def test_a_row_of_fewer_pages_than_whole_steps(monkeypatch, window):
    """As its trial has it: a row that went round its pages if there is a window, and NaN in what is not written."""
    monkeypatch.setattr(pallas_tpu, "pages_at_once", lambda *_: 2)
    small = {"rows": 2, "T": 4, "F": 4, "N": 4, "K": 2, "H": 128, "Hv": 128, "slots": 5 * 128, "page": 128}
    how = {"visible": "causal", "softcap": None, "scale": 0.1, "sinks": False, "starts": False}
    trial = Trial(**small, **how, window=window, dtype="float32")
    (expected,) = trial.run(partial(attend, implementation="xla"))
    with INTERPRETED["tpu"]():
        (got,) = trial.run(partial(attend, implementation="tpu"))
    np.testing.assert_allclose(got, expected, atol=1e-5)
