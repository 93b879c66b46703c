"""The thread that owns the engine of a server, and what the event loop says to it."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.scoring import Scores, chunk_of, compile_scores, read_scores
from dflash_jax.infer.http.figures import Figures, StatusLine

_log = logging.getLogger("dflash_jax")
PATIENCE = 30.0  # seconds that programs which are compiled wait for an engine without requests


class OverloadedError(Exception):
    """More requests wait than the server keeps."""


class Progress(NamedTuple):
    """An answer so far.

    Attributes:
        completion: the engine may go on writing to it.
        tokens: how many it had.
        finished: whether these are all.
        alone: whether no other request has been there since this one came.
        draft: of the steps that its last tokens came from, see `Completion`.
    """

    completion: Completion
    tokens: int
    finished: bool
    alone: bool = True
    draft: tuple[Draft, int] | None = None


class Scoring(NamedTuple):
    """A prompt whose tokens are scored.

    Attributes:
        reading: the rest of that work.
        wanted: whether somebody still waits for it.
        tell: takes its result.
    """

    reading: Generator[None, None, Scores]
    wanted: Callable[[], bool]
    tell: Callable[[Scores | Exception], None]


class StoppedError(Exception):
    """The worker is to end."""


class Worker:
    """Runs an engine in a thread of its own; everything else talks to it through here.

    If only the first programs of the engine are warm, another thread compiles the rest. They are then timed while no
    request is in progress: at the first such moment, or after those that are, if there is none in half a minute.

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
        self._scoring: deque[Scoring] = deque()
        self._scorable: set[int] = set()  # chunks for which there is a program
        self._preparing = ThreadPoolExecutor(1, "compile-scores")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._compiling = threading.Thread(target=self._compile, name="compile", daemon=True)
        self._compiled: float | None = None  # since when programs wait to be timed
        self._stopping = threading.Event()
        self.failure: Exception | None = None
        self.figures, self._status = Figures(engine), StatusLine(engine)

    def start(self) -> None:
        self._thread.start()
        if self.engine.left:
            self._compiling.start()

    def stop(self) -> None:
        """Ends the thread after its turn of work."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join()

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise StoppedError

    def _compile(self) -> None:
        """Compiles what is left, in a thread of its own."""

        def done() -> None:
            self._compiled = time.monotonic()

        try:
            self.engine.compile_rest(self._check_stopping)
        except StoppedError:
            return
        except Exception as error:  # what there is answers everything
            _log.warning("the other programs could not be compiled; the server continues without them", exc_info=error)
            return
        self._inbox.put(done)

    def _measure(self) -> None:
        """Makes the engine use what was compiled. No request may be in progress."""
        self._compiled, begin = None, time.monotonic()
        with contextlib.suppress(StoppedError):
            self.engine.warm_up(self._check_stopping)
            _log.info("all programs are in use; to time them took %.1f s", time.monotonic() - begin)

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

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Progress], None]:
        """(which request, its completion so far) whenever tokens of one arrived; leaving the iteration early frees all
        slots.

        Raises:
            RequestError: the engine cannot serve a request.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        tickets: list[int] = []

        def listen(index: int, event: Progress | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        def submit() -> None:
            try:
                if self.failure:
                    raise self.failure
                for index, request in enumerate(requests):
                    tickets.append(self.engine.submit(request))
                    self._listeners[tickets[-1]] = partial(listen, index)
                if len(self._listeners) > 1:
                    self._accompanied.update(self._listeners)
            except Exception as error:
                listen(0, error)

        def cancel() -> None:
            for ticket in tickets:
                self._accompanied.discard(ticket)
                if self._listeners.pop(ticket, None):
                    self.engine.cancel(ticket)
                    self.figures.cancelled()

        self._inbox.put(submit)
        left = len(requests)
        try:
            while left:
                index, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                left -= event.finished
                yield index, event
        finally:
            self._inbox.put(cancel)

    async def score(self, prompts: Sequence[Sequence[int]]) -> list[Scores]:
        """Log-probabilities of the tokens of prompts (see `engine.scoring`), each read beside the requests in progress,
        which go on while its program is compiled, too.

        Raises:
            Exception: the engine has failed, or fails at this.
        """
        loop = asyncio.get_running_loop()

        def one(prompt: Sequence[int]) -> asyncio.Future[Scores]:
            future: asyncio.Future[Scores] = loop.create_future()

            def settle(result: Scores | Exception) -> None:
                if not future.done():
                    future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

            def tell(result: Scores | Exception) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    loop.call_soon_threadsafe(settle, result)

            def begin() -> None:
                if self.failure:
                    tell(self.failure)
                else:
                    self._scoring.append(Scoring(read_scores(self.engine, prompt), lambda: not future.done(), tell))

            self._inbox.put(begin)
            return future

        for chunk in {chunk_of(self.engine, prompt) for prompt in prompts} - self._scorable:
            await loop.run_in_executor(self._preparing, compile_scores, self.engine, chunk)
            self._scorable.add(chunk)
        return await asyncio.gather(*map(one, prompts))

    def _score(self) -> None:
        """Reads some of the prompt that is first in turn."""
        scoring = self._scoring[0]
        try:
            if scoring.wanted():
                next(scoring.reading)
                return
        except StopIteration as done:
            scoring.tell(done.value)
        except Exception as error:  # that of one prompt: the engine has no part in it
            scoring.tell(error)
        self._scoring.popleft()

    def _run(self) -> None:
        try:
            while True:
                idle = not (self.engine.busy or self.engine.waiting or self._scoring)
                waited = self._compiled is not None and time.monotonic() > self._compiled + PATIENCE
                if self._compiled is not None and (idle or (waited and not self.engine.busy)):
                    self._measure()
                    waited = False
                while idle or not self._inbox.empty():
                    if (job := self._inbox.get()) is None:
                        return
                    job()
                    if idle:
                        self._status.resumed()
                    idle = False
                if self._scoring:
                    self._score()
                events = self.engine.step(admit=not waited)
                self.figures.worked()
                for ticket, completion in events:
                    # The tokens that are there now stay as they are while the engine adds others.
                    finished = bool(completion.finish_reason)
                    alone, tokens = ticket not in self._accompanied, len(completion.token_ids)
                    if finished:
                        self.figures.finished(completion)
                    self._listeners[ticket](Progress(completion, tokens, finished, alone, completion.draft))
                    if finished:
                        del self._listeners[ticket]
                        self._accompanied.discard(ticket)
                self._status.worked()
        except Exception as error:  # whoever waits must learn of it, and whoever comes later too
            self.failure = error
            _log.error("the engine failed, and answers nothing any more", exc_info=error)
            while self._scoring:
                self._scoring.popleft().tell(error)
            while self._listeners:
                self._listeners.popitem()[1](error)
            while (job := self._inbox.get()) is not None:
                job()
