"""What is measured when an engine starts leaves nothing behind."""

import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine import timing
from tests import tiny


class StopError(Exception):
    pass


@pytest.mark.parametrize("brief", [False, True])
def test_an_interrupted_measurement_leaves_all_rows_idle(target, drafter, brief):
    """As when a server is stopped while it starts."""
    asked = [tiny.ask(prompt, 12, id=str(i)) for i, prompt in enumerate([[5, 9, 11], [7, 7, 30]])]
    settings = {"slots": 2, "max_length": 128, "prefill_chunk": 32, "block_size": "auto", "plain": True}
    engine = Engine(target, drafter, **settings)
    engine.warm_up()
    expected = [done.token_ids for done in engine.generate(asked)]
    for last in (0, 1, 2):  # programs that are timed before
        calls = []

        def check(calls=calls, last=last):
            calls.append(None)
            if len(calls) > last:
                raise StopError

        with pytest.raises(StopError):
            timing.step_seconds(engine.batch, check, brief=brief)
        assert not np.any(engine.batch.state.remaining)
    assert [done.token_ids for done in engine.generate(asked)] == expected


@pytest.mark.parametrize("slots", [1, 2])
def test_the_first_run_of_a_program_is_no_measure(target, slots):
    """It takes longer than others. Beside a single row nobody waits for a prompt to be read."""
    engine = Engine(target, None, slots=slots, max_length=128, prefill_chunk=32)
    took = engine.batch.warm_up(engine.batch.calls.first)
    costs = dict(timing.prefill_costs(engine.batch, dict.fromkeys(took, 1e9), brief=True))
    assert costs
    assert all((cost.empty == 1e9) == (slots == 1) for cost in costs.values())
    assert dict(timing.prefill_costs(engine.batch, dict.fromkeys(took, 1e9), brief=False)).keys() == costs.keys()
