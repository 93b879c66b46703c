"""Messages of a conversation, as clients send them and as chat templates read them.

Templates are written for the messages of transformers' `apply_chat_template`. So what OpenAI's clients send beyond that
is brought into its form: text parts become one string, null fields are left out, arguments of tool calls are objects.
Everything else is passed on, and a template may read it or not.
"""

import json
from collections.abc import Mapping, Sequence

from dflash_jax.files import Fields, Json, Value
from dflash_jax.infer.engine.requests import RequestError

MOST_LEVELS = 64  # of objects and lists in a message
# What a part of a message may be besides text, and what is missing to read it.
_MEDIA = {"image": "images", "audio": "sound", "video": "videos", "file": "files"}


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_messages", message)


def template_messages(messages: Value, template: str) -> list[Json]:
    """The messages of a request in the form that a chat template reads.

    Args:
        messages: from JSON: objects with a `role` and, except for answers of the model, a `content`: a string or a list
            of text parts.
        template: source of the chat template.

    Raises:
        RequestError: they are in no such form.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            "invalid_request", f"messages must be a list of role and content objects, got {messages!r:.80}"
        )
    found = [_message(message, place, template) for place, message in enumerate(messages)]
    # Of several messages of the system at the beginning, templates print the first one, or refuse the others.
    while len(found) > 1 and all(message["role"] in ("system", "developer") for message in found[:2]):
        texts = [message["content"] for message in found[:2] if message["content"]]
        found[:2] = [found[0] | {"content": "\n\n".join(texts)}]
    return found


def strings_in(value: Value, level: int = 0) -> list[str]:
    """All strings in a JSON value, keys included.

    Raises:
        RequestError: it is nested more than `MOST_LEVELS` deep.
    """
    if isinstance(value, str):
        return [value]
    if level == MOST_LEVELS:
        raise _invalid(f"a message may be nested {MOST_LEVELS} levels deep, this one is deeper")
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in strings_in(item, level + 1)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in strings_in(item, level + 1)]
    return []


def _message(message: Value, place: int, template: str) -> Json:
    if not isinstance(message, Mapping):
        raise _invalid(f"message {place} must be an object, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str):
        raise _invalid(f"message {place} needs a role, a string; got {role!r:.80}")
    found = {name: value for name, value in message.items() if value is not None}
    if not found.get("tool_calls", True):  # an empty list means none, but templates ask whether the field is there
        del found["tool_calls"]
    if "reasoning" in found and "reasoning_content" not in found:  # some servers' name of it
        found["reasoning_content"] = found.pop("reasoning")
    if (calls := found.get("tool_calls")) is not None:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise _invalid(f"tool_calls of message {place} must be a list of objects, got {calls!r:.80}")
        found["tool_calls"] = [_tool_call(call, place) for call in calls]
    if role == "developer" and "developer" not in template:
        found["role"] = "system"
    found["content"] = _content(found.get("content"), place, optional=role == "assistant")
    return found


def _content(content: Value, place: int, *, optional: bool) -> str:
    """The text of a message; raises RequestError where it is none."""
    if isinstance(content, str):
        return content
    if content is None and optional:  # such as a message of tool calls
        return ""
    if not isinstance(content, list):
        raise _invalid(f"content of message {place} must be a string or a list of text parts, got {content!r:.80}")
    return "".join(_part(part, place) for part in content)


def _part(part: Value, place: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    media = next((what for name, what in _MEDIA.items() if isinstance(kind, str) and name in kind), None)
    if media is not None:
        raise RequestError(
            "unsupported_content", f"message {place} has a part of type {kind!r:.40}; {media} are not supported"
        )
    raise _invalid(f'a part of message {place} must be {{"type": "text", "text": "..."}}, got {part!r:.80}')


def _tool_call(call: Fields, place: int) -> Json:
    """A tool call of an earlier answer. OpenAI's has its arguments as a string of JSON; templates print an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"a tool call of message {place} needs a function with a name, got {call!r:.80}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _invalid(f"arguments of a tool call of message {place} must be JSON: {error!s:.100}") from error
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
