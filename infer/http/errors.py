"""Errors as OpenAI's clients read them, whose reasons the log tells, too."""

from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send


class ErrorResponse(JSONResponse):
    """What is said in place of an answer.

    Args:
        code: stable, for programs; the message is for people.
        param: the field of the request that it is about, if that is known.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, param: str | None = None
    ):
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        super().__init__({"error": error}, status_code=status, headers=headers)
        self._reason = f"{code}: {message}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["reason"] = self._reason
        await super().__call__(scope, receive, send)
