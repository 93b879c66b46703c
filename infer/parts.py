"""The parts of an answer, reasoning, text and calls, while its tokens arrive and when it is whole."""

import hashlib
from collections.abc import Sequence

from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.formats import reading
from dflash_jax.constraints.tools.reading import Event
from dflash_jax.files import Json
from dflash_jax.infer.text import FIRST_MARK, GrowingText, Text

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_NO_MARKS = {FIRST_MARK + i: "\ufffd" for i in range(32)}  # in what the model wrote as text


class AnswerParts:
    """Reads an answer token by token. What it returns does not depend on how many tokens come at a time.

    Args:
        text, stops, after: see `GrowingText`.
        form: what the answer may be made of.
        name: of the request and the answer; the ids of calls are made of it.

    Attributes:
        ended_calls: whether the last of its calls is complete, and there is one.
        reasoning_tokens: how many tokens came before its text and its calls.
    """

    def __init__(self, text: Text, form: Form, name: str, stops: Sequence[str] = (), after: int = 0):
        self._text, self._form, self._name, self._stops, self._after = text, form, name, stops, after
        self._reading = reading(form, {mark: letter for mark, (_, letter) in text.marks.items()})
        self._letters = dict(text.marks.values())
        # Marks that stand where they mean nothing are text again, or left out as special tokens are.
        self._back = {
            ord(letter): "" if text.is_special(token) else mark for mark, (token, letter) in text.marks.items()
        }
        self._count, self._ids, self._thinking = 0, list[str](), True
        self.reasoning_tokens = 0
        self.ended_calls = False
        self._begin_run()

    def _begin_run(self) -> None:
        """What comes between two marks is text of its own."""
        self._run = list[int]()
        self._growing = GrowingText(self._text, self._stops, max(0, self._after - self._count))

    def add(self, tokens: Sequence[int], *, last: bool = False) -> list[Event]:
        """What further tokens say; `last` says that no more will come."""
        found, begin = list[Event](), 0
        while (
            self._form.thinking and self._thinking and len(tokens) - begin > 1
        ):  # where it ends does not depend on them
            found += self.add(tokens[begin : begin + 1])
            begin += 1
        tokens, begin = tokens[begin:], 0
        for at, token in enumerate(tokens):
            if token in self._letters:
                text = self._text_of(tokens[begin:at]) + self._rest() + self._letters[token]
                self._count, begin = self._count + 1, at + 1
                self._begin_run()
                found += self._said(text)
        text = self._text_of(tokens[begin:])
        return found + self._said(text + self._rest() if last else text, last=last)

    def _said(self, text: str, *, last: bool = False) -> list[Event]:
        """What a further piece of text says."""
        events = self._reading.add(text, last=last)
        self._thinking &= all(event.kind == "reasoning" for event in events)
        if self._thinking and (events or self.reasoning_tokens):
            self.reasoning_tokens = self._count
        return [noted for event in events if (noted := self._noted(event)) is not None]

    def _text_of(self, tokens: Sequence[int]) -> str:
        self._run += tokens
        self._count += len(tokens)
        return self._growing.add(tokens).translate(_NO_MARKS) if tokens else ""

    def _rest(self) -> str:
        return self._growing.end(self._run).translate(_NO_MARKS) if self._run else ""

    def _noted(self, event: Event) -> Event | None:
        """An event as it is passed on; None if nothing is left of it."""
        if event.kind in ("reasoning", "content", "arguments"):
            text = event.text.translate(self._back)
            return event._replace(text=text) if text and (event.kind != "reasoning" or self._form.reasoning) else None
        if event.kind == "call":
            self.ended_calls = False
            name = event.id or _call_id(f"{self._name}/{len(self._ids) + 1}")
            while name in self._ids:  # the model has written it twice
                begin, _, number = name.rpartition(":")
                name = f"{begin}:{int(number) + 1}"
            self._ids.append(name)
            return event._replace(id=name)
        self.ended_calls |= event.kind == "done"
        return event

    def finish_reason(self, reason: str) -> str:
        """The reason that a client is given: calls which are complete are one, but of a function that was named."""
        return "tool_calls" if reason == "stop" and self.ended_calls and self._form.choice != "named" else reason


def _call_id(name: str) -> str:
    """An id, the same for the same call of the same answer."""
    digest = hashlib.sha256(name.encode()).digest()[:24]
    return "call_" + "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def message(events: Sequence[Event]) -> Json:
    """The message of an assistant, in OpenAI's form."""
    text: dict[str, str] = {"reasoning": "", "content": ""}
    calls = list[Json]()
    for event in events:
        if event.kind in text:
            text[event.kind] += event.text
        elif event.kind == "call":
            calls.append({"id": event.id, "type": "function", "function": {"name": event.text, "arguments": ""}})
        elif event.kind == "arguments":
            calls[-1]["function"]["arguments"] += event.text
    content = text["content"] or (None if calls or text["reasoning"] else "")
    found: Json = {"role": "assistant", "content": content, "refusal": None}
    found |= {"reasoning_content": text["reasoning"]} if text["reasoning"] else {}
    return found | ({"tool_calls": calls} if calls else {})


class Deltas:
    """What a stream says of the parts of one answer."""

    def __init__(self) -> None:
        self._calls = -1

    def of(self, events: Sequence[Event]) -> Json:
        """The delta of the next chunk: text in one piece, and calls in their order."""
        found, calls = Json(), list[Json]()
        for event in events:
            if event.kind in ("reasoning", "content"):
                name = "reasoning_content" if event.kind == "reasoning" else "content"
                found[name] = found.get(name, "") + event.text
            elif event.kind == "call":
                self._calls += 1
                function = {"name": event.text, "arguments": ""}
                calls.append({"index": self._calls, "id": event.id, "type": "function", "function": function})
            elif event.kind == "arguments":
                if calls and "id" not in calls[-1]:
                    calls[-1]["function"]["arguments"] += event.text
                else:
                    calls.append({"index": self._calls, "function": {"arguments": event.text}})
        return found | ({"tool_calls": calls} if calls else {})
