"""Which values schemas tell apart: types, constants, and alternatives that exclude each other."""

from collections.abc import Mapping, Sequence

from dflash_jax.constraints.keywords import TYPES
from dflash_jax.files import Value


def is_one_of(value: Value, kinds: Sequence[str]) -> bool:
    """Whether a value is of one of these types."""
    return any(kind in kinds for kind in _kinds(value))


def _kinds(value: Value) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return "integer", "number"
    if isinstance(value, float):
        return ("integer", "number") if value.is_integer() else ("number",)
    if value is None:
        return ("null",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)


def _constants(schema: Value) -> list[Value] | None:
    """The values of an enumeration; None where a schema is none."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def disjoint(one: Value, other: Value) -> bool:
    """Whether it is plain that no value satisfies both schemas."""
    if False in (one, other):
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values = _constants(one), _constants(other)
    if None not in values:
        return not any(same(x, y) for x in values[0] or () for y in values[1] or ())
    kinds = []
    for schema, constants in zip((one, other), values, strict=True):
        found = schema.get("type", None if constants is None else [k for value in constants for k in _kinds(value)])
        found = {found} if isinstance(found, str) else set(TYPES) if found is None else set(found)
        kinds.append(found | ({"integer"} if "number" in found else set()))
    if not kinds[0] & kinds[1]:
        return True
    if kinds[0] | kinds[1] != {"object"}:
        return False
    required = set(one.get("required", ())) & set(other.get("required", ()))
    pairs = ([schema.get("properties", {}).get(name, True) for schema in (one, other)] for name in required)
    return any(None not in [_constants(x) for x in pair] and disjoint(*pair) for pair in pairs)


def same(one: Value, other: Value) -> bool:
    """Whether two values of JSON are equal: 1 is 1.0, and neither is true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
