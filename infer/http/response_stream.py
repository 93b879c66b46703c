"""Responses over HTTP: whole ones, and the events of one that grows."""

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Json
from dflash_jax.infer import responses
from dflash_jax.infer.answers import answer_name
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.http import reports
from dflash_jax.infer.http.answer_stream import event
from dflash_jax.infer.http.asked import Asked
from dflash_jax.infer.http.worker import Progress
from dflash_jax.infer.parts import AnswerParts
from dflash_jax.infer.text import Text

TEXT_ALONE = Form("thinking")  # of an answer without reasoning and calls


def _parts(text: Text, asked: Asked) -> AnswerParts:
    name = answer_name(asked.samples[0].id, Completion())
    return AnswerParts(text, asked.form or TEXT_ALONE, name, asked.stop, asked.min_tokens)


def whole_response(text: Text, asked: Asked, done: Completion) -> Json:
    """The response that an answer is."""
    assert asked.response is not None
    parts, items = _parts(text, asked), responses.Items()
    items.add(parts.add(done.token_ids, last=True))
    return responses.ended(asked.response, items, done, parts.reasoning_tokens)[0]


class ResponseStream:
    """The server-sent events of a response; methods as those of `CompletionStream`."""

    def __init__(self, text: Text, asked: Asked):
        assert asked.response is not None
        self._response, self._parts, self._items = asked.response, _parts(text, asked), responses.Items()
        self._tokens, self._sent = 0, 0

    def _events(self, events: list[Json]) -> bytes:
        """Numbered, as one text."""
        written = b""
        for fields in events:
            written += event(fields | {"sequence_number": self._sent}, fields["type"])
            self._sent += 1
        return written

    def begin(self) -> bytes:
        """What is sent before any token has come."""
        names = "response.created", "response.in_progress"
        return self._events([{"type": name, "response": self._response} for name in names])

    def add(self, index: int, progress: Progress) -> bytes:
        """What is sent of the progress of the answer."""
        done = progress.completion
        new = done.token_ids[self._tokens : progress.tokens]
        self._tokens = progress.tokens
        events = self._items.add(self._parts.add(new, last=progress.finished))
        if not progress.finished:
            return self._events(events)
        self._response, last = responses.ended(self._response, self._items, done, self._parts.reasoning_tokens)
        whole = {"response": self._response | {"metrics": reports.metrics(done)}}
        return self._events([*events, *last, {"type": f"response.{self._response['status']}"} | whole])

    def end(self) -> bytes:
        """What is sent after the answer."""
        return b""

    def failed(self, message: str) -> bytes:
        """What is sent in place of the rest."""
        error = {"code": "server_error", "message": message}
        return self._events(
            [{"type": "response.failed", "response": self._response | {"status": "failed", "error": error}}]
        )
