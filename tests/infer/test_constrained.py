"""Constraints as requests ask for them, and what is refused by the name of its field."""

import pytest

from dflash_jax import RequestError
from dflash_jax.constraints.constraint import choice, json_object, json_schema, regex
from dflash_jax.infer.constrained import constraint_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def formatted(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_regex": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_schema(SCHEMA)),
        (formatted(SCHEMA, strict=True, description="d"), json_schema(SCHEMA)),
        (formatted(None), json_object()),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, json_schema(SCHEMA, compact=True)),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, json_object()),
        ({"structured_outputs": {"regex": "a+", "choice": None, "json_object": False}}, regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, choice(["a", "b"])),
        ({"structured_outputs": {"json_object": True}}, json_object()),
        ({"guided_json": SCHEMA}, json_schema(SCHEMA)),
        ({"guided_regex": "a"}, regex("a")),
        ({"guided_choice": ["a"]}, choice(["a"])),
        ({"json_schema": '{"type": "object"}'}, json_object()),
        ({"regex": "a"}, regex("a")),
    ],
)
def test_every_form(row, expected):
    found = constraint_of(row)
    assert found == expected
    assert found is None or found.name in row


@pytest.mark.parametrize(
    ("row", "code", "why"),
    [
        ({"response_format": "json"}, "invalid_parameter", "must be of type text, json_object or json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "invalid_parameter", "must be of type"),
        ({"response_format": {"type": "json_schema"}}, "invalid_parameter", "an object with a name and a schema"),
        (formatted(SCHEMA, extra=1), "unsupported_parameter", r"response_format\.json_schema\.extra"),
        (formatted(SCHEMA, name="no good"), "invalid_parameter", r"name must be 1 to 64 letters"),
        (formatted(SCHEMA, strict="yes"), "invalid_parameter", "strict must be true or false"),
        (formatted([1]), "invalid_schema", r"json_schema\.schema must be an object"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "unsupported_parameter", r"structured_outputs\.grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "conflicting_constraints", "may have one of"),
        ({"structured_outputs": {"choice": []}}, "invalid_parameter", "at least one"),
        ({"structured_outputs": ["a"]}, "invalid_parameter", "must be an object"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "unsupported_parameter", "whitespace_pattern"),
        ({"guided_json": "{"}, "invalid_schema", "must be a schema in JSON"),
        ({"guided_regex": 3}, "invalid_regex", "must be a string"),
        ({"guided_choice": "a"}, "invalid_parameter", "a list of strings"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "conflicting_constraints",
            "cannot be combined",
        ),
    ],
)
def test_what_is_none_is_refused(row, code, why):
    with pytest.raises(RequestError, match=why) as error:
        constraint_of(row)
    assert error.value.code == code
    assert error.value.param
    assert error.value.param.split(".")[0] in row
