"""HTTP responses that say when the client has taken them, or is gone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PART = 2**16  # bytes of an answer, that a client must take within the time limit


class SentAnswer(StreamingResponse):
    """An answer that is sent part by part, each when the client has taken the one before it.

    Args:
        parts: of the body.
        ended: called when the client has taken all of it, or is gone, even before the first part.
        media_type: of the body.
        length: bytes of the body, if they are known.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], ended: Callable[[], None], media_type: str, length: int | None = None
    ):
        headers = {} if length is None else {"content-length": str(length)}
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts, self._ended = parts, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._parts.aclose()


async def parts_of(body: bytes) -> AsyncGenerator[bytes, None]:
    """A body in parts; between them others have their turn, however fast the client reads."""
    for at in range(0, len(body), PART):
        yield body[at : at + PART]
        await asyncio.sleep(0)
