"""Answers with reasoning and calls: what the grammar of a format allows, its reader takes apart, token by token."""

import json
import random

import numpy as np
import pytest

from dflash_jax.constraints import ConstraintError, choice, tool_calls
from dflash_jax.constraints.constraint import Constraint, prepared
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.formats import FORMATS, reading
from dflash_jax.constraints.tools.reading import joined
from tests.fakes import vocabulary

jsonschema = pytest.importorskip("jsonschema")
CALLING = [name for name, one in FORMATS.items() if one.calls]
NESTED = {
    "type": "object",
    "properties": {"b": {"type": "array", "items": {"type": "string"}}, "a": {"type": "number"}},
    "required": ["a"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "unit": {"enum": ["c", "f"]},
        "kind": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"enum": ["all", 3]},
        "flag": {"type": "boolean"},
        "nest": {"$ref": "#/$defs/nest"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"nest": NESTED},
}
TOOLS = [
    {"name": "get_weather", "parameters": PARAMETERS, "strict": True},
    {"name": "now"},
    {"name": "any", "parameters": {"type": "object"}},
]
SCHEMAS = {"get_weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}, "any": {"type": "object"}}


def known(name, marked):
    """A vocabulary in which the marks of a format are special tokens, or text."""
    return vocabulary.vocabulary([*FORMATS[name].marks, "<extra>"] if marked else ["<extra>"])


def answers(found, words, rng, count, longest=1500):
    """Random answers of a token automaton, those that ended."""
    marks = set(words.special.values())
    likely = np.asarray(
        [i in marks or (text or b"")[:1] in (b'"', b"<", b"}", b"]") for i, text in enumerate(words.tokens)]
    )
    for _ in range(count):
        state, tokens = 1, []
        while len(tokens) < longest:
            allowed = found.allows(state)
            assert allowed.any(), "a row without any token"
            if allowed[vocabulary.END] and (rng.random() < 0.5 or allowed.sum() == 1):
                yield tokens
                break
            allowed[vocabulary.END] = False
            some = np.flatnonzero(allowed & likely) if rng.random() < 0.4 else ()
            tokens.append(int(rng.choice(some if len(some) else np.flatnonzero(allowed))))
            state = int(found.next[state, found.classes[tokens[-1]]])


def text_of(tokens, words, symbols):
    names, data = {i: name for name, i in words.special.items()}, b""
    for token in tokens:
        data += symbols.get(names[token], "").encode() if token in names else words.tokens[token]
    return data.decode(errors="replace")


def symbols_of(name, marked):
    return {mark: chr(0xFDD0 + i) for i, mark in enumerate(FORMATS[name].marks)} if marked else {}


def calls_of(events):
    """Name, arguments and whether it is complete, of each call."""
    found = []
    for event in events:
        if event.kind == "call":
            found.append([event.text, "", False])
        elif event.kind == "arguments":
            found[-1][1] += event.text
        elif event.kind == "done":
            found[-1][2] = True
    return found


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLING)
def test_every_answer_is_read_alike_however_it_arrives_and_its_calls_are_valid(name, marked):
    words, symbols, seen = known(name, marked), symbols_of(name, marked), 0
    states = ("", "may", "opened") if FORMATS[name].closes else ("",)
    for asked, thinking in [(asked, thinking) for asked in ("required", "named", "auto") for thinking in states]:
        tools = TOOLS[:1] if asked == "named" else TOOLS
        constraint, rng = tool_calls(tools, name, choice=asked, thinking=thinking), random.Random(0)
        found = prepared(constraint, words, [vocabulary.END], seconds=60)
        for tokens in answers(found, words, rng, *((4, 500) if marked else (12, 1500))):
            text, place, pieces = text_of(tokens, words, symbols), 0, []
            whole, parts = reading(constraint.form, symbols), reading(constraint.form, symbols)
            events = whole.add(text, last=True)
            while place < len(text):
                size = rng.randint(1, 5)
                pieces += parts.add(text[place : place + size])
                place += size
            pieces += parts.add("", last=True)
            for kind in ("reasoning", "content"):
                assert joined(pieces, kind) == joined(events, kind)
            calls = calls_of(events)
            assert calls_of(pieces) == calls
            assert calls or asked == "auto"
            assert len(calls) == 1 or asked != "named"
            for called, arguments, done in calls:
                assert done
                jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            seen += len(calls)
    assert seen > 2


@pytest.mark.parametrize("name", CALLING)
def test_without_a_choice_no_call_may_begin(name):
    words = known(name, True)
    tools = tool_calls(TOOLS, name, choice="none")
    found = prepared(tools, words, [vocabulary.END])
    assert found.allows(1)[words.special["<extra>"]] or name == "gpt_oss"  # which begins with a channel
    for tokens in answers(found, words, random.Random(1), 20, 200):
        events = reading(tools.form, symbols_of(name, True)).add(
            text_of(tokens, words, symbols_of(name, True)), last=True
        )
        assert not calls_of(events)


def test_any_text_may_stand_before_a_call_but_the_marks():
    words = known("qwen3", True)
    found = prepared(tool_calls(TOOLS, "qwen3"), words, [vocabulary.END])
    free = found.allows(1)
    texts = [i for i, text in enumerate(words.tokens) if text]
    assert free[texts].all()
    assert free[[words.special[name] for name in ("<extra>", "<tool_call>", "</tool_call>", "<think>")]].all()
    inside = found.walk([words.special["<tool_call>"]])[-1]
    assert found.allows(inside).sum() == 1  # the new line


@pytest.mark.parametrize("marked", [True, False])
def test_a_constraint_holds_after_reasoning(marked):
    """Reasoning is free, and ends before the text; what was opened by the prompt is not opened again."""
    words = known("qwen3", marked)
    byte = lambda text: [vocabulary.FIRST + byte for byte in text]
    mark = lambda name: [words.special[name]] if marked else byte(name.encode())
    end = vocabulary.END
    for thinking in ("may", "opened"):
        asked = choice(["yes", "no"])
        asked = Constraint(asked.kind, asked.source, form=Form("qwen3", thinking))
        found = prepared(asked, words, [end])
        thought = [*byte(b"yes or no?\n\n"), *mark("</think>"), *byte(b"\n\nyes")]
        tokens = [*(mark("<think>") if thinking == "may" else []), *thought]
        states = found.walk(tokens)
        assert all(states)
        assert found.allows(states[-1])[end]
        assert sum(bool(found.allows(state)[end]) for state in states) == 1
        if thinking == "may":
            assert found.allows(found.walk(byte(b"no"))[-1])[end]
            assert not found.walk(byte(b"nobody"))[-1]
        assert not found.walk([*tokens[: -len("\n\nyes")], *byte(b"perhaps")])[-1]


def test_a_schema_that_cannot_be_enforced_is_refused_if_it_is_strict():
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    words = known("qwen3", True)
    for name in ("qwen3", "qwen3_coder"):
        with pytest.raises(ConstraintError, match=r"function f: schema at /properties/a/uniqueItems") as error:
            prepared(tool_calls([{"name": "f", "parameters": odd, "strict": True}], name), words, [vocabulary.END])
        assert error.value.code == "unsupported_schema"
        for strict in (None, False):
            tools = [{"name": "f", "parameters": odd, "strict": strict}]
            assert len(prepared(tool_calls(tools, name), words, [vocabulary.END]).next)
    with pytest.raises(ConstraintError, match="no arguments satisfy"):
        prepared(
            tool_calls(
                [{"name": "f", "parameters": {"type": "object", "properties": {"a": False}, "required": ["a"]}}],
                "qwen3",
            ),
            words,
            [vocabulary.END],
        )
    with pytest.raises(ConstraintError, match="must be") as error:
        prepared(
            tool_calls([{"name": "f", "parameters": {"type": "object", "properties": 3}}], "qwen3"),
            words,
            [vocabulary.END],
        )
    assert error.value.code == "invalid_schema"


def test_many_tools_fit_by_their_names_alone():
    """Where all schemas together are too large, those of tools that are not strict are left to the model."""
    one = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(12)}}
    tools = [{"name": f"tool_{i}", "parameters": one | {"title": str(i)}, "strict": None} for i in range(40)]
    words = known("qwen3", True)
    found = prepared(tool_calls(tools, "qwen3", choice="required"), words, [vocabulary.END], states=2**11, seconds=60)
    text = b'\n{"name": "tool_39", "arguments": {"other": [1]}}\n'
    tokens = [vocabulary.FIRST + byte for byte in text]
    call = [words.special["<tool_call>"], *tokens, words.special["</tool_call>"]]
    assert found.allows(found.walk(call)[-1])[vocabulary.END]
    strict = [tool | {"strict": True} for tool in tools]
    with pytest.raises(ConstraintError) as error:
        prepared(tool_calls(strict, "qwen3"), words, [vocabulary.END], states=2**11, seconds=60)
    assert error.value.code == "constraint_too_large"


def test_an_answer_that_is_cut_gives_what_there_is():
    form = tool_calls(TOOLS, "qwen3").form
    events = reading(form).add('Let me see.\n<tool_call>\n{"name": "any", "arguments": {"a": [1, "x}', last=True)
    assert joined(events, "content") == "Let me see."
    assert calls_of(events) == [["any", '{"a": [1, "x}', False]]
    events = reading(form).add("Let me see.\n<tool_c", last=True)
    assert joined(events, "content") == "Let me see.\n<tool_c"
    assert not calls_of(reading(form).add('<tool_call>\n{"name": "an', last=True))


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match=r"format must be one of .*qwen3"):
        tool_calls(TOOLS, "qwen2")
    with pytest.raises(ValueError, match="thinking"):
        tool_calls(TOOLS, "llama3", thinking="may")


def enforced(name, schema, text, *, strict=True):
    """Whether the parameter x of a function may be written as this text, and what is read then."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    parameters["$defs"] = {"U": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}}
    constraint = tool_calls([{"name": "f", "parameters": parameters, "strict": strict}], name, choice="required")
    words, begin, end = known(name, True), *WRITTEN[name]
    tokens = [words.special["<tool_call>"], *_tokens(begin + text + end), words.special["</tool_call>"]]
    found = prepared(constraint, words, [vocabulary.END], seconds=60)
    if not found.walk(tokens)[-1]:
        return None
    symbols = symbols_of(name, True)
    (call,) = calls_of(reading(constraint.form, symbols).add(text_of(tokens, words, symbols), last=True))
    return json.loads(call[1], parse_constant=pytest.fail)["x"]


WRITTEN = {"qwen3_coder": ("\n<function=f>\n<parameter=x>\n", "\n</parameter>\n</function>\n")}


def _tokens(text):
    return [vocabulary.FIRST + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("schema", "text", "read"),
    [
        ({"type": "string"}, "</parameter> 5 <b>", "</parameter> 5 <b>"),
        ({"type": "string"}, "", ""),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "None of them", "None of them"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["a"]', ["a"]),
        ({"type": ["string", "number"]}, "NaN", "NaN"),
        ({"type": ["string", "number"]}, "-1.5e3", -1500.0),
        ({"$ref": "#/$defs/U"}, "abc", "abc"),
        ({"allOf": [{"$ref": "#/$defs/U"}], "default": 1}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"description": "anything"}, "[1", "[1"),
    ],
)
def test_parameters_that_may_be_strings_and_other_values(schema, text, read):
    assert enforced("qwen3_coder", schema, text) == read


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}, "-5"),
        ({"enum": ["3", 4]}, "3"),
        ({"$ref": "#/$defs/U"}, "abcd"),
        ({"allOf": [{"$ref": "#/$defs/U"}], "default": 1}, "abcd"),
        ({"type": "string"}, "a\n</parameter>\nb"),
    ],
)
def test_a_text_is_not_allowed_that_would_be_read_as_what_the_schema_refuses(schema, text):
    assert enforced("qwen3_coder", schema, text) is None


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "qwen3"])
def test_schemas_that_lead_back_to_themselves_or_are_none(name):
    """Reading looks at each part once, whatever the schema; and nothing but a ConstraintError comes of them."""
    again = {"anyOf": [{"$ref": "#/$defs/A"}] * 10}
    odd = [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": again}},
        {"type": "object", "properties": {"x": {"allOf": 5}}},
        {"type": "object", "properties": {"x": {"type": 5}, "y": {"not": {}}}},
        {"type": "object", "properties": {"x": {"$ref": "#/nothing"}}, "required": None},
        {"anyOf": 3},
    ]
    for parameters in odd:
        for strict in (True, None, False):
            asked = tool_calls([{"name": "f", "parameters": parameters, "strict": strict}], name)
            try:
                prepared(asked, known(name, True), [vocabulary.END])
            except ConstraintError:
                assert strict is not False
            text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
            text += FORMATS[name].begins + '\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>'
            reading(asked.form).add(text, last=True)


@pytest.mark.parametrize(
    "root", [{"type": "string"}, {"type": "array"}, {"$ref": "#/$defs/S", "$defs": {"S": {"type": "string"}}}]
)
def test_arguments_are_an_object(root):
    tools = [{"name": "f", "parameters": root, "strict": True}]
    with pytest.raises(ConstraintError, match="no arguments satisfy"):
        prepared(tool_calls(tools, "qwen3"), known("qwen3", True), [vocabulary.END])
    nullable = [{"name": "f", "parameters": {"type": ["object", "null"]}, "strict": True}]
    words = known("qwen3", True)
    found = prepared(tool_calls(nullable, "qwen3"), words, [vocabulary.END])
    begin = [words.special["<tool_call>"], *_tokens('\n{"name": "f", "arguments": ')]
    assert not found.walk([*begin, *_tokens("null")])[-1]
    assert found.walk([*begin, *_tokens("{}")])[-1]


def test_what_of_a_schema_is_enforced_for_a_tool_that_is_not_strict():
    """Keywords that cannot be are left out, each by itself; the others hold."""
    parameters = {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)a"},
            "kind": {"enum": ["a", "b"], "nullable": True},
            "set": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
            "one": {"oneOf": [{"type": "string", "maxLength": 5000}, {"type": "string"}]},
        },
        "required": ["kind"],
    }
    words = known("qwen3", True)
    found = prepared(tool_calls([{"name": "f", "parameters": parameters}], "qwen3"), words, [vocabulary.END])
    begin = [words.special["<tool_call>"], *_tokens('\n{"name": "f", "arguments": {')]
    assert found.walk([*begin, *_tokens('"mail": "x", "kind": "b", "set": [1, 1], "one": "y"}}')])[-1]
    assert not found.walk([*begin, *_tokens('"kind": "c"')])[-1]
    assert not found.walk([*begin, *_tokens('"set": ["x"')])[-1]
    strict = tool_calls([{"name": "f", "parameters": parameters, "strict": True}], "qwen3")
    with pytest.raises(ConstraintError):
        prepared(strict, words, [vocabulary.END])


def test_gpt_oss_without_tools_has_no_calls():
    form = Form("gpt_oss", "may")
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    text += "<|channel|>commentary to=functions.rm json<|message|>{}"
    events = reading(form).add(text, last=True)
    assert (joined(events, "reasoning"), joined(events, "content"), calls_of(events)) == ("hm", "{}", [])
    assert joined(reading(form).add("plain text", last=True), "content") == "plain text"
    two = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    assert joined(reading(form).add(two, last=True), "content") == "Let me look.\n\nDone."


def test_content_keeps_its_beginning():
    form = tool_calls(TOOLS, "qwen3", thinking="may").form
    assert joined(reading(form).add("    code\n", last=True), "content") == "    code\n"
    thought = reading(form).add("\n<think>\nhm\n</think>\n\n  code\n<tool_call>", last=True)
    assert (joined(thought, "reasoning"), joined(thought, "content")) == ("hm", "  code")
