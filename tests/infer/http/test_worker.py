"""The thread that owns the engine of a server."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.http.worker import OverloadedError, Worker
from tests import tiny


class Broken:
    """An engine that dies at its first step."""

    slots, busy, waiting, left, steps_by_block_size = 1, 0, 0, 0, {}

    def submit(self, request):
        self.busy = 1
        return 0

    def step(self, *, admit=True):
        time.sleep(0.2)
        raise RuntimeError("the device is gone")

    def cancel(self, *tickets):
        pass


def test_who_waits_while_the_engine_dies_is_answered():
    """A request in a slot, one that arrives while the engine dies, and one that comes later."""
    worker = Worker(Broken())
    worker.start()

    async def ask(after):
        await asyncio.sleep(after)
        with pytest.raises(RuntimeError, match="the device is gone"):
            async for _ in worker.stream([tiny.ask([1])]):
                pass

    async def everybody():
        await asyncio.wait_for(asyncio.gather(*map(ask, (0.0, 0.1, 0.5))), timeout=300)

    asyncio.run(everybody())
    worker.stop()


class Hurried(Broken):
    """An engine of which some programs are left; it tells what happens, and a request takes three steps."""

    left = 3

    def __init__(self):
        self.told, self.compiled, self.steps, self.ended = [], threading.Event(), 0, threading.Event()
        self.stats, self.batch = Stats(), SimpleNamespace(pages=None)

    def compile_rest(self, check_interrupt):
        while not self.compiled.wait(0.01):
            check_interrupt()
        self.told.append("compiled")

    def warm_up(self, check_interrupt):
        assert not self.busy
        self.told.append("timed")

    def submit(self, request):
        self.waiting += 1
        return len(self.told)

    def step(self, *, admit=True):
        if admit and self.waiting and not self.busy:
            self.busy, self.waiting, self.steps = 1, self.waiting - 1, 0
            self.told.append("begun")
        self.steps += 1
        time.sleep(0.02)
        if self.steps == 2:
            self.compiled.set()
        if self.steps == 10 and self.busy:
            self.busy = 0
            self.told.append("ended")
            self.ended.set()
        return []


def ask(worker):
    """Submits a request without waiting for its answer."""
    worker._inbox.put(lambda: worker.engine.submit(None))


@pytest.mark.parametrize(
    ("patience", "order"),
    [
        (30.0, ["begun", "compiled", "ended", "begun", "ended", "timed", "begun", "ended"]),
        (0.0, ["begun", "compiled", "ended", "timed", "begun", "ended", "begun", "ended"]),
    ],
)
def test_programs_that_were_left_are_timed_between_requests(monkeypatch, patience, order):
    """Where one request follows the other, it is at the first pause, or after some time without one."""
    monkeypatch.setattr("dflash_jax.infer.http.worker.PATIENCE", patience)
    worker = Worker(engine := Hurried())
    worker.start()
    ask(worker)
    ask(worker)
    while engine.told.count("ended") < 2 or "timed" not in engine.told:
        assert worker.failure is None
        time.sleep(0.01)
    ask(worker)
    while engine.told.count("ended") < 3:
        assert worker.failure is None
        time.sleep(0.01)
    worker.stop()
    assert engine.told == order


def test_a_worker_that_is_stopped_compiles_no_more():
    worker = Worker(engine := Hurried())
    worker.start()
    worker.stop()
    worker._compiling.join(10)
    assert not worker._compiling.is_alive()
    assert not engine.told


def test_programs_that_cannot_be_compiled_are_done_without(caplog):
    worker = Worker(engine := Hurried())
    engine.compile_rest = lambda check: 1 / 0
    worker.start()
    ask(worker)
    assert engine.ended.wait(10)
    worker.stop()
    assert "continues without them" in caplog.text
    assert engine.told == ["begun", "ended"]


def test_room_is_counted():
    worker = Worker(Broken(), most_waiting=2)
    worker.enter(3)
    with pytest.raises(OverloadedError):
        worker.enter(1)
    worker.leave(2)
    worker.enter(2)
