"""Functions that a request offers to the model: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.constraints.tools.form import Choice, Tool
from dflash_jax.files import Fields, Json, Value
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.infer.fields import flag
from dflash_jax.infer.text import valid_text

NAMES = "tools tool_choice parallel_tool_calls".split()
MOST_TOOLS = 256
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Offer(NamedTuple):
    """What a request offers.

    Attributes:
        given: all tools, for the chat template.
        tools: those that may be called.
        choice, parallel: see `Form`.
    """

    given: tuple[Json, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    parallel: bool = True


def offer_of(row: Fields) -> Offer:
    """What a request offers; without tools nothing.

    Raises:
        RequestError: its tools are none, or the choice names others.
    """
    given, parallel = row.get("tools"), flag(row, "parallel_tool_calls") is not False
    if given is None or given == []:
        if row.get("tool_choice") not in (None, "none", "auto"):
            raise invalid(f"tool_choice {row['tool_choice']!r:.80} needs tools", "tool_choice")
        return Offer()
    if not isinstance(given, list):
        raise invalid(f"tools must be a list, got {given!r:.80}", "tools")
    if len(given) > MOST_TOOLS:
        raise invalid(f"tools may be at most {MOST_TOOLS}, got {len(given)}", "tools")
    tools = {tool.name: tool for tool in (_tool(one, i) for i, one in enumerate(given))}
    if len(tools) < len(given):
        raise invalid("the functions of tools must have different names", "tools")
    choice, names = _choice(row.get("tool_choice"))
    if names is not None and (unknown := [name for name in names if name not in tools]):
        raise invalid(
            f"tool_choice names {unknown[0]!r:.80}, which is not among the tools: {', '.join(tools):.200}",
            "tool_choice",
        )
    chosen = tuple(tools.values()) if names is None else tuple(tools[name] for name in dict.fromkeys(names))
    return Offer(tuple(given), chosen, choice, parallel)


def _tool(given: Value, place: int) -> Tool:
    name = f"tools[{place}]"
    kind = given.get("type", "function") if isinstance(given, dict) else None
    if kind != "function":
        raise invalid(f"{name} must be an object of type function, got {given!r:.80}", name)
    function, name = given.get("function"), f"{name}.function"
    if not isinstance(function, dict):
        raise invalid(f"{name} must be an object with the name of a function, got {function!r:.80}", name)
    called = function.get("name")
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise invalid(f"{name}.name must be 1 to 64 letters, digits, _, - and ., got {called!r:.80}", f"{name}.name")
    if not isinstance(function.get("description"), str | None):
        raise invalid(
            f"{name}.description must be a string, got {function['description']!r:.60}", f"{name}.description"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise invalid(f"{name}.strict must be true or false, got {function['strict']!r:.60}", f"{name}.strict")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise RequestError(
            "invalid_schema", f"{name}.parameters must be a schema, got {parameters!r:.80}", f"{name}.parameters"
        )
    try:
        text = "" if parameters is None else valid_text(json.dumps(parameters, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "invalid_schema", f"{name}.parameters cannot be written: {error!s:.80}", f"{name}.parameters"
        ) from error
    return Tool(called, text, function.get("strict"))


def _choice(given: Value) -> tuple[Choice, Sequence[str] | None]:
    """The choice, and the functions that it is limited to."""
    if given is None:
        return "auto", None
    if given in ("none", "auto", "required"):
        return given, None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "function":
        return "named", [_named(given)]
    allowed = given.get("allowed_tools", given) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        tools = allowed.get("tools")
        if isinstance(tools, list) and tools:
            return allowed["mode"], [_named(one) for one in tools]
    raise invalid(
        "tool_choice must be none, auto, required, a function by its name, or allowed_tools with a mode and tools, got "
        f"{given!r:.80}",
        "tool_choice",
    )


def _named(given: Value) -> str:
    function = given.get("function", given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"tool_choice must name a function, got {given!r:.80}", "tool_choice")
    return name
