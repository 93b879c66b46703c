"""HTTP responses that say when the client has taken them, or is gone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

PART = 2**16  # bytes of an answer, that a client must take within the time limit


class WholeAnswer(Response):
    """A body of JSON that is sent in parts, each when the client has taken the one before it.

    Args:
        ended: called when the client has taken all of it, or is gone.
    """

    def __init__(self, body: bytes, ended: Callable[[], None]):
        super().__init__(body, media_type="application/json")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self.body), PART):
                part = self.body[at : at + PART]
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)  # or a client that reads fast would hold up all others
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._ended()


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
        ended: called however they end, also if the client leaves before the first.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], ended: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._events.aclose()
