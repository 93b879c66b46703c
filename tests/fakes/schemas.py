"""Random schemas of the kinds that requests have."""

import random
from typing import Any

NAMES = ["a", "b", "name", "value é", "tags", 'q"uote', "x/y", "n\nl"]


def schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema that `dflash_jax.constraints` serves; a few allow nothing."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "bounded", "number bounded", "format", "pattern"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 3 + ["any of", "map", "all of", "reference", "tuple", "open"]
    made = _MADE[rng.choice(kinds)]
    return made(rng, depth)


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(NAMES, rng.randint(1, 4))
    found = {"type": "object", "properties": {name: schema(rng, depth - 1) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.6:
        found["additionalProperties"] = False
    return found


def _array(rng: random.Random, depth: int) -> Any:
    found = {"type": "array", "items": schema(rng, depth - 1)}
    if rng.random() < 0.5:
        found["maxItems"] = rng.randint(0, 4)
    if rng.random() < 0.4:
        found["minItems"] = rng.randint(0, found.get("maxItems", 2))
    return found


def _tuple(rng: random.Random, depth: int) -> Any:
    found = {"type": "array", "prefixItems": [schema(rng, 0) for _ in range(rng.randint(1, 3))]}
    found["items"] = rng.choice([False, {"type": "boolean"}])
    found["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.5:
        found["maxItems"] = rng.randint(found["minItems"], 4)
    return found


def _bounded(rng: random.Random, depth: int) -> Any:
    low = rng.randint(-300, 300)
    found = {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low}
    if rng.random() < 0.7:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 500)
    if rng.random() < 0.2:
        found["multipleOf"] = rng.choice([1, 2, 5, 10])
    return found


def _number(rng: random.Random, depth: int) -> Any:
    low = rng.choice([0, 0.5, -1.25, -20, 3.125])
    return {"type": "number", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.choice([0.75, 10])}


def _all_of(rng: random.Random, depth: int) -> Any:
    one, other = _object(rng, 1), _object(rng, 1)
    return {"allOf": [one, {**other, "properties": {}}]} if rng.random() < 0.5 else {"allOf": [one], "title": "x"}


def _reference(rng: random.Random, depth: int) -> Any:
    inner = schema(rng, depth - 1)
    return {"anyOf": [inner, {"type": "null"}], "description": "optional"}


_MADE = {
    "string": lambda rng, depth: {"type": "string", **rng.choice([{}, {}, {"minLength": 1}, {"maxLength": 5}])},
    "integer": lambda rng, depth: {"type": "integer"},
    "number": lambda rng, depth: {"type": ["number", "null"]},
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(["red", "grün", 'a"b', 3, -1.5, None, True, [1, "x"], {"k": 2}], 3)},
    "bounded": _bounded,
    "number bounded": _number,
    "format": lambda rng, depth: {
        "type": "string",
        "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"]),
    },
    "pattern": lambda rng, depth: {"type": "string", "pattern": rng.choice(["^a+b?$", "b", "^[0-9]{2,4}-", "é|\\n$"])},
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "any of": lambda rng, depth: {"anyOf": [schema(rng, depth - 1) for _ in range(2)]},
    "map": lambda rng, depth: {"type": "object", "additionalProperties": schema(rng, depth - 1), "maxProperties": 3},
    "open": lambda rng, depth: _object(rng, depth) | {"additionalProperties": rng.choice([True, {"type": "integer"}])},
    "all of": _all_of,
    "reference": _reference,
}
