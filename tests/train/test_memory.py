"""Whether layers are computed again follows from the memory that the compiled step needs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.train import memory
from dflash_jax.train.config import make_config


def lower(again):
    """A program, in the place of a step; it keeps more if nothing is computed again."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return jax.jit(lambda x: x @ x if again else jnp.stack([x @ x, x.T @ x])).lower(x)


PEAK = {again: memory.peak_bytes(lower(again).compile()) for again in (True, False)}


@pytest.mark.parametrize(
    ("remat", "limit", "again"),
    [
        ("auto", None, True),  # not known
        ("auto", 1.1 * PEAK[False], False),
        ("auto", 1.02 * PEAK[False], True),  # something is spared
        (True, 1.1 * PEAK[False], True),
        (False, 100, False),  # as asked
    ],
)
def test_layers_are_computed_again_where_memory_asks_for_it(remat, limit, again):
    step, found = memory.compiled_step(lower, remat, limit and int(limit))
    assert found is again
    assert memory.peak_bytes(step) == PEAK[again]
    assert PEAK[True] < PEAK[False]


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Ran out of memory on HBM", "INTERNAL: a mistake"])
def test_a_compiler_that_runs_out_of_memory_says_so(error, monkeypatch):
    compile, calls = jax.stages.Lowered.compile, []

    def fails_at_first(self):
        calls.append(1)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError(error)
        return compile(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fails_at_first)
    if "RESOURCE" in error:
        assert memory.compiled_step(lower, "auto", 10 * PEAK[False])[1]
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            memory.compiled_step(lower, "auto", 10 * PEAK[False])


def test_the_peak_has_arguments_and_what_comes_between():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = jax.jit(lambda x: (x @ x) @ x.T).lower(x).compile()
    assert 3 * 4 * 2**20 <= memory.peak_bytes(compiled) < 5 * 4 * 2**20


def test_settings_say_auto_or_not():
    assert make_config({}).remat == "auto"
    assert [make_config({"remat": given}).remat for given in ("auto", True, False)] == ["auto", True, False]
    assert dataclasses.asdict(make_config({}))["remat"] == "auto"
    with pytest.raises(ValueError, match="remat must be bool or auto, got 'sometimes'"):
        make_config({"remat": "sometimes"})
