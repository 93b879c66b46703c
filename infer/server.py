"""An HTTP server with OpenAI's completions and chat completions: one engine, any number of clients.

A worker thread owns the engine; the event loop parses requests, hands them over and streams what comes back.
"""

import asyncio
import contextlib
import hmac
import json
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dflash_jax.infer import openai
from dflash_jax.infer.engine import Engine
from dflash_jax.infer.jobs import answer, token_logprobs
from dflash_jax.infer.lines import plain_request, sample_count
from dflash_jax.infer.params import SamplingParams
from dflash_jax.infer.requests import Completion, Request, RequestError
from dflash_jax.infer.text import Text, cut_at_stop, settled


class Worker:
    """Runs an engine in a thread of its own; everything else talks to it through here.

    Args:
        engine: warmed up; nobody else may use it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, Callable[[Completion | Exception], None]] = {}
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

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its turn of work."""
        self._inbox.put(None)
        self._thread.join()

    async def stream(self, request: Request) -> AsyncGenerator[Completion, None]:
        """Completions so far, whenever tokens arrived; leaving the iteration early frees the slot.

        Raises:
            RequestError: the engine cannot serve the request.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        ticket: list[int] = []

        def listen(event: Completion | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                ticket.append(self.engine.submit(request))
                self._listeners[ticket[0]] = listen
            except RequestError as error:
                listen(error)

        def cancel() -> None:
            for number in ticket:
                if self._listeners.pop(number, None):
                    self.engine.cancel(number)
                    self._requests.labels("cancelled").inc()

        if self.failure:
            raise self.failure
        self._inbox.put(submit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason:
                    return
        finally:
            self._inbox.put(cancel)

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
                    # A copy: the engine goes on writing into its own.
                    growing = ("token_ids", "acceptance_lengths", "logprobs", "top_logprobs")
                    lists: dict[str, Any] = {name: [*getattr(completion, name)] for name in growing}
                    self._listeners[ticket](replace(completion, **lists))
                    if completion.finish_reason:
                        del self._listeners[ticket]
                        self._requests.labels(completion.finish_reason).inc()
                        self._tokens.inc(len(completion.token_ids))
                        self._steps.inc(len(completion.acceptance_lengths))
                        self._accepted.inc(sum(completion.acceptance_lengths))
                self._read.set(self.engine.stats.prompt_tokens)
                self._copied.set(self.engine.stats.prefix_tokens)
                self._busy.set(self.engine.busy)
                self._waiting.set(self.engine.waiting)
        except Exception as error:  # whoever waits must learn of it
            self.failure = error
            for listen in self._listeners.values():
                listen(error)


def make_app(
    worker: Worker, text: Text, defaults: SamplingParams, *, model: str, api_key: str | None, max_bytes: int
) -> Starlette:
    """The ASGI application.

    Args:
        defaults: of a request.
        model: name under which the pair is listed. Requests may name any model.
        api_key: bearer key that every request but `/health` must carry; None asks for none.
        max_bytes: larger request bodies are refused.
    """

    def guarded(handler: Callable) -> Callable:
        async def handle(request: HTTPRequest) -> Response:
            given = request.headers.get("authorization", "")
            if api_key and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                return _error(401, "invalid_api_key", "the request needs `Authorization: Bearer <key>`")
            return await handler(request)

        return handle

    async def health(request: HTTPRequest) -> Response:
        if worker.failure:
            return _error(500, "engine_failed", str(worker.failure))
        return JSONResponse({"status": "ok"})

    async def metrics(request: HTTPRequest) -> Response:
        return Response(generate_latest(worker.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(request: HTTPRequest) -> Response:
        listed = {"id": model, "object": "model", "created": 0, "owned_by": "dflash-jax"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def complete(request: HTTPRequest) -> Response:
        endpoint = request.url.path
        try:
            body = json.loads(await _body(request, max_bytes))
            if not isinstance(body, dict):
                raise ValueError(f"expected an object, got {type(body).__name__}")
        except ClientDisconnect:
            return Response(status_code=499)
        except OverflowError as error:
            return _error(413, "request_too_large", str(error))
        except (ValueError, RecursionError) as error:
            return _error(400, "invalid_json", f"the body must be a JSON object: {error!s:.200}")
        try:
            streamed, with_usage = _streaming(body)
            options = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
            # Without a seed of its own a request draws from its name, so names never repeat.
            plain = openai.plain_body(options, endpoint)
            asked, stop, _, _ = plain_request(plain, uuid.uuid4().hex, text, defaults)
            n = sample_count(plain)
            worker.engine.check(asked)
        except RequestError as error:
            return _error(400, error.code, str(error))
        name = str(body.get("model") or model)
        samples = [replace(asked, sample=i) for i in range(n)]
        if streamed:
            chunks = _chunks(worker, samples, stop, text, endpoint, name, with_usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        try:
            work = asyncio.gather(*(_last(worker, sample) for sample in samples))
            done = await _until_disconnected(request, work)
        except Exception as error:
            return _error(500, "engine_failed", str(error))
        if done is None:
            return Response(status_code=499)
        return JSONResponse(openai.body(endpoint, name, [answer(completion, stop, text) for completion in done]))

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", guarded(metrics)),
            Route("/v1/models", guarded(models)),
            Route(openai.CHAT, guarded(complete), methods=["POST"]),
            Route(openai.TEXT, guarded(complete), methods=["POST"]),
        ]
    )


def _error(status: int, code: str, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


async def _body(request: HTTPRequest, limit: int) -> bytes:
    """The body, read no further than the limit; raises OverflowError beyond it."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > limit:
            raise OverflowError(f"the request is larger than {limit} bytes")
    return bytes(read)


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """(whether to stream, whether to end with the usage)"""
    streamed, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(streamed, bool) or not isinstance(options, dict):
        raise RequestError("invalid_parameter", "stream must be true or false, and stream_options an object")
    return streamed, bool(options.get("include_usage"))


async def _last(worker: Worker, request: Request) -> Completion:
    done = Completion()
    async with contextlib.aclosing(worker.stream(request)) as completions:
        async for done in completions:  # noqa: B007
            pass
    return done


async def _until_disconnected(request: HTTPRequest, work: asyncio.Future) -> list[Completion] | None:
    """The result of the work; None, and the work cancelled, if the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = work, asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(worker: Worker, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Completion], None]:
    """(which request, its completion so far) whenever tokens of one arrived; leaving early frees all slots."""
    events: asyncio.Queue[tuple[int, Completion] | Exception | None] = asyncio.Queue()

    async def follow(index: int, request: Request) -> None:
        try:
            async with contextlib.aclosing(worker.stream(request)) as completions:
                async for completion in completions:
                    events.put_nowait((index, completion))
            events.put_nowait(None)
        except Exception as error:
            events.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(*numbered)) for numbered in enumerate(requests)]
    left = len(tasks)
    try:
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _chunks(
    worker: Worker,
    samples: Sequence[Request],
    stop: Sequence[str],
    text: Text,
    endpoint: str,
    model: str,
    with_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of answers as they grow; text is sent once nothing can change it any more."""
    kind = "chat.completion.chunk" if endpoint == openai.CHAT else "text_completion"
    head = openai.envelope(endpoint, kind, model)
    event = lambda **fields: f"data: {json.dumps(head | fields, ensure_ascii=False)}\n\n"
    sent, told, answers = [0] * len(samples), [-1] * len(samples), [Completion()] * len(samples)  # -1: nothing yet
    try:
        async with contextlib.aclosing(_merged(worker, samples)) as completions:
            async for index, done in completions:
                answers[index] = done
                whole = cut_at_stop(text.decode(done.token_ids), stop) or ""
                ready = whole if done.finish_reason else settled(whole, stop)
                if len(ready) <= sent[index] and not done.finish_reason:
                    continue
                scores = None if samples[0].params.logprobs is None else token_logprobs(done, text, max(told[index], 0))
                piece = ready[sent[index] :], done.finish_reason or None, told[index] < 0, scores
                last = {"speculation": answer(done, stop, text)["speculation"]} if done.finish_reason else {}
                yield event(choices=[openai.chunk_choice(endpoint, index, *piece)], **last)
                sent[index], told[index] = max(sent[index], len(ready)), len(done.token_ids)
    except Exception as error:  # the status line is long gone
        yield f"data: {json.dumps({'error': {'message': str(error), 'code': 'engine_failed'}})}\n\n"
        return
    if with_usage:
        yield event(choices=[], usage=openai.usage([answer(done, stop, text) for done in answers]))
    yield "data: [DONE]\n\n"
