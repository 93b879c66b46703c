"""Keywords of JSON Schema: which are served, which are refused, and what their values may be."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from dflash_jax.constraints.conjunction import NESTED
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.files import Fields, Value

SAYS_NOTHING = frozenset(
    """
    title description default examples example $schema $id id $comment $defs definitions deprecated readOnly writeOnly
    $anchor discriminator contentEncoding contentMediaType nullable
    """.split()
)
OF_TYPE: Mapping[str, Sequence[str]] = {
    "object": (
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties".split()
    ),
    "array": "items prefixItems minItems maxItems uniqueItems".split(),
    "string": "minLength maxLength pattern format".split(),
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split(),
}
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
KNOWN = {*SAYS_NOTHING, *NESTED, "type", "enum", "const", *(name for names in OF_TYPE.values() for name in names)}
_REFUSED = frozenset(
    """
    not if then else contains minContains maxContains unevaluatedProperties unevaluatedItems dependentRequired
    dependentSchemas dependencies $dynamicRef $dynamicAnchor $recursiveRef additionalItems contentSchema
    """.split()
)


def check(schema: Fields, at: str) -> None:
    """Raises ConstraintError for a keyword that is unknown, refused, or has a value of another kind; `at` points to the
    schema."""
    for name, value in schema.items():
        place = f"schema at {at}/{pointer(name)}"
        if name == "$id" and at:
            raise ConstraintError("unsupported_schema", f"{place}: it is supported at the root only")
        if name in _REFUSED:
            raise ConstraintError("unsupported_schema", f"{place}: the keyword cannot be enforced; leave it out")
        if name not in KNOWN and not name.startswith("x-"):
            near = get_close_matches(name, KNOWN, 1)
            hint = f"the nearest is {near[0]}" if near else "it is not ignored, since it might be meant to restrict"
            raise ConstraintError("unsupported_schema", f"{place}: unknown keyword; {hint}")
        if name in _VALUES and not _VALUES[name][0](value):
            raise ConstraintError("invalid_schema", f"{place}: it must be {_VALUES[name][1]}, got {value!r:.60}")


def pointer(name: str) -> str:
    """A part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _list_of(value: Value, one: Callable[[Value], bool], least: int = 0) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(one, value))


def _is_value(value: Value) -> bool:
    """Whether it is a value of JSON that can be written."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError):
        return False
    return True


_is_text = lambda value: isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
_is_size = lambda value: type(value) is int and 0 <= value < 2**31
_is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
_is_schema = lambda value: isinstance(value, Mapping | bool)
_of_schemas = lambda value: (
    isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(_is_schema, value.values()))
)
_VALUES: dict[str, tuple[Callable[[Value], bool], str]] = {
    "type": (
        lambda value: value in TYPES if isinstance(value, str) else _list_of(value, lambda x: x in TYPES, 0),
        f"among {', '.join(TYPES)}, or a list of these",
    ),
    "enum": (lambda value: _list_of(value, _is_value, 0), "a list of values"),
    "const": (lambda value: _is_value(value), "a value"),
    "required": (lambda value: _list_of(value, _is_text), "a list of names"),
    "pattern": (_is_text, "a string"),
    "format": (_is_text, "a string"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "items": (lambda value: _is_schema(value) or _list_of(value, _is_schema), "a schema"),
}
_VALUES |= dict.fromkeys(("properties", "patternProperties"), (_of_schemas, "an object of schemas"))
_VALUES |= dict.fromkeys(("additionalProperties", "propertyNames"), (_is_schema, "a schema"))
_VALUES |= dict.fromkeys(("allOf", "anyOf", "oneOf"), (lambda v: _list_of(v, _is_schema, 1), "a list of schemas"))
_VALUES |= {"prefixItems": (lambda value: _list_of(value, _is_schema), "a list of schemas")}
_LENGTHS = "minLength maxLength minItems maxItems minProperties maxProperties".split()
_VALUES |= dict.fromkeys(_LENGTHS, (_is_size, "a number of things, 0 or more"))
_BOUNDS = "minimum maximum exclusiveMinimum exclusiveMaximum".split()
_VALUES |= dict.fromkeys(_BOUNDS, (_is_number, "a number"))
