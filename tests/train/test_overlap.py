"""What a run does while the device works."""

import threading
import time
from types import SimpleNamespace

import pytest

from dflash_jax.train.config import NotFiniteError, TrainConfig
from dflash_jax.train.run import Run

CONFIG = TrainConfig(batch_size=2, save_every=0, log_every=100)


class Short(Run):
    """A run of three steps without a model, that tells what happens; the figures of step `good` are not finite."""

    def __init__(self, good):
        self.steps, self.target, self.drafter, self.mesh, self.judge, self.features = 3, None, None, None, None, None
        self.state, self.directory, self.log = (
            SimpleNamespace(step=0, params=None),
            "the run",
            SimpleNamespace(add=print),
        )
        self.config = CONFIG
        self.good, self.told, self.packed, self.going = good, [], [threading.Event() for _ in range(4)], []

    def batch(self, step):
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.1)
        self.packed[step].set()
        return step

    def _step(self, target, drafter, state, rows, going):
        self.told.append(f"step {rows}")
        self.going.append(going)
        figure = Figure(self, rows, rows < self.good)
        names = "finite", "loss", "gradient_norm", "labels"
        return SimpleNamespace(step=rows + 1, params=None), dict.fromkeys(names, figure)


class Figure:
    """What the device computes: known once it is asked for."""

    def __init__(self, run, step, value):
        self.run, self.step, self.value = run, step, value

    def __bool__(self):
        if self.step + 2 < self.run.steps:  # the rows after the next step's are packed while this waits
            assert self.run.packed[self.step + 2].wait(60)
        self.run.told.append(f"figures {self.step}")
        return self.value

    def __float__(self):
        return 0.0


def test_the_device_has_its_next_step_before_figures_are_read(monkeypatch):
    """Whoever reads a figure of a step waits for it. Rows are packed in a thread, and none beyond the end."""
    monkeypatch.setattr("dflash_jax.train.run.operations", lambda *_, **__: 1.0)
    run = Short(good=3)
    run._loop(lambda step, metrics: None, [])
    assert run.told == "step 0, step 1, figures 0, step 2, figures 1, figures 2".split(", ")
    assert [event.is_set() for event in run.packed] == [True, True, True, False]
    run = Short(good=1)
    with pytest.raises(NotFiniteError, match="step 2: loss 0.0"):
        run._loop(lambda step, metrics: None, [])
    assert run.told == "step 0, step 1, figures 0, step 2, figures 1".split(", ")
    assert [getattr(going, "step", None) for going in run.going] == [None, 0, 1]  # so step 2 changes nothing
