"""What a schema's automaton matches satisfies the schema."""

import json
import random
from decimal import Decimal

import numpy as np
import pytest

from dflash_jax.constraints.automaton import automaton
from dflash_jax.constraints.constraint import json_object, json_schema, prepared
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expressions
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.numbers import Numbers
from dflash_jax.constraints.schema import json_schema as expression
from tests.fakes import schemas, vocabulary

jsonschema = pytest.importorskip("jsonschema")
CLOSING = b'"}],:'


def matcher(schema, **layout):
    made = Expressions()
    return automaton(made, expression(made, schema, Layout(**layout)))


def validator(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def answer(found, ends, rng, tokens, longest=400):
    """A random answer of a token automaton, and whether it ended by itself."""
    state, text = 1, b""
    for _ in range(longest):
        may = np.flatnonzero(found.allows(state))
        assert may.size, "a row without any token"
        if ends in may and rng.random() < 0.5:
            return text, True
        short = [t for t in may if t == ends or tokens[t][:1] in (b'"', b"}", b"]", b",", b":")]
        token = rng.choice(short) if short and rng.random() < 0.5 else rng.choice(may.tolist())
        if token == ends:
            return text, True
        text += tokens[token]
        state = int(found.next[state, found.classes[token]])
    return text, False


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_every_finished_answer_is_valid(part):
    """Random schemas, random tokens of a vocabulary with nasty ones."""
    nasty, rng, finished, refused = vocabulary.vocabulary(), random.Random(part), 0, list[str]()
    for _ in range(200 if part else 60):
        schema = schemas.schema(rng)
        try:
            found = prepared(json_schema(schema, compact=rng.random() < 0.3), nasty, [vocabulary.END], seconds=60)
        except ConstraintError as error:
            refused.append(error.code)
            continue
        for _ in range(3):
            text, ended = answer(found, vocabulary.END, rng, nasty.tokens)
            if ended:
                value = json.loads(text)
                assert not list(validator(schema).iter_errors(value)), (schema, text)
                finished += 1
            else:
                of_bytes, state = matcher(schema), 1
                for byte in text:
                    state = of_bytes.next[state, byte]
                assert state, (schema, text)
    assert finished > (300 if part else 90)
    assert set(refused) <= {"unsatisfiable", "unsupported_schema"}


VALID = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, ['{"a":1}', '{\n  "a": -20\n}']),
    ({"type": "string"}, ['""', '"\\u00e9é\\ud83d\\ude00"', '"\\"\\\\/\\n"']),
    ({"type": "array", "items": {"type": "null"}}, ["[]", "[null, null]", "[\n    null\n]"]),
    ({"type": "number"}, ["0", "-1.5e+10", "0.25"]),
    ({"const": {"k": [1, None, "x"]}}, ['{"k":[1,null,"x"]}']),
    ({"type": "object"}, ['{"free": {"x": [1, {"y": true}]}, "b": 2}']),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}}, ['{"n":{"n":{"n":{}}}}']),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, ['{"x1": 3, "xy": 4}', "{}"]),
    ({"type": ["string", "null"], "enum": ["a", None, 3]}, ['"a"', "null"]),
    (
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": True, "b": True}},
        ['{"b":1}', '{"a":[]}'],
    ),
    ({"type": "string", "pattern": "^.b", "minLength": 3, "maxLength": 3}, ['"abc"']),
    ({"type": "string", "pattern": '"'}, ['"a\\"b"']),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ['"-1.50"', '"7"']),  # Pydantic's of a Decimal
    ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9]).{4,}$"}, ['"aB\\"3"']),
    ({"type": "object", "required": ["z"]}, ['{"z": [1]}']),
    ({"type": "string", "format": "uuid4"}, ['"8f14e45f-ceea-4671-a7d3-0123456789ab"']),
    ({"type": "string", "format": "byte"}, ['""', '"aGk="', '"aGVsbG8+"']),
    (
        {"type": "string", "format": "uri-reference"},
        ['"/a//b?x=1#y"', '"../a"', '"http://a.org/b"', '"/"', '"#a"', '""'],
    ),
    ({"type": "string", "format": "json-pointer"}, ['"/a/~0/~1/"', '""']),
    ({"type": "string", "format": "file-path", "nullable": True}, ['"/a b/c"']),
    ({"type": "integer", "format": "int64"}, ["12"]),
]


@pytest.mark.parametrize(("schema", "texts"), VALID)
def test_usual_texts_are_allowed(schema, texts):
    found = matcher(schema)
    for text in texts:
        assert found.matches(text.encode()), text
        validator(schema).validate(json.loads(text))


INVALID = [
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        ['{"a":"x"}', '{"b":1,"a":2.5}'],
    ),
    ({"type": "string", "maxLength": 2}, ['"abc"', '"\\u0061bc"']),
    ({"type": "integer", "minimum": 3, "maximum": 17}, ["2", "18", "03", "3.0", "-3"]),
    ({"type": "string"}, ['"\\ud800"', '"\n"', "'a'", '"\\x"', b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"']),
    ({"type": "object"}, ['{"a":1,}', "{a:1}", '{"a" 1}', "[]", " {}", "{} ", '{"a":01}']),
    (
        {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"properties": {"a": {"type": "integer"}}}]},
        ['{"a":2}', '{"a":3.5}'],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1,2]", '["a"]']),
    ({"type": "number", "exclusiveMaximum": 1}, ["0." + "9" * 20]),
    ({"allOf": [{"minProperties": 1, "type": "object"}, {"minProperties": 0}]}, ["{}"]),
    ({"type": "string", "pattern": "^\\S+$"}, ['"\u00a0"']),
    ({"type": "string", "pattern": "^[^\\s]+$"}, ['"\u00a0"']),
    ({"type": "string", "pattern": "^(?!.*\\s).*$"}, ['"a\u2003b"']),
    ({"type": "string", "pattern": "^(?!\\S).*$"}, ['"\u00a0x"', '"x"']),
    ({"type": "string", "pattern": "^(?![^\\s]).*$"}, ['"\u00a0x"', '"x"']),
    ({"type": "string", "format": "uuid4"}, ['"8f14e45f-ceea-1671-a7d3-0123456789ab"']),
    ({"type": "string", "format": "byte"}, ['"aGk"', '"a"', '"===="']),
    ({"type": "string", "format": "uri-reference"}, ['"//a:b"', '"1:b"', '"a b"']),
    ({"type": "string", "format": "json-pointer"}, ['"a"', '"/~2"']),
    ({"type": "string", "nullable": True}, ["null"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[]", "[1,2,3]"]),
    (
        {"type": "object", "properties": {"a": True}, "required": ["a"], "additionalProperties": False},
        ["{}", '{"a":1,"b":1}'],
    ),
]


@pytest.mark.parametrize(("schema", "texts"), INVALID)
def test_invalid_texts_are_not(schema, texts):
    found = matcher(schema)
    for text in texts:
        assert not found.matches(text if isinstance(text, bytes) else text.encode()), text


def test_blanks_are_bounded():
    found = matcher({"type": "array"})
    assert found.matches(b"[\n                1]")
    assert not found.matches(b"[\n                 1]")
    assert not found.matches(b"[  1]")
    assert not found.matches(b"[\n\n1]")
    compact = matcher({"type": "array"}, compact=True)
    assert compact.matches(b"[1,2]")
    assert not compact.matches(b"[1, 2]")


REFUSED = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "unsupported_schema", "/properties/a/not"),
    ({"properties": {"a/b": {"items": {"contains": {}}}}}, "unsupported_schema", "/properties/a~1b/items/contains"),
    ({"typ": "string"}, "unsupported_schema", "nearest is type"),
    ({"type": "strin"}, "invalid_schema", "/type: it must be among"),
    ({"type": "object", "properties": []}, "invalid_schema", "/properties: it must be an object of schemas"),
    ({"type": "integer", "minimum": "3"}, "invalid_schema", "/minimum: it must be a number"),
    ({"type": "array", "uniqueItems": True}, "unsupported_schema", "/uniqueItems"),
    ({"type": "string", "format": "credit-card"}, "unsupported_schema", "/format"),
    ({"type": "string", "pattern": "(?<=a)"}, "invalid_regex", "look-behind"),
    ({"type": "integer", "multipleOf": 7}, "unsupported_schema", "/multipleOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "unsupported_schema", "/oneOf"),
    ({"$ref": "#/nowhere"}, "invalid_schema", "points to nothing"),
    ({"$ref": "https://example.com/x"}, "unsupported_schema", "into the schema itself"),
    ({"$ref": "#"}, "unsatisfiable", "nothing satisfies"),
    ({"enum": []}, "unsatisfiable", "nothing satisfies"),
    (False, "unsatisfiable", "nothing satisfies"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "unsatisfiable", "nothing satisfies"),
    ({"type": "string", "minLength": 100000, "maxLength": 100001}, "constraint_too_large", "states"),
    ({"if": {}, "then": {}}, "unsupported_schema", "/if"),
    ({"type": "object", "dependencies": {}}, "unsupported_schema", "/dependencies"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 0}, "unsupported_schema", "/maxProperties"),
    ({"anyOf": []}, "invalid_schema", "/anyOf"),
    ({"properties": {"ab": {}}, "patternProperties": {"^a": {"type": "integer"}}}, "unsupported_schema", "matches"),
    ({"properties": {"abc": {}}, "propertyNames": {"maxLength": 2}}, "unsupported_schema", "/propertyNames"),
    ({"allOf": [{"patternProperties": {"a": {}}}, {"required": ["b"]}]}, "unsupported_schema", "cannot be joined"),
    ({"allOf": [{"prefixItems": [{}]}, {"items": {"type": "null"}}]}, "unsupported_schema", "cannot be joined"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "unsatisfiable", "nothing"),
    ({"allOf": [{"const": 1}, {"const": True}]}, "unsatisfiable", "nothing"),
    ({"allOf": [{"minimum": "a"}, {"minimum": 1}]}, "invalid_schema", "cannot be read"),
    ({"type": "integer", "multipleOf": 2.5}, "unsupported_schema", "/multipleOf"),
    (["x"], "invalid_schema", "must be an object"),
]


@pytest.mark.parametrize(("schema", "code", "why"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_pointer(schema, code, why):
    with pytest.raises(ConstraintError, match=why) as error:
        prepared(json_schema(schema), vocabulary.vocabulary(), [vocabulary.END], states=2**10, seconds=60)
    assert error.value.code == code


def test_alternatives_that_exclude_each_other():
    cat = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
    dog = {"properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
    found = matcher(
        {"oneOf": [{"type": "object", **cat}, {"$ref": "#/$defs/dog"}], "$defs": {"dog": {"type": "object", **dog}}}
    )
    assert found.matches(b'{"kind": "cat", "lives": 9}')
    assert found.matches(b'{"kind": "wolf"}')
    assert not found.matches(b'{"kind": "dog", "lives": 9}')


def test_recursion_ends_at_a_depth():
    schema = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}}
    found, deepest = matcher(schema), 0
    while found.matches(b'{"n":' * deepest + b"{}" + b"}" * deepest):
        deepest += 1
    assert 5 <= deepest < 10


@pytest.mark.parametrize("whole", [True, False])
def test_numbers_within_bounds(whole):
    rng = random.Random(whole)
    for _ in range(60):
        scale = 1 if whole else rng.choice([1, 10, 100])
        some = lambda scale=scale: Decimal(rng.choice([0, 1, -1, rng.randint(-2000, 2000)])) / scale
        low, high = rng.choice([None, some()]), rng.choice([None, some()])
        above, below = (False, False) if whole else (rng.random() < 0.5, rng.random() < 0.5)
        made = Expressions()
        numbers = Numbers(made)
        try:
            found = automaton(
                made,
                numbers.integer(*(None if x is None else int(x) for x in (low, high)))
                if whole
                else numbers.decimal(low, high, above=above, below=below),
            )
        except ConstraintError:
            assert low is not None
            assert high is not None
            assert low > high or (low == high and (above or below))
            continue
        for _ in range(80):
            x = Decimal(rng.choice([some(), (low or 0) + rng.randint(-1, 1), (high or 0) + rng.randint(-1, 1)]))
            text = format(x, "f")
            if not whole:
                text = rng.choice([text, text + ("0" if "." in text else ".00")])
            fits = low is None or (x > low if above else x >= low)
            fits &= high is None or (x < high if below else x <= high)
            assert found.matches(text.encode()) == fits, (low, high, text)


def test_any_object():
    nasty = vocabulary.vocabulary()
    found, rng = prepared(json_object(), nasty, [vocabulary.END], seconds=60), random.Random(0)
    for _ in range(50):
        text, ended = answer(found, vocabulary.END, rng, nasty.tokens)
        assert not ended or isinstance(json.loads(text), dict)
