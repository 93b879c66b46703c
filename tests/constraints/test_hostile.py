"""Constraints made to be expensive end soon: prepared, or refused."""

import random
import time

import pytest

from dflash_jax.constraints import json_schema, regex
from dflash_jax.constraints.constraint import prepared
from dflash_jax.constraints.errors import ConstraintError
from tests.fakes import schemas, vocabulary

SECONDS = 30.0  # far above what any takes here, and far below what one takes that does not end


def hostile(rng):
    """A constraint with too much of something."""
    kind, n = rng.randrange(14), rng.choice([3, 30, 300, 3000])
    text = {"type": "string"}
    if kind == 0:
        return regex(f"(a|b)*a(a|b){{{n}}}")
    if kind == 1:
        return regex("(" * min(n, 99) + "a*" + ")*" * min(n, 99))
    if kind == 2:
        return regex("|".join(f".*{rng.randrange(10**6)}.*" for _ in range(min(n, 300))))
    if kind == 3:
        return regex(f"([^a]{{0,{n}}}b){{{rng.randint(1, 50)}}}")
    if kind == 4:
        return json_schema({"enum": [f"{i}" * rng.randint(1, 9) for i in range(n)]})
    if kind == 5:
        names = [f"p{i}" for i in range(min(n, 1000))]
        return json_schema({"type": "object", "properties": dict.fromkeys(names, rng.choice([text, {}]))})
    if kind == 6:
        made = {}
        for _ in range(min(n, 200)):
            made = {rng.choice(["anyOf", "allOf"]): [made, rng.choice([text, {"type": "object"}, {}])]}
        return json_schema(made)
    if kind == 7:
        made = {"type": "integer"}
        for _ in range(min(n, 200)):
            made = {"type": "array", "items": made} if rng.random() < 0.5 else {"properties": {"a": made}}
        return json_schema(made)
    if kind == 8:
        size = min(n, 12)
        refs = [{"$ref": f"#/$defs/{i}"} for i in range(size)]
        object = {"type": "object", "properties": {f"k{i}": ref for i, ref in enumerate(refs)}}
        return json_schema({"$ref": "#/$defs/0", "$defs": {str(i): object for i in range(size)}})
    if kind == 9:
        return json_schema({"type": "array", "items": {"type": "string", "maxLength": n}, "maxItems": n})
    if kind == 10:
        return json_schema({"patternProperties": {f"x{i}.*y{i}": {"type": "integer"} for i in range(min(n, 60))}})
    if kind == 11:
        parts = [
            {"type": "string", "pattern": f"{rng.choice('abc')}.{{{i}}}{rng.choice('abc')}"} for i in range(min(n, 40))
        ]
        return json_schema({"allOf": parts})
    if kind == 12:
        return json_schema({"type": "number", "minimum": 10.0 ** -min(n, 300), "maximum": 10.0 ** min(n, 300)})
    return json_schema({"allOf": [schemas.schema(rng) for _ in range(3)]})


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 100))])
def test_each_ends_soon(part):
    nasty, rng, refused = vocabulary.vocabulary(), random.Random(part), set()
    for _ in range(20 if part == 0 else 100):
        constraint, begin = hostile(rng), time.monotonic()
        try:
            prepared(constraint, nasty, [vocabulary.END], **({"states": 2**10} if part == 0 else {}))
        except ConstraintError as error:
            refused.add(error.code)
        assert time.monotonic() - begin < SECONDS, constraint.source[:200]
    assert "constraint_too_large" in refused
    known = {"constraint_too_large", "constraint_timeout", "unsatisfiable", "unsupported_schema", "invalid_regex"}
    assert refused <= known | {"invalid_schema"}
