"""Calls whose arguments stand between tags, one after the other: strings as they are, other values as JSON."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.keywords import OF_TYPE, SAYS_NOTHING, TYPES
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.schema import json_schema
from dflash_jax.constraints.tools.form import Tool
from dflash_jax.constraints.tools.format import ONE_LINE, Grammar, schema_of
from dflash_jax.constraints.tools.reading import Event, Feed, Steps, escaped
from dflash_jax.files import Fields, Json, Value

RAW = Layout(quote="")
MOST_LEVELS = 32  # of references and alternatives that are followed to learn what a parameter may be
_DEFINITIONS = "$defs", "definitions"
_SPELLED = {"True": "true", "False": "false", "None": "null"}  # as Python writes them, and templates with it


class Tags(NamedTuple):
    """What stands around a parameter: before and after its name, after its value, and between two of them."""

    begin: str
    named: str
    end: str
    between: str


def arguments(grammar: Grammar, tool: Tool, tags: Tags) -> Expression:
    """All parameters of a call, in the order of the schema, with what separates them behind each."""
    made = grammar.made
    free = made.free(tags.end)
    end = made.text((tags.end + tags.between).encode())
    pair = lambda name, value: made.sequence(
        [made.text((tags.begin + name + tags.named).encode()), made.both([value, free]), end]
    )
    found = grammar.enforced(tool, lambda schema: _listed(grammar, schema, pair))
    if found is not None:
        return found
    letter = made.one(sum(1 << ord(letter) for letter in _LETTERS))
    begin, named = made.text(tags.begin.encode()), made.text(tags.named.encode())
    return made.times(made.sequence([begin, made.times(letter, 1, 64), named, free, end]), 0, None)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.$"


def _listed(grammar: Grammar, schema: Json, pair) -> Expression:
    """The parameters of a schema, one after the other."""
    made, known = grammar.made, {*SAYS_NOTHING, "type", "properties", "required", "additionalProperties"}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [*properties, *required] if isinstance(properties, Mapping) and isinstance(required, list) else [None]
    json_schema(made, schema, None, grammar.budget)  # it must be one
    more = [name for name in schema if name not in known and not name.startswith("x-")]
    odd = [name for name in names if not isinstance(name, str) or not name or set(name) - set(_LETTERS)]
    if more or odd or schema.get("type") != "object":
        raise ConstraintError(
            "unsupported_schema", f"this model's tool calls need an object with plain properties, found {more or odd}"
        )
    found = list[Expression]()
    for name in dict.fromkeys(names):
        part = pair(name, _value(grammar, properties.get(name, True), schema))
        found.append(part if name in required else made.optional(part))
    return made.sequence(found)


def _within(part: Value, root: Fields) -> Value:
    """A part of a schema as a schema of its own."""
    return (
        {**part, **{name: root[name] for name in _DEFINITIONS if name in root}} if isinstance(part, Mapping) else part
    )


def _value(grammar: Grammar, schema: Value, root: Fields, level: int = 0) -> Expression:
    made, kinds = grammar.made, _kinds(schema, root)
    write = partial(json_schema, made, _within(schema, root), budget=grammar.budget)
    if kinds == {"string"}:
        return write(RAW)
    if "string" not in kinds:
        found = write(ONE_LINE)
        words = [word for word, kind in (("True", "boolean"), ("False", "boolean"), ("None", "null")) if kind in kinds]
        plain = isinstance(schema, Mapping) and not {"enum", "const"} & schema.keys()
        return made.either([found, *(made.text(word.encode()) for word in words if plain)])
    parts = _alternatives(schema)
    if not parts or level == MOST_LEVELS:
        return made.free()
    return made.either([_value(grammar, part, root, level + 1) for part in parts])


def _alternatives(schema: Value) -> Sequence[Value]:
    """Schemas that together are this one, if it is written so."""
    if not isinstance(schema, Mapping):
        return []
    rest = {name: value for name, value in schema.items() if name not in SAYS_NOTHING}
    for name in ("anyOf", "oneOf"):
        if set(rest) == {name}:
            return rest[name]
    if set(rest) >= {"enum"}:
        strings = [value for value in rest["enum"] if isinstance(value, str)]
        others = [value for value in rest["enum"] if not isinstance(value, str)]
        return [{**rest, "enum": strings}, {**rest, "enum": others}] if strings and others else []
    if isinstance(rest.get("type"), list) and len(rest["type"]) > 1:
        return [{**rest, "type": kind} for kind in rest["type"]]
    return []


def _kinds(schema: Value, root: Fields, level: int = 0) -> set[str]:
    """Types that a value may have."""
    every = set[str](TYPES)
    if not isinstance(schema, Mapping) or level == MOST_LEVELS:
        return every
    found = every
    if isinstance(reference := schema.get("$ref"), str):
        target: Value = root
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        found = found & _kinds(target, root, level + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = found & set[str]().union(*(_kinds(part, root, level + 1) for part in schema[name]))
    for part in schema.get("allOf", []):
        found = found & _kinds(part, root, level + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = found & set[str]().union(*map(_kinds_of, values))
    if kinds := schema.get("type"):
        found = found & set([kinds] if isinstance(kinds, str) else kinds)
    elif said := {kind for kind, names in OF_TYPE.items() if any(name in schema for name in names)}:
        found = found & said
    return found


def _kinds_of(value: Value) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def read_arguments(feed: Feed, name: str, tags: Tags, last: str) -> Steps:
    """Reads parameters up to the mark that stands behind the last one; the arguments are given as JSON."""
    schema = next((schema_of(tool) for tool in feed.form.tools if tool.name == name), {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    first, begin = True, tags.begin.strip()
    while (yield from feed.skip("\n")) is None and (yield from feed.starts(begin)):
        key = yield from feed.take(tags.named.strip())
        if tags.named.endswith("\n"):
            yield from feed.starts("\n")
        yield Event("arguments", ("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        first, kinds = False, _kinds(properties.get(key, True), schema)
        if kinds == {"string"}:
            yield Event("arguments", '"')
            if not (yield from feed.until("arguments", tags.end, change=escaped)):
                return
            yield Event("arguments", '"')
        else:
            yield Event("arguments", _as_json((yield from feed.take(tags.end)), kinds))
    yield from feed.take(last)
    yield Event("arguments", "{}" if first else "}")


def _as_json(text: str, kinds: set[str]) -> str:
    """A value that was written, as JSON: what reads as a value of another kind than a string is one, if it may be."""
    written = _SPELLED.get(text.strip(), text.strip())
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or not _kinds_of(value) & kinds:
        return json.dumps(text, ensure_ascii=False) if "string" in kinds else written
    return written
