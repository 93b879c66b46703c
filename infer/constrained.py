"""Constraints as requests ask for them: OpenAI's `response_format`, vLLM's `structured_outputs`, and older names."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

from dflash_jax.constraints.constraint import Constraint, choice, json_object, json_schema, regex
from dflash_jax.files import Fields, Value
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.infer.text import valid_text

# Fields with a constraint of their own. vLLM had the `guided_` ones until 0.12; the last two are SGLang's.
NAMES = "response_format structured_outputs guided_json guided_regex guided_choice json_schema regex".split()
MOST_CHOICES = 2**14
_OUTPUTS = "json regex choice json_object".split()  # of `structured_outputs`
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def constraint_of(row: Fields) -> Constraint | None:
    """The constraint of a request; None if it has none.

    Raises:
        RequestError: it is none, or there are two.
    """
    found = {name: made for name in NAMES if (made := _READ[name](row.get(name), name)) is not None}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError("conflicting_constraints", f"{first} and {second} cannot be combined; give one", second)
    return next((replace(made, name=name) for name, made in found.items()), None)


def _response_format(given: Value, name: str) -> Constraint | None:
    if given is None or given == {}:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        _only(given, name, "type", "schema")
        return json_object() if given.get("schema") is None else _schema(given["schema"], f"{name}.schema")
    if kind != "json_schema":
        raise invalid(f"{name} must be of type text, json_object or json_schema, got {given!r:.80}", name)
    _only(given, name, "type", "json_schema")
    asked = given.get("json_schema")
    if not isinstance(asked, dict):
        raise invalid(f"{name}.json_schema must be an object with a name and a schema, got {asked!r:.80}", name)
    _only(asked, f"{name}.json_schema", "name", "schema", "strict", "description")
    called = asked.get("name")
    if not isinstance(called, str) or not _SCHEMA_NAME.fullmatch(called):
        raise invalid(
            f"{name}.json_schema.name must be 1 to 64 letters, digits, _ and -, got {called!r:.80}",
            f"{name}.json_schema.name",
        )
    if not isinstance(asked.get("strict"), bool | None):
        raise invalid(f"{name}.json_schema.strict must be true or false, got {asked['strict']!r:.60}", name)
    if asked.get("schema") is None:
        return json_object()
    return _schema(asked["schema"], f"{name}.json_schema.schema")


def _structured_outputs(given: Value, name: str) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid(f"{name} must be an object, got {given!r:.80}", name)
    _only(given, name, *_OUTPUTS, "disable_any_whitespace", "disable_fallback", "disable_additional_properties")
    asked = {kind: given[kind] for kind in _OUTPUTS if given.get(kind) not in (None, False)}
    if len(asked) > 1:
        raise RequestError(
            "conflicting_constraints", f"{name} may have one of {', '.join(_OUTPUTS)}, got {[*asked]}", name
        )
    if not asked:
        return None
    kind, value = next(iter(asked.items()))
    read: dict[str, Callable[[Value, str], Constraint | None]] = {"json": _schema, "regex": _regex, "choice": _choice}
    found = json_object() if kind == "json_object" else read[kind](value, f"{name}.{kind}")
    return found and replace(found, compact=bool(given.get("disable_any_whitespace")))


def _schema(given: Value, name: str) -> Constraint | None:
    """A schema, as an object or as the text of one."""
    if given is None:
        return None
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        valid_text(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_schema", f"{name} must be a schema in JSON: {error!s:.100}", name) from error
    if not isinstance(schema, dict | bool):
        raise RequestError("invalid_schema", f"{name} must be an object, got {schema!r:.80}", name)
    return json_schema(schema)


def _regex(given: Value, name: str) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, str):
        raise RequestError("invalid_regex", f"{name} must be a string, got {given!r:.80}", name)
    return regex(valid_text(given))


def _choice(given: Value, name: str) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise invalid(f"{name} must be a list of strings, at least one; got {given!r:.80}", name)
    if len(given) > MOST_CHOICES:
        raise invalid(f"{name} may have at most {MOST_CHOICES} strings, got {len(given)}", name)
    return choice([valid_text(text) for text in given])


def _only(given: Fields, name: str, *known: str) -> None:
    """Raises RequestError for a part that nobody reads."""
    for part, value in given.items():
        if part not in known and value is not None:
            raise RequestError(
                "unsupported_parameter", f"{name}.{part} is not supported; {name} may have {', '.join(known)}", name
            )


_READ: dict[str, Callable[[Value, str], Constraint | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "json_schema": _schema,
    "regex": _regex,
}
