"""The thread that owns the engine of a server."""

import asyncio
import time

import pytest

pytest.importorskip("prometheus_client")

from dflash_jax.infer.http.worker import OverloadedError, Worker
from tests import tiny


class Broken:
    """An engine that dies at its first step."""

    slots, busy, waiting = 1, 0, 0

    def submit(self, request):
        self.busy = 1
        return 0

    def step(self):
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


def test_room_is_counted():
    worker = Worker(Broken(), most_waiting=2)
    worker.enter(3)
    with pytest.raises(OverloadedError):
        worker.enter(1)
    worker.leave(2)
    worker.enter(2)
