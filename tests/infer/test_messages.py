"""Messages as clients send them, and unknown fields of any request."""

import json
import re

import numpy as np
import pytest

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import RequestError
from dflash_jax.infer.jobs.lines import parse_line
from dflash_jax.infer.messages import template_messages
from dflash_jax.infer.text import Text
from tests import tiny

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(directory)
    return Text(str(directory))


def flat(*messages, template=""):
    return template_messages(list(messages), template)


def test_text_parts_are_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert flat({"role": "user", "content": parts}) == [{"role": "user", "content": "abc"}]


def test_our_own_answers_can_be_sent_back():
    answer = {"role": "assistant", "content": "yes", "refusal": None, "audio": None, "tool_calls": []}
    assert flat(answer) == [{"role": "assistant", "content": "yes"}]


def test_tool_calls_have_objects_as_arguments():
    (message,) = flat({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert message["content"] == ""
    assert message["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]
    answer = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "2"}
    assert flat(answer) == [answer]


def test_a_developer_is_the_system_unless_the_template_knows_one():
    message = {"role": "developer", "content": "be brief"}
    assert flat(message)[0]["role"] == "system"
    assert flat(message, template="{% if m.role == 'developer' %}")[0]["role"] == "developer"


def test_other_fields_are_the_templates_affair():
    extra = {"cache_control": {"type": "ephemeral"}, "prefix": True, "weight": 1.5, "names": ["a"]}
    assert flat({"role": "user", "content": "a", **extra}) == [{"role": "user", "content": "a", **extra}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hello", "message 0 must be an object"),
        ({"content": "a"}, "needs a role"),
        ({"role": 1, "content": "a"}, "needs a role"),
        ({"role": "user"}, "content of message 0 must be a string or a list of text parts, got None"),
        ({"role": "user", "content": {"a": 1}}, "content of message 0"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "images are not supported"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "sound are not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of message 0"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls of message 0 must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "needs a function with a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "must be JSON"),
    ],
    ids=str,
)
def test_what_is_no_message_is_said(message, said):
    with pytest.raises(RequestError, match=said):
        flat(message)


def parsed(text, row):
    return parse_line(json.dumps(row).encode(), 0, text, SamplingParams(16, eos_token_ids=(tiny.EOS,)))


def test_every_shape_of_message_is_read_or_an_error_of_its_line(text):
    """Generated values in every place of a message: whatever comes of a line, nothing is raised."""
    rng = np.random.default_rng(0)
    values = [None, True, -1, 1e308, "", "a", "\ud800", [], {}, [None], {"a": [1]}, [{"type": "text", "text": 5}]]
    names = ["role", "content", "name", "refusal", "tool_calls", "tool_call_id", "type", "function", "x" * 50, ""]
    pick = lambda: values[rng.integers(len(values))]
    outcomes = set()
    for _ in range(2000):
        message = {"role": "user", "content": "hi"}
        message |= {str(rng.choice(names)): pick() for _ in range(rng.integers(0, 4))}
        row = {"messages": [message, pick()] if rng.random() < 0.1 else [message]}
        line = parsed(text, row)
        outcomes.add(line.error.code if line.error else "read")
        json.dumps(str(line.error)).encode()
    assert {"read", "invalid_messages", "invalid_request"} <= outcomes


def test_deep_nesting_is_an_error_of_its_line(text):
    deep = '{"messages": [{"role": "user", "content": "a", "x": ' + "[" * 300 + "]" * 300 + "}]}"
    line = parse_line(deep.encode(), 0, text, SamplingParams(4))
    assert line.error
    assert line.error.code == "invalid_messages"
    deeper = '{"prompt": "a", "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parse_line(deeper.encode(), 0, text, SamplingParams(4)).error


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"temprature": 2.0}, "unknown parameter 'temprature'; the nearest is 'temperature'"),
        ({"system": "be brief"}, "unknown parameter 'system'.*data of your own goes into metadata"),
        ({"response_format": {"type": "structural_tag"}}, "response_format must be of type text"),
        ({"logit_bias": {"5": 1}}, "logit_bias .* is not supported"),
        ({"guided_grammar": "a"}, "guided_grammar is not supported"),
        ({"tools": [{}]}, "must be an object with the name of a function"),
        ({"best_of": 2}, "best_of 2 is not supported"),
        ({"echo": True}, "echo True is not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens False is not supported"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "must not differ"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be a positive integer"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be a list of token ids"),
        ({"min_tokens": 1.5}, "min_tokens must be an integer"),
        ({"reasoning_effort": 3}, "reasoning_effort must be a string"),
    ],
    ids=str,
)
def test_a_field_that_would_be_ignored_is_an_error_of_its_line(text, row, said):
    line = parsed(text, {"id": "a", "prompt": "a", "metadata": {"row": 7}, **row})
    assert line.error is not None
    assert re.search(said, str(line.error))
    assert line.metadata == {"row": 7}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\ud800": 1}'])
def test_metadata_that_cannot_be_written_again_are_an_error_of_their_line(text, value):
    raw = f'{{"prompt": "a", "metadata": {{"x": [{value}]}}}}'.encode()
    line = parse_line(raw, 0, text, SamplingParams(4))
    assert line.error
    assert line.error.code == "invalid_request"
    assert line.metadata is None


def test_neutral_fields_change_nothing(text):
    plain = parsed(text, {"prompt": "a"}).request
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": True,
        "metadata": {"a": 1},
        "user": "me",
        "model": "any",
        "reasoning_effort": "low",
        "response_format": {"type": "text"},
        "best_of": 1,
        "stop": "",
        "mirostat": 0,
        "echo": False,
        "skip_special_tokens": True,
        "top_k": -1,
        "chat_template_kwargs": {},
        "whatever": None,
    }
    for name, value in neutral.items():
        line = parsed(text, {"prompt": "a", name: value})
        assert line.error is None, name
        assert line.request == plain


def test_stop_settings_of_a_line(text):
    params = lambda **row: parsed(text, {"prompt": "a", **row}).request.params
    assert params().ends == (tiny.EOS,)
    assert params(ignore_eos=True).ends == ()
    assert params(ignore_eos=True, stop_token_ids=[5, tiny.EOS]).ends == (5, tiny.EOS)
    assert params(stop_token_ids=[5], min_tokens=3).ends == (tiny.EOS, 5)
    assert params(max_tokens=7).max_new_tokens == params(max_completion_tokens=7).max_new_tokens == 7


def test_reasoning_effort_goes_to_a_template_that_takes_it(text, monkeypatch):
    assert text.reasoning_arguments("low") == {}
    monkeypatch.setattr(text._tokenizer, "chat_template", "{{ reasoning_effort }}")
    assert text.reasoning_arguments("low") == {"reasoning_effort": "low"}
    monkeypatch.setattr(text._tokenizer, "chat_template", "{% if enable_thinking %}x{% endif %}")
    assert text.reasoning_arguments("none") == {"enable_thinking": False}
    assert text.reasoning_arguments("high") == {}
