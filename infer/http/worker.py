"""The thread that owns the engine of a server, and what the event loop says to it."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request

_log = logging.getLogger("dflash_jax")


class OverloadedError(Exception):
    """More requests wait than the server keeps."""


class Progress(NamedTuple):
    """An answer so far.

    Attributes:
        completion: the engine may go on writing to it.
        tokens: how many it had.
        finished: whether these are all.
        alone: whether no other request has been there since this one came.
    """

    completion: Completion
    tokens: int
    finished: bool
    alone: bool = True


class Worker:
    """Runs an engine in a thread of its own; everything else talks to it through here.

    Args:
        engine: warmed up; nobody else may use it.
        most_waiting: requests without a slot that are kept; further ones are refused.
    """

    def __init__(self, engine: Engine, most_waiting: int = 1024):
        self.engine, self.most_waiting = engine, most_waiting
        self._present = 0  # requests between `enter` and `leave`, which only the event loop calls
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, Callable[[Progress | Exception], None]] = {}
        self._accompanied: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        registry = self.registry = CollectorRegistry()
        self._requests = Counter("dflash_requests", "Finished requests", ["finish_reason"], registry=registry)
        self._tokens = Counter("dflash_generated_tokens", "Generated tokens", registry=registry)
        self._steps = Counter("dflash_steps", "Decoding steps, counted per row", registry=registry)
        self._accepted = Counter("dflash_step_tokens", "Tokens committed by those steps", registry=registry)
        self._read = Gauge("dflash_prompt_tokens", "Prompt tokens read", registry=registry)
        self._copied = Gauge("dflash_prompt_tokens_copied", "Of them, copied from earlier prompts", registry=registry)
        self._busy = Gauge("dflash_slots_busy", "Slots in use", registry=registry)
        self._waiting = Gauge("dflash_requests_waiting", "Requests without a slot", registry=registry)
        Gauge("dflash_slots", "Slots", registry=registry).set(engine.slots)
        # Under these names `vllm bench serve` reads the acceptance of a server.
        named = lambda name, what: Counter(f"vllm:spec_decode_num_{name}", what, registry=registry)
        self._drafts = named("drafts", "Decoding steps, counted per row")
        self._proposed = named("draft_tokens", "Tokens that those steps proposed")
        self._right = named("accepted_tokens", "Proposed tokens that were accepted")
        self._places = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Of each place", ["position"], registry=registry
        )

    @property
    def tau(self) -> float | None:
        """Mean number of tokens that the steps of finished answers committed; None before the first."""
        value = lambda name: self.registry.get_sample_value(f"dflash_{name}_total") or 0.0
        return value("step_tokens") / value("steps") if value("steps") else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its turn of work."""
        self._inbox.put(None)
        self._thread.join()

    def blamed(self, error: Exception) -> str:
        """What a client is told of an error that is not the client's. Its text, which may name paths and sizes that are
        nobody's business, goes to the log."""
        if error is self.failure:  # logged when it happened
            return "the engine failed, and answers nothing any more; the server's log says why"
        _log.error("a request failed", exc_info=error)
        return "the server failed on this request; its log says why"

    def enter(self, requests: int) -> None:
        """Counts requests in, until `leave`. Where none is present, any number may come.

        Raises:
            OverloadedError: too many wait already.
        """
        if self._present and self._present + requests > self.engine.slots + self.most_waiting:
            raise OverloadedError(f"{self._present} requests are in progress or waiting; try again later")
        self._present += requests

    def leave(self, requests: int) -> None:
        """Counts requests out."""
        self._present -= requests

    async def stream(self, request: Request) -> AsyncGenerator[Progress, None]:
        """The completion so far, whenever tokens arrived; leaving the iteration early frees the slot.

        Raises:
            RequestError: the engine cannot serve the request.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        ticket: list[int] = []

        def listen(event: Progress | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                if self.failure:
                    raise self.failure
                ticket.append(self.engine.submit(request))
                self._listeners[ticket[0]] = listen
                if len(self._listeners) > 1:
                    self._accompanied.update(self._listeners)
            except Exception as error:
                listen(error)

        def cancel() -> None:
            for number in ticket:
                self._accompanied.discard(number)
                if self._listeners.pop(number, None):
                    self.engine.cancel(number)
                    self._requests.labels("cancelled").inc()

        self._inbox.put(submit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finished:
                    return
        finally:
            self._inbox.put(cancel)

    def _count(self, done: Completion) -> None:
        lengths = done.acceptance_lengths
        self._requests.labels(done.finish_reason).inc()
        self._tokens.inc(len(done.token_ids))
        self._steps.inc(len(lengths))
        self._accepted.inc(sum(lengths))
        self._drafts.inc(len(lengths))
        self._proposed.inc(done.proposed_tokens)
        self._right.inc(sum(lengths) - len(lengths))
        for place in range(max(lengths, default=1) - 1):
            self._places.labels(str(place)).inc(sum(length > place + 1 for length in lengths))

    def _run(self) -> None:
        try:
            while True:
                idle = not (self.engine.busy or self.engine.waiting)
                while idle or not self._inbox.empty():
                    if (job := self._inbox.get()) is None:
                        return
                    job()
                    idle = False
                for ticket, completion in self.engine.step():
                    # The tokens that are there now stay as they are while the engine adds others.
                    finished = bool(completion.finish_reason)
                    alone = ticket not in self._accompanied
                    self._listeners[ticket](Progress(completion, len(completion.token_ids), finished, alone))
                    if finished:
                        del self._listeners[ticket]
                        self._accompanied.discard(ticket)
                        self._count(completion)
                self._read.set(self.engine.stats.prompt_tokens)
                self._copied.set(self.engine.stats.prefix_tokens)
                self._busy.set(self.engine.busy)
                self._waiting.set(self.engine.waiting)
        except Exception as error:  # whoever waits must learn of it, and whoever comes later too
            self.failure = error
            _log.error("the engine failed, and answers nothing any more", exc_info=error)
            while self._listeners:
                self._listeners.popitem()[1](error)
            while (job := self._inbox.get()) is not None:
                job()
