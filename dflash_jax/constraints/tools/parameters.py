"""Calls whose arguments stand between tags, one after the other: strings as they are, other values as JSON."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dflash_jax.constraints.characters import ALL, utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.keywords import SAYS_NOTHING
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.numbers import Numbers
from dflash_jax.constraints.schema import json_schema
from dflash_jax.constraints.tools.form import Tool
from dflash_jax.constraints.tools.format import ONE_LINE, Grammar, schema_of
from dflash_jax.constraints.tools.kinds import MOST_LEVELS, allowed_kinds, kinds_of, referred
from dflash_jax.constraints.tools.reading import Event, Feed, Steps, escaped
from dflash_jax.files import Fields, Json, Value

RAW = Layout(quote="")
MOST_NESTED = 4  # alternatives inside of alternatives
_DEFINITIONS = "$defs", "definitions"
_SPELLED = {"True": "true", "False": "false", "None": "null"}  # as Python writes them, and templates with it
_WORDS = dict.fromkeys(("true", "false", "True", "False"), "boolean") | dict.fromkeys(("null", "None"), "null")
_BLANKS = " \t\r\n"


class Tags(NamedTuple):
    """What stands around a parameter: before and after its name, after its value, and between two of them."""

    begin: str
    named: str
    end: str
    between: str


def arguments(grammar: Grammar, tool: Tool, tags: Tags) -> Expression:
    """All parameters of a call, in the order of the schema, with what separates them behind each."""
    parts = _Parts(grammar, tags, tool.strict is True)
    found = grammar.enforced(tool, parts.listed)
    return parts.others((), parts.text) if found is None else found


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.$"


class _Parts:
    """Makes parameters between their tags.

    Attributes:
        text: any text that a parameter may have.
    """

    def __init__(self, grammar: Grammar, tags: Tags, strict: bool):
        self._grammar, self._tags, self._strict = grammar, tags, strict
        self._made = made = grammar.made
        self._free, self.text = made.free(tags.end), any_text(made)

    def _pair(self, name: Expression, value: Expression) -> Expression:
        made, tags = self._made, self._tags
        begin, named, end = (made.text(text.encode()) for text in (tags.begin, tags.named, tags.end + tags.between))
        return made.sequence([begin, name, named, made.both([value, self._free]), end])

    def others(self, known: Iterable[str], value: Expression) -> Expression:
        """Any parameters besides those that are known."""
        made = self._made
        name = made.times(made.one(sum(1 << ord(letter) for letter in _LETTERS)), 1, 64)
        unknown = [made.without(made.texts(name.encode() for name in known))] if known else []
        return made.times(self._pair(made.both([name, *unknown]), value), 0, None)

    def listed(self, schema: Json) -> Expression:
        """The parameters of a schema, one after the other."""
        made, known = self._made, {*SAYS_NOTHING, "type", "properties", "required", "additionalProperties"}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        json_schema(made, schema, None, self._grammar.budget)  # it must be one
        names = list(dict.fromkeys([*properties, *required]))
        odd = [name for name in schema if name not in known and not name.startswith("x-")]
        odd += [name for name in names if not name or set(name) - set(_LETTERS)]
        if odd or schema.get("type") != "object":
            raise ConstraintError(
                "unsupported_schema", f"this model's tool calls need an object with plain properties, found {odd}"
            )
        more, found = schema.get("additionalProperties", not names), list[Expression]()
        for name in names:
            value = self._value(properties.get(name, True if more is False else more), schema)
            part = self._pair(made.text(name.encode()), value)
            found.append(part if name in required else made.optional(part))
        if more is not False:
            found.append(self.others(names, self._value(more, schema)))
        return made.sequence(found)

    def _value(self, schema: Value, root: Json) -> Expression:
        return _value(self._grammar, schema, root, self._strict)


def _within(part: Value, root: Fields) -> Value:
    """A part of a schema as a schema of its own."""
    return (
        {**part, **{name: root[name] for name in _DEFINITIONS if name in root}} if isinstance(part, Mapping) else part
    )


def _value(
    grammar: Grammar, schema: Value, root: Fields, strict: bool, others: frozenset[str] | None = None, level: int = 0
) -> Expression:
    """A value of a parameter.

    Args:
        strict: whether all that is allowed must satisfy the schema.
        others: types besides strings that the whole parameter may have; a string must not read as one of them.
    """
    grammar.budget.check()
    made, schema = grammar.made, _inlined(schema, root)
    kinds = allowed_kinds(schema, root)
    others = frozenset(kinds - {"string"}) if others is None else others
    write = partial(json_schema, made, _within(schema, root), budget=grammar.budget)
    if kinds == {"string"}:
        text = write(RAW)
        return made.both([text, made.without(_read_as(made, others))]) if others else text
    if "string" not in kinds:
        found = write(ONE_LINE)
        words = [word for word, kind in (("True", "boolean"), ("False", "boolean"), ("None", "null")) if kind in kinds]
        plain = isinstance(schema, Mapping) and not {"enum", "const"} & schema.keys()
        return made.either([found, *(made.text(word.encode()) for word in words if plain)])
    parts = _alternatives(schema)
    if parts and level < MOST_NESTED:
        return made.either([_value(grammar, part, root, strict, others, level + 1) for part in parts])
    said = isinstance(schema, Mapping) and any(name not in SAYS_NOTHING for name in schema)
    if strict and said:
        raise ConstraintError(
            "unsupported_schema", "this model's tool calls need parameters that are a string, or no string, or an anyOf"
        )
    return any_text(made)


def any_text(made: Expressions) -> Expression:
    """Any text, without special tokens."""
    return made.times(utf8(made, ALL), 0, None)


def _read_as(made: Expressions, kinds: Collection[str]) -> Expression:
    """Texts that `_as_json` takes for values of these types."""
    found = list[Expression]()
    if {"number", "integer"} & set(kinds):
        found.append(Numbers(made).number())
    words = [word for word, kind in _WORDS.items() if kind in kinds]
    found.append(made.texts(word.encode() for word in words))
    for kind, bracket in (("array", b"["), ("object", b"{")):
        if kind in kinds:
            found.append(made.then(made.text(bracket), made.anything))
    blanks = made.times(made.one(sum(1 << ord(blank) for blank in _BLANKS)), 0, None)
    return made.sequence([blanks, made.either(found), blanks])


def _inlined(schema: Value, root: Fields) -> Value:
    """A schema that is but a reference to another one, or has but one part, is that one."""
    for _ in range(MOST_LEVELS):
        rest = (
            {name: value for name, value in schema.items() if name not in SAYS_NOTHING}
            if isinstance(schema, Mapping)
            else {}
        )
        if set(rest) == {"$ref"} and isinstance(rest["$ref"], str):
            schema = referred(rest["$ref"], root)
        elif set(rest) == {"allOf"} and isinstance(rest["allOf"], list) and len(rest["allOf"]) == 1:
            schema = rest["allOf"][0]
        else:
            break
    return schema


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
        first, kinds = False, allowed_kinds(properties.get(key, True), schema)
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
    written = _SPELLED.get(text.strip(_BLANKS), text.strip(_BLANKS))
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or not kinds_of(value) & kinds:
        return json.dumps(text, ensure_ascii=False) if "string" in kinds else written
    return written


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
