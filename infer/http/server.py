"""An HTTP server with OpenAI's completions, chat completions and responses: one engine, any number of clients.

The event loop reads requests, hands them to the worker that owns the engine, and streams what comes back.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dflash_jax.files import Json
from dflash_jax.infer import openai, responses
from dflash_jax.infer.answers import answer
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, Request, RequestError
from dflash_jax.infer.engine.scoring import Scores
from dflash_jax.infer.http import page, reports
from dflash_jax.infer.http.answer_stream import CompletionStream, compact
from dflash_jax.infer.http.asked import Asked, read_body
from dflash_jax.infer.http.echo import after, echo
from dflash_jax.infer.http.entrance import live
from dflash_jax.infer.http.errors import ErrorResponse
from dflash_jax.infer.http.response_stream import ResponseStream, whole_response
from dflash_jax.infer.http.sending import SentAnswer, parts_of
from dflash_jax.infer.http.tokenizing import DETOKENIZE, TOKENIZE, text_of, token_ids
from dflash_jax.infer.http.worker import OverloadedError, Worker
from dflash_jax.infer.plain import refusal
from dflash_jax.infer.text import Text
from dflash_jax.quantised import forms
from dflash_jax.version import __version__

T = TypeVar("T")
RETRY_SECONDS = "5"  # after which a client may try again when the queue was full
READERS = 4  # prompts that are turned into tokens at a time


@dataclass(frozen=True)
class Limits:
    """How much a client may send, and in what time.

    Attributes:
        request_bytes: of a body, at most.
        client_seconds: for the body of a request to arrive; see also `listening.make_server`.
    """

    request_bytes: int = 2**20
    client_seconds: float = 30.0


def make_app(
    worker: Worker,
    text: Text,
    defaults: SamplingParams,
    *,
    model: str,
    aliases: Sequence[str] = (),
    root: str = "",
    api_key: str | Sequence[str] | None,
    limits: Limits | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        defaults: of a request.
        model: name under which the pair is listed. Requests may name any model.
        aliases: further names under which it is listed.
        root: where the target was loaded from; load generators take its tokenizer from there.
        api_key: bearer key that every request must carry but those of the page and of the server's state, or several
            keys, each of which will do; None asks for none.
    """
    limits = limits or Limits()
    service = Service(worker, text, defaults, model, limits)
    about = {
        "chat": text.has_chat_template,
        "speculation": worker.engine.drafter is not None,
        "switchable": worker.engine.drafter is not None and worker.engine.config.plain,
        "block_sizes": worker.engine.drafts.block_sizes,
        "constraints": worker.engine.constraints is not None,
        "dtype": worker.engine.target.dtype.name,
        "weights": forms(worker.engine.target.params),
        "max_length": worker.engine.max_length,
    } | page.about(worker.engine.drafter, "auto" if worker.engine.drafts.auto else worker.engine.block_size)

    keys = [key.encode() for key in ([api_key] if isinstance(api_key, str) else api_key or ())]

    def guarded(handler: Callable) -> Callable:
        async def handle(request: HTTPRequest) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            same = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in keys]  # all, for equal times
            if keys and not (any(same) and scheme.lower() == "bearer"):
                return ErrorResponse(401, "invalid_api_key", "the request needs `Authorization: Bearer <key>`")
            return await handler(request)

        return handle

    async def health(request: HTTPRequest) -> Response:
        if worker.failure:
            return ErrorResponse(500, "engine_failed", worker.blamed(worker.failure))
        return JSONResponse({"status": "ok"})

    async def metrics(request: HTTPRequest) -> Response:
        return Response(generate_latest(worker.figures.registry), media_type=CONTENT_TYPE_LATEST)

    listed = {"object": "model", "created": int(time.time()), "owned_by": "dflash-jax", "root": root or model}
    listed |= {"max_model_len": worker.engine.max_length, "dflash": about}
    names = list(dict.fromkeys((model, *aliases)))

    async def models(request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} | listed for name in names]})

    async def one_model(request: HTTPRequest) -> Response:
        if (name := request.path_params["name"]) not in names:
            return ErrorResponse(
                404, "not_found", f"the model here is {' or '.join(names)}, got {name!r:.80}", None, "model"
            )
        return JSONResponse({"id": name} | listed)

    async def version(request: HTTPRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def server_info(request: HTTPRequest) -> Response:
        """The figures that SGLang's benchmark reads."""
        state = {} if worker.figures.tau is None else {"avg_spec_accept_length": worker.figures.tau}
        return JSONResponse({"model_path": root or model, "internal_states": [state]})

    async def refused(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ErrorResponse(
            error.status_code, "not_found" if error.status_code == 404 else "invalid_request", error.detail
        )

    async def failed(request: HTTPRequest, error: Exception) -> Response:
        return ErrorResponse(500, "internal_error", "the server failed on this request")

    return Starlette(
        routes=[
            *page.routes(),
            Route("/live", live),
            Route("/health", health),
            Route("/ready", health),
            Route("/version", version),
            Route("/metrics", guarded(metrics)),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(one_model)),
            Route("/server_info", guarded(server_info)),
            Route(TOKENIZE, guarded(service.tokenize), methods=["POST"]),
            Route(DETOKENIZE, guarded(service.tokenize), methods=["POST"]),
            Route(openai.CHAT, guarded(service.complete), methods=["POST"]),
            Route(openai.TEXT, guarded(service.complete), methods=["POST"]),
            Route(responses.PATH, guarded(service.complete), methods=["POST"]),
        ],
        exception_handlers={HTTPException: refused, Exception: failed},
    )


class Service:
    """Answers requests for completions. Arguments as in `make_app`.

    Threads of its own turn text into tokens and tokens into text, so that a long prompt holds up neither the event loop
    nor the answers that are being streamed, and a few long ones do not hold up a short one.
    """

    def __init__(self, worker: Worker, text: Text, defaults: SamplingParams, model: str, limits: Limits):
        self._worker, self._text, self._defaults = worker, text, defaults
        self._model, self._limits = model, limits
        self._reading = ThreadPoolExecutor(READERS, "tokenize")
        self._writing = ThreadPoolExecutor(1, "detokenize")
        self._preparing = ThreadPoolExecutor(READERS, "constrain")

    async def complete(self, request: HTTPRequest) -> Response:
        """A completion or a stream of its parts."""
        loop, worker = asyncio.get_running_loop(), self._worker
        asked = await self._received(request, partial(self._admitted, endpoint=request.url.path))
        if isinstance(asked, Response):
            return asked
        with contextlib.ExitStack() as present:
            present.callback(worker.leave, len(asked.samples))
            if asked.streamed:
                return SentAnswer(self._chunks(asked), present.pop_all().close, "text/event-stream")
            try:
                found = await _until_disconnected(request, _answers(worker, asked))
                if found is None:
                    return Response(status_code=499)
                body = await loop.run_in_executor(self._writing, self._whole, asked, *found)
            except Exception as error:
                return ErrorResponse(500, "engine_failed", worker.blamed(error))
            return SentAnswer(parts_of(body), present.pop_all().close, "application/json", len(body))

    async def tokenize(self, request: HTTPRequest) -> Response:
        """The tokens of a prompt or of messages, or the text of tokens, as vLLM's clients ask for them."""
        read = token_ids if request.url.path == TOKENIZE else text_of

        async def work(raw: bytes) -> Json:
            self._worker.enter(1)  # the queue for the tokenizer is bounded
            try:
                return await asyncio.get_running_loop().run_in_executor(self._reading, read, raw, self._text)
            finally:
                self._worker.leave(1)

        found = await self._received(request, work)
        if isinstance(found, Response):
            return found
        return JSONResponse(found | {"max_model_len": self._worker.engine.max_length})

    async def _received(self, request: HTTPRequest, read: Callable[[bytes], Awaitable[T]]) -> T | Response:
        """What is read of a request's body, or why it is refused."""
        try:
            async with asyncio.timeout(self._limits.client_seconds):
                raw = await _body(request, self._limits.request_bytes)
            if failure := self._worker.failure:
                return ErrorResponse(500, "engine_failed", self._worker.blamed(failure))
            return await read(raw)
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.client_seconds:g} seconds"
            return ErrorResponse(408, "request_timeout", message, {"Connection": "close"})
        except OverflowError as error:
            return ErrorResponse(413, "request_too_large", str(error))
        except RequestError as error:
            return ErrorResponse(400, error.code, str(error), param=error.param)
        except OverloadedError as error:
            return ErrorResponse(429, "overloaded", str(error), {"Retry-After": RETRY_SECONDS})

    async def _admitted(self, raw: bytes, endpoint: str) -> Asked:
        """Reads a body, whose samples the worker has counted in. It counts as one while it is read, so that the
        queue for the tokenizer is bounded, too."""
        worker = self._worker
        worker.enter(1)
        try:
            loop, constraints = asyncio.get_running_loop(), worker.engine.constraints
            asked = await loop.run_in_executor(self._reading, self._read, raw, endpoint)
            params = asked.samples[0].params
            if constraints is not None and not constraints.knows(params):  # other requests need not wait for it
                await loop.run_in_executor(self._preparing, constraints.check, params)
        finally:
            worker.leave(1)
        worker.enter(len(asked.samples))
        return asked

    def _read(self, raw: bytes, endpoint: str) -> Asked:
        """Reads a body; raises RequestError, whatever is in it."""
        try:
            asked = read_body(raw, endpoint, self._text, self._defaults, self._model)
            for prompt in asked.prompts:
                self._worker.engine.check_settings(prompt)
        except Exception as error:
            raise refusal(error) from error
        return asked

    def _whole(self, asked: Asked, done: Sequence[Completion], scores: Sequence[Scores]) -> bytes:
        if asked.response:
            return compact(whole_response(self._text, asked, done[0]))
        name, least = asked.samples[0].id, asked.min_tokens
        answers = [answer(completion, self._text, asked.stop, least, asked.form, name) for completion in done]
        if asked.echo:
            echoed = [echo(prompt, self._text, found) for prompt, found in zip_longest(asked.prompts, scores)]
            answers = [after(echoed[i // asked.of_each], one) for i, one in enumerate(answers)]
        body: Json = openai.body(asked.endpoint, asked.model, answers)
        body["usage"] = reports.usage(done, None, done[:: asked.of_each])
        if len(done) == 1:
            body["metrics"] = reports.metrics(done[0])
        if asked.with_meta_info:
            body["meta_info"] = reports.meta_info(done[0])
            for choice, completion in zip(body["choices"], done, strict=True):
                choice["meta_info"] = reports.meta_info(completion)
        # One by one: while Python encodes a value, none of its threads runs, the event loop's neither.
        choices = b",".join(map(compact, body.pop("choices")))
        return b'%s,"choices":[%s]}' % (compact(body)[:-1], choices)

    async def _chunks(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """Server-sent events of answers as they grow; text is sent once nothing can change it any more."""
        loop, worker = asyncio.get_running_loop(), self._worker
        stream = (ResponseStream if asked.response else CompletionStream)(self._text, asked)
        try:
            if begun := stream.begin():
                yield begun
            async with contextlib.aclosing(worker.stream(asked.samples)) as completions:
                async for index, progress in completions:
                    if written := await loop.run_in_executor(self._writing, stream.add, index, progress):
                        yield written
            yield stream.end()
        except Exception as error:  # the status line is long gone
            yield stream.failed(worker.blamed(error))


async def _body(request: HTTPRequest, limit: int) -> bytes:
    """The body, read no further than the limit; raises OverflowError beyond it."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > limit:
            raise OverflowError(f"the request is larger than {limit} bytes")
    return bytes(read)


async def _answers(worker: Worker, asked: Asked) -> tuple[list[Completion], list[Scores]]:
    """The answers, and the scores of each prompt if they are asked for."""
    scored = asked.prompts if asked.echo and asked.samples[0].params.logprobs is not None else []
    scoring = worker.score([request.prompt_token_ids for request in scored])
    if asked.generates:
        done, scores = await asyncio.gather(_finished(worker, asked.samples), scoring)
        return done, scores
    lengths = [len(request.prompt_token_ids) for request in asked.samples]
    return [Completion(prompt_tokens=length, finish_reason="length") for length in lengths], await scoring


async def _finished(worker: Worker, requests: Sequence[Request]) -> list[Completion]:
    async with contextlib.aclosing(worker.stream(requests)) as completions:
        done = {index: progress.completion async for index, progress in completions}
    return [done[index] for index in range(len(requests))]


async def _until_disconnected(request: HTTPRequest, work: Awaitable[T]) -> T | None:
    """The result of the work; None, and the work canceled, if the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
