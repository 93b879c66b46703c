"""Schemas that must all hold, as one: what `allOf`, a `$ref` with neighbors and alternatives with neighbors mean."""

import json
from collections.abc import Sequence

from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.files import Fields, Json, Value

_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "propertyNames")
_LISTS = ("items", "prefixItems")
NESTED = ("$ref", "allOf", "anyOf", "oneOf")


def conjunction(schemas: Sequence[Value]) -> Value:
    """One schema that holds where all of them do. What cannot be said in one is left in its `allOf`."""
    found: Json = {}
    for schema in schemas:
        if schema is False:
            return False
        if schema is not True:
            found = _joined(found, schema) if found else dict(schema)
    return found


def _joined(one: Fields, other: Fields) -> Json:
    found, left = dict(one), list(one.get("allOf", ()))
    for names, rare in ((_OBJECTS, ("patternProperties", "propertyNames")), (_LISTS, ("prefixItems",))):
        # What these say depends on their neighbors in their own schema.
        if any(name in schema for schema in (one, other) for name in rare):
            mine, theirs = ([name for name in names if name in schema] for schema in (one, other))
            if mine and theirs:
                why = f"{mine[0]} and {theirs[0]} of schemas that must hold together cannot be joined"
                raise ConstraintError("unsupported_schema", f"{why} where one of them has {' or '.join(rare)}")
    for name, value in other.items():
        if name == "allOf":
            left += value
        elif name not in found or json.dumps(found[name]) == json.dumps(value):  # 1 is not true here
            found[name] = value
        elif name == "uniqueItems":
            found[name] = True
        elif name in _LARGEST:
            found[name] = max(found[name], value)
        elif name in _SMALLEST:
            found[name] = min(found[name], value)
        elif name == "type":
            found[name] = _types(found[name], value)
        elif name in NESTED or name in ("enum", "const", "pattern", "format", "multipleOf", *_LISTS):
            left.append({name: value})
        elif name not in _OBJECTS:  # such as a title
            found[name] = value
    if any(name in schema for schema in (one, other) for name in _OBJECTS):
        found |= _objects(one, other)
    if left:
        found["allOf"] = left
    return found


def _types(one: Value, other: Value) -> list[str]:
    """The types that both allow; an integer is a number."""
    first, second = ([x] if isinstance(x, str) else x for x in (one, other))
    both = [name for name in first if name in second]
    if "integer" not in both and any("integer" in x and "number" in y for x, y in ((first, second), (second, first))):
        both.append("integer")
    return both


def _objects(one: Fields, other: Fields) -> Json:
    """What two schemas say of objects."""
    names = dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})])

    def said(schema: Fields, name: str) -> Value:
        properties = schema.get("properties", {})
        return properties[name] if name in properties else schema.get("additionalProperties", True)

    def together(values: list[Value]) -> Value:
        values = [value for value in values if value is not True]
        if False in values:
            return False
        return values[0] if len(values) == 1 else {"allOf": values} if values else True

    found: Json = {}
    if names:
        found["properties"] = {name: together([said(one, name), said(other, name)]) for name in names}
    if required := list(dict.fromkeys([*one.get("required", ()), *other.get("required", ())])):
        found["required"] = required
    given = [schema["additionalProperties"] for schema in (one, other) if "additionalProperties" in schema]
    if given:
        found["additionalProperties"] = together(given)
    return found
