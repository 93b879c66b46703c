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
        for tokens in answers(found, words, rng, 4, 500):
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
