"""Which types a schema allows, as far as that can be told without compiling it."""

from collections.abc import Mapping

from dflash_jax.constraints.keywords import OF_TYPE, TYPES
from dflash_jax.files import Fields, Value

MOST_LEVELS = 32  # of references and alternatives that are followed


def allowed_kinds(schema: Value, root: Fields) -> set[str]:
    """Types that a value may have; all of them where the schema is none."""
    return _kinds(schema, root, {})


def _kinds(schema: Value, root: Fields, known: dict[int, set[str]]) -> set[str]:
    """The same; `known` has what is known of parts, by their ids, so that each is looked at once."""
    every = set[str](TYPES)
    if not isinstance(schema, Mapping):
        return every
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = found = every  # of a schema that leads back to itself
    parts = lambda name: schema[name] if isinstance(schema.get(name), list) else []
    if isinstance(reference := schema.get("$ref"), str):
        found = found & _kinds(referred(reference, root), root, known)
    for name in ("anyOf", "oneOf"):
        if some := parts(name):
            found = found & set[str]().union(*(_kinds(part, root, known) for part in some))
    for part in parts("allOf"):
        found = found & _kinds(part, root, known)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = found & set[str]().union(*map(kinds_of, values))
    said = schema.get("type")
    if named := {kind for kind in (said if isinstance(said, list) else [said]) if isinstance(kind, str)}:
        found = found & named
    elif about := {kind for kind, names in OF_TYPE.items() if any(name in schema for name in names)}:
        found = found & about
    known[id(schema)] = found
    return found


def referred(reference: str, root: Fields) -> Value:
    """What a reference points to; None where that is nothing."""
    target: Value = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def kinds_of(value: Value) -> set[str]:
    """Types that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    named = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {named[type(value)]}
