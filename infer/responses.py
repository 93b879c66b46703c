"""OpenAI's Responses, without any state: requests into chat requests, and answers into lists of items.

A conversation is sent whole with every request. So what names an earlier response is refused, and so are tools that a
server would run itself.
"""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence

from dflash_jax.constraints.tools.reading import Event
from dflash_jax.files import Fields, Json, Value
from dflash_jax.infer.engine.requests import Completion, RequestError, invalid
from dflash_jax.infer.fields import COMMON, INERT, flag

PATH = "/v1/responses"
MOST_ITEMS = 2**14  # of an input
# Fields that say the same as in a chat request.
_SAME = {*COMMON, "stream", "speculation"} - {"tools", "tool_choice", "response_format", "reasoning_effort"}
_READ = "input instructions tools tool_choice text reasoning max_output_tokens model".split()
# Accepted with these values only.
_NEUTRAL: Mapping[str, Sequence[Value]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
}
_ACCEPTED = {"include", "stream_options", "store", *INERT}  # with any value


def chat_body(body: Fields) -> Json:
    """The chat request that a request for a response comes to.

    Raises:
        RequestError: it cannot be served, or not without state.
    """
    for name, value in body.items():
        if value is None or name in _ACCEPTED or name in _SAME or name in _READ:
            continue
        if name not in _NEUTRAL:
            raise RequestError("unsupported_parameter", f"unknown parameter {name!r:.60} of a response", name)
        if value not in _NEUTRAL[name]:
            why = f"{name} is not supported: responses are not kept here; send the whole conversation as input"
            raise RequestError("unsupported_parameter", why, name)
    found = {name: body[name] for name in body if name in _SAME and name not in _ACCEPTED}
    if body.get("max_output_tokens") is not None:
        found["max_tokens"] = body["max_output_tokens"]
    reasoning = _object(body, "reasoning")
    if reasoning.get("effort") is not None:
        found["reasoning_effort"] = reasoning["effort"]
    if (form := _format(_object(body, "text").get("format"))) is not None:
        found["response_format"] = form
    if (tools := body.get("tools")) is not None:
        found["tools"] = [_tool(tool, i) for i, tool in enumerate(tools)] if isinstance(tools, list) else tools
    if body.get("tool_choice") is not None:
        found["tool_choice"] = body["tool_choice"]
    if (n := body.get("n")) not in (None, 1):
        raise invalid(f"n must be 1 for a response, got {n!r:.60}", "n")
    return found | {"messages": [*_instructions(body), *_messages(body.get("input"))], "model": body.get("model")}


def _object(body: Fields, name: str) -> Fields:
    found = body.get(name)
    if not isinstance(found, Mapping | None):
        raise invalid(f"{name} must be an object, got {found!r:.60}", name)
    return found or {}


def _instructions(body: Fields) -> list[Json]:
    given = body.get("instructions")
    if not isinstance(given, str | None):
        raise invalid(f"instructions must be a string, got {given!r:.60}", "instructions")
    return [{"role": "system", "content": given}] if given else []


def _format(given: Value) -> Value:
    """The form of an answer as chat requests have it."""
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _tool(given: Value, place: int) -> Json:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind != "function":
        raise invalid(f"tools[{place}] must be of type function; {kind!r:.60} is not run here", f"tools[{place}]")
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _messages(given: Value) -> list[Json]:
    """An input as the messages of a chat; what an assistant thought, said and called in turn is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > MOST_ITEMS:
        raise invalid(f"input must be a string or a list of 1 to {MOST_ITEMS} items, got {given!r:.80}", "input")
    found, last = list[Json](), None
    for place, item in enumerate(given):
        name = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise invalid(f"{name} must be an object, got {item!r:.80}", name)
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            output = item.get("output")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            last = None
        elif kind == "message" and item.get("role") != "assistant":
            found.append({"role": item.get("role"), "content": item.get("content")})
            last = None
        elif kind in ("message", "reasoning", "function_call"):
            if (
                last is None
                or (kind != "function_call" and last.get("tool_calls"))
                or (kind == "message" and "content" in last)
            ):
                found.append(last := {"role": "assistant"})
            _add(item, kind, last)
        else:
            raise invalid(
                f"{name} must be a message, reasoning, function_call or function_call_output, got {kind!r:.60}", name
            )
    return found


def _add(item: Fields, kind: str, message: Json) -> None:
    """Adds what an assistant did to its message."""
    if kind == "message":
        message["content"] = item.get("content")
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        message.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
    else:
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        if text := "".join(text for text in texts if isinstance(text, str)):
            message["reasoning_content"] = message.get("reasoning_content", "") + text


class Items:
    """The items of a response, and the events that say how they grow.

    Attributes:
        output: the items.
    """

    def __init__(self) -> None:
        self.output, self._open = list[Json](), False

    def add(self, events: Iterable[Event]) -> list[Json]:
        """What further parts of the answer add; returns the events of a stream."""
        found = list[Json]()
        for event in events:
            if event.kind == "call":
                found += [*self.close(), *self._begin(_call(event))]
            elif event.kind == "arguments":
                self.output[-1]["arguments"] += event.text
                found.append(self._event("function_call_arguments.delta", delta=event.text))
            elif event.kind == "done":
                found += self.close()
            else:
                kind = "message" if event.kind == "content" else "reasoning"
                if not self._open or self.output[-1]["type"] != kind:
                    found += [*self.close(), *self._begin(_MADE[kind]())]
                self.output[-1]["content"][0]["text"] += event.text
                name = "output_text" if kind == "message" else "reasoning_text"
                more = {"logprobs": []} if kind == "message" else {}
                found.append(self._event(f"{name}.delta", content_index=0, delta=event.text, **more))
        return found

    def close(self, status: str = "completed") -> list[Json]:
        """Ends the item that is growing."""
        if not self._open:
            return []
        self._open, item = False, self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"])]
        else:
            part = item["content"][0]
            name, more = ("output_text", {"logprobs": []}) if item["type"] == "message" else ("reasoning_text", {})
            done = [self._event(f"{name}.done", content_index=0, text=part["text"], **more)]
            done.append(self._event("content_part.done", content_index=0, part=dict(part)))
        return [*done, self._about("output_item.done")]

    def _begin(self, item: Json) -> list[Json]:
        self._open = True
        parts = item.pop("content", None)
        self.output.append(item | ({"content": []} if parts else {}))
        begun = [self._about("output_item.added")]
        if parts:
            self.output[-1]["content"] = parts
            begun.append(self._event("content_part.added", content_index=0, part=dict(parts[0])))
        return begun

    def _event(self, kind: str, **fields: Value) -> Json:
        return {
            "type": f"response.{kind}",
            "item_id": self.output[-1]["id"],
            "output_index": len(self.output) - 1,
        } | fields

    def _about(self, kind: str) -> Json:
        item = self.output[-1]
        copied = item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
        return {"type": f"response.{kind}", "output_index": len(self.output) - 1, "item": copied}


def _call(event: Event) -> Json:
    found = {"id": _named("fc"), "type": "function_call", "call_id": event.id, "name": event.text, "arguments": ""}
    return found | {"status": "in_progress"}


def _message() -> Json:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": _named("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": [part]}


def _reasoning() -> Json:
    part = {"type": "reasoning_text", "text": ""}
    return {"id": _named("rs"), "type": "reasoning", "summary": [], "status": "in_progress", "content": [part]}


_MADE = {"message": _message, "reasoning": _reasoning}


def _named(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def response(body: Fields, model: str) -> Json:
    """A response that has just begun, with the settings that were asked for."""
    text, reasoning = _object(body, "text"), _object(body, "reasoning")
    return {
        "id": _named("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": flag(body, "parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def ended(response: Json, items: Items, done: Completion, thought: int) -> tuple[Json, list[Json]]:
    """A finished response, and the events that end its last item; `thought` is how many tokens its reasoning has."""
    cut = done.finish_reason == "length"
    events = items.close("incomplete" if cut else "completed")
    usage = {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": len(done.token_ids),
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": done.prompt_tokens + len(done.token_ids),
    }
    status: Json = {"status": "incomplete" if cut else "completed", "output": items.output, "usage": usage}
    return response | status | {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}, events
