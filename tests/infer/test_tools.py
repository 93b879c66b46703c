"""Tools in requests, and messages with calls, results and reasoning: through templates, into prompts and back."""

import json

import numpy as np
import pytest

from dflash_jax.constraints.constraint import prepared
from dflash_jax.constraints.tools.form import Form, Tool
from dflash_jax.constraints.tools.formats import FORMATS, format_of
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import RequestError
from dflash_jax.infer.parts import AnswerParts, Deltas, message
from dflash_jax.infer.plain import plain_request
from dflash_jax.infer.text import Text
from tests.fakes import vocabulary
from tests.fakes.templates import TEMPLATES

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object", "properties": {"list": {"type": "array"}, "unit": {"type": "string"}}},
    },
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = {"city": 'Ulm "x"\n<b>', "days": 3, "more": {"list": [1, None, True, "é"], "unit": "c"}}
ASKED = [{"role": "user", "content": "How will it be?"}]


def conversation(form):
    """A question, an answer with calls, as rich as the format allows, and what the first call returned."""
    calls = [(0, ARGUMENTS), (1, {"city": "Bonn"})][: 1 if form.single else 2]
    answer = {
        "role": "assistant",
        "content": None if form.single else "Let me look.",
        "tool_calls": [
            {
                "id": f"functions.get_weather:{i}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, arguments in calls
        ],
    }
    if form.closes and form.name != "kimi_k2":
        answer["reasoning_content"] = "I should look."
    result = {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": [{"type": "text", "text": "sunny"}]}
    return [*ASKED, answer, result]


def check_round_trip(directory, name, template, end, *, content=True, **arguments):
    """What the template makes of an answer with calls is what the grammar allows and the reader takes apart.

    Args:
        content: whether the template has room for text beside reasoning and calls.
    """
    form = FORMATS[name]
    assert format_of(template) is form
    text = Text(str(vocabulary.write_tokenizer(directory, [*form.marks, end], template)))
    given = conversation(form)
    if not content:
        given[1]["content"] = None
    if "reasoning_content" in given[1] and name != "gpt_oss" and form.closes not in template:
        del given[1]["reasoning_content"]  # a template of a model that does not think
    whole, begin = (text.render(messages, [TOOL], **arguments) for messages in (given, given[:1]))
    assert whole.startswith(begin)
    assert "sunny" in whole
    written = whole[len(begin) :].split(end)[0]
    thinking = form.thinking(begin, template)
    asked = {"messages": ASKED, "tools": [TOOL], "chat_template_kwargs": arguments}
    plain = plain_request(asked, "x", text, SamplingParams(eos_token_ids=(vocabulary.END,)))
    assert plain.form == Form(name, thinking, (Tool("get_weather", json.dumps(PARAMETERS)),), "auto", not form.single)
    assert plain.request.prompt_token_ids == text.encode_rendered(begin)
    tokens = text.encode_rendered(written)
    words = vocabulary.vocabulary([*form.marks, end])
    found = prepared(plain.request.params.constraint, words, [vocabulary.END])
    assert found.allows(found.walk(tokens)[-1])[vocabulary.END]
    for size in (1, 3, len(tokens)):
        parts, deltas, events, calls = AnswerParts(text, plain.form, "x"), Deltas(), [], {}
        for at in range(0, len(tokens), size):
            events += parts.add(tokens[at : at + size])
        events += parts.add([], last=True)
        answer = message(events)
        assert parts.finish_reason("stop") == "tool_calls"
        assert parts.finish_reason("length") == "length"
        expected = [call["function"] for call in given[1]["tool_calls"]]
        functions = [call["function"] for call in answer["tool_calls"]]
        assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
            (one["name"], json.loads(one["arguments"])) for one in expected
        ]
        assert answer["content"] == given[1]["content"]
        assert answer.get("reasoning_content") == given[1].get("reasoning_content")
        ids = [call["id"] for call in answer["tool_calls"]]
        assert len(set(ids)) == len(ids)
        assert name != "kimi_k2" or ids == [call["id"] for call in given[1]["tool_calls"]]
        for event in events:  # deltas, an event each, are the message
            for call in deltas.of([event]).get("tool_calls", []):
                kept = calls.setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                kept["arguments"] += call["function"]["arguments"]
        assert [call["arguments"] for call in calls.values()] == [one["arguments"] for one in functions]
        assert [call["id"] for call in calls.values()] == ids
    # The answer as it is sent to a client is what the template writes again.
    result = given[2] | {"tool_call_id": answer["tool_calls"][0]["id"]}
    assert text.render([*ASKED, answer, result], [TOOL], **arguments) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_results_go_through_the_template_and_back(name, tmp_path):
    check_round_trip(tmp_path, name, TEMPLATES[name].text, TEMPLATES[name].end)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3")
    marks = [*FORMATS["qwen3"].marks, "<|im_end|>"]
    return Text(str(vocabulary.write_tokenizer(directory, marks, TEMPLATES["qwen3"].text)))


def read(text, **row):
    return plain_request({"messages": ASKED} | row, "x", text, SamplingParams(eos_token_ids=(vocabulary.END,)))


@pytest.mark.parametrize(
    ("given", "choice", "names"),
    [
        ({}, "auto", ["get_weather", "now"]),
        ({"tool_choice": "none"}, "none", ["get_weather", "now"]),
        ({"tool_choice": "required"}, "required", ["get_weather", "now"]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "named", ["now"]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
                }
            },
            "required",
            ["now"],
        ),
    ],
)
def test_choices(text, given, choice, names):
    plain = read(text, tools=[TOOL, NOW], **given)
    assert (plain.form.choice, [tool.name for tool in plain.form.tools]) == (choice, names)
    assert plain.request.params.constraint.form == plain.form
    assert plain.form.parallel
    assert not read(text, tools=[TOOL], parallel_tool_calls=False).form.parallel
    prompt = text.decode(plain.request.prompt_token_ids)
    assert "get_weather" in prompt  # whatever the choice
    assert "now" in prompt


def test_without_tools_nothing_is_constrained(text):
    for row in ({}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}):
        plain = read(text, **row)
        assert plain.request.params.constraint is None
        assert plain.form == Form("qwen3", "may")
    assert read(text, chat_template_kwargs={"enable_thinking": False}).form is None
    assert read(text, reasoning_effort="none").form is None
    assert not read(text, include_reasoning=False).form.reasoning
    constrained = read(text, guided_choice=["a"]).request.params.constraint
    assert constrained.form == Form("qwen3", "may")
    without = read(text, guided_choice=["a"], chat_template_kwargs={"enable_thinking": False})
    assert without.request.params.constraint.form is None


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"tools": {}}, "invalid_parameter", "tools"),
        ({"tools": [3]}, "invalid_parameter", "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "invalid_parameter", "tools[0]"),
        ({"tools": [TOOL, {"type": "function"}]}, "invalid_parameter", "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_parameter", "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
            "invalid_parameter",
            "tools[0].function.strict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "invalid_schema",
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL, TOOL]}, "invalid_parameter", "tools"),
        ({"tools": [NOW] * 300}, "invalid_parameter", "tools"),
        ({"tool_choice": "required"}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "invalid_parameter", "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "invalid_parameter", "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "conflicting_constraints", "response_format"),
        ({"tools": [TOOL], "messages": None, "prompt": "x"}, "invalid_parameter", "tools"),
        ({"tools": [TOOL], "messages": None, "turns": ["x"]}, "invalid_parameter", "tools"),
        ({"functions": [{"name": "a"}]}, "unsupported_parameter", "functions"),
        ({"chat_template_kwargs": {"tools": [TOOL]}}, "invalid_parameter", None),
    ],
)  # fmt: skip
def test_bad_ones_name_the_field(text, given, code, param):
    with pytest.raises(RequestError) as error:
        read(text, **given)
    assert (error.value.code, error.value.param) == (code, param)


def test_a_template_without_tools_is_named(tmp_path):
    text = Text(str(vocabulary.write_tokenizer(tmp_path)))
    with pytest.raises(RequestError, match="prints no tools") as error:
        read(text, tools=[TOOL])
    assert (error.value.code, error.value.param) == ("no_tool_template", "tools")
    template = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    text = Text(str(vocabulary.write_tokenizer(tmp_path, [], template)))
    with pytest.raises(RequestError, match=r"--tool-format \(.*llama3") as error:
        read(text, tools=[TOOL])
    assert error.value.code == "no_tool_format"
    assert read(text, tools=[TOOL], tool_choice="none").form is None
    assert read(Text(str(tmp_path), tool_format="llama3"), tools=[TOOL]).form.format == "llama3"
    with pytest.raises(ValueError, match=r"--tool-format must be one of .*qwen3"):
        Text(str(tmp_path), tool_format="qwen")


def test_text_that_only_looks_like_a_mark_is_text(text):
    """The model may write about tags; and characters that stand for marks are no marks in what it wrote."""
    form = read(text, tools=[TOOL]).form
    said = 'Write <tool_call> and \ufdd2{"name": "get_weather"} <think>'
    tokens = [vocabulary.FIRST + byte for byte in said.encode()]
    events = AnswerParts(text, form, "x").add(tokens, last=True)
    assert message(events)["content"] == said.replace("\ufdd2", "\ufffd")
    assert "tool_calls" not in message(events)
    closed = AnswerParts(text, form, "x").add(text.encode_rendered("a</tool_call>b<|im_end|>"), last=True)
    assert message(closed)["content"] == "a</tool_call>b"


def test_a_stop_string_cuts_the_text_before_a_call(text):
    form = read(text, tools=[TOOL]).form
    tokens = [vocabulary.FIRST + byte for byte in b"one. two."]
    parts = AnswerParts(text, form, "x", [". t"])
    events = [event for token in tokens[:6] for event in parts.add([token])] + parts.add([], last=True)
    assert message(events)["content"] == "one"
    assert parts.finish_reason("stop") == "stop"


def test_ids_of_calls_are_those_of_the_answer(text):
    form = read(text, tools=[TOOL]).form
    tokens = text.encode_rendered('<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>')
    ids = [message(AnswerParts(text, form, name).add(tokens, last=True))["tool_calls"][0]["id"] for name in "aab"]
    assert ids[0] == ids[1] != ids[2]
    assert np.all([len(one) == len("call_") + 24 for one in ids])
