"""What every request goes through first: its name and its line in the log, other origins, and a server that starts."""

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.files import one_line
from dflash_jax.infer.http.errors import ErrorResponse

_log = logging.getLogger("dflash_jax")
NAME = "x-request-id"
ALLOWED_NAME = re.compile(r"[!-~]{1,128}")  # of a client's own, which the log shows
WATCHED = "/live", "/health", "/ready", "/metrics"  # asked so often that only --log-level debug shows it
STARTING_SECONDS = "5"  # after which a client may ask again whether the server is ready


class Entrance:
    """The application that listens: what says how far the start is, until `app` takes its place.

    Attributes:
        compiled, programs: how many programs are compiled, and of how many; None before that is known.
    """

    def __init__(self):
        self.compiled = 0
        self.programs: int | None = None
        routes = [Route("/live", live), Route("/health", self._starting), Route("/ready", self._starting)]
        self.app: ASGIApp = Starlette(routes=[*routes, Route("/{path:path}", self._refused, methods=METHODS)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    def count(self, compiled: int) -> None:
        """So many programs are compiled."""
        self.compiled = compiled

    async def _starting(self, request: Request) -> Response:
        state = {"status": "starting", "compiled": self.compiled, "of": self.programs}
        return JSONResponse(state, status_code=503, headers={"Retry-After": STARTING_SECONDS})

    async def _refused(self, request: Request) -> Response:
        done = "loads its models" if self.programs is None else f"has compiled {self.compiled} of {self.programs}"
        message = f"the server is starting and {done}{'' if self.programs is None else ' programs'}; try again later"
        return ErrorResponse(503, "starting", message, {"Retry-After": STARTING_SECONDS})


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


async def live(request: Request) -> Response:
    """Whether the process answers, ready or not."""
    return JSONResponse({"status": "alive"})


def entered(app: ASGIApp, *, origins: Sequence[str] = (), access_log: bool = True) -> ASGIApp:
    """An application behind what every request goes through.

    Args:
        origins: pages of these may read the answers, in a browser; "*" is all.
        access_log: whether requests that were answered have a line in the log. Refused ones always have.
    """
    if origins:
        # A browser asks for leave without the key, so this comes before the key is looked at.
        app = CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[NAME])
    return Named(app, access_log=access_log)


class Named:
    """Gives every request a name, the client's own if it has one, which its answer carries and the log shows."""

    def __init__(self, app: ASGIApp, *, access_log: bool = True):
        self._app, self._access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(NAME, "")
        name, begin, status = given if ALLOWED_NAME.fullmatch(given) else uuid.uuid4().hex, time.perf_counter(), 0
        state = scope.setdefault("state", {})

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[NAME] = name
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            self._tell(scope, name, status, time.perf_counter() - begin, state.get("reason"))

    def _tell(self, scope: Scope, name: str, status: int, seconds: float, reason: str | None) -> None:
        watched, refused = scope["path"] in WATCHED, status >= 400
        level = logging.WARNING if refused else logging.INFO
        # Those who watch a start ask again and again, and get status 503.
        if (watched and (not refused or status == 503)) or not (refused or self._access_log):
            level = logging.DEBUG
        path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        why = f": {one_line(reason)}" if reason else ""
        host = scope["client"][0] if scope.get("client") else "-"
        line = f"{host} {scope['method']} {path!r:.200} {status or 'no answer'} in {seconds:.3f} s, request {name}{why}"
        _log.log(level, "%s", line)
