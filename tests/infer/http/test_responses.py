"""OpenAI's Responses, with OpenAI's client: whole, streamed, with tools, and as a loop."""

import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
jsonschema = pytest.importorskip("jsonschema")

from dflash_jax.infer.engine.requests import RequestError  # noqa: E402
from dflash_jax.infer.responses import chat_body  # noqa: E402
from tests.infer.http.test_tools import ASKED, PARAMETERS, SCHEMAS, served  # noqa: E402, F401

WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
NEGATED = {"type": "json_schema", "name": "w", "schema": {"not": {}}}
NOW = {"type": "function", "name": "now", "description": "The time."}


@pytest.fixture(scope="module")
def client(served):  # noqa: F811
    with openai.OpenAI(base_url=served[1] + "/v1", api_key="x", max_retries=0, timeout=300) as client:
        yield client


def ask(client, **given):
    body = {"chat_template_kwargs": {"enable_thinking": False}} | given.pop("body", {})
    return client.responses.create(**{"model": "tiny", "input": "How will it be?", "extra_body": body} | given)


def items(response):
    """What a response says, without ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.name, item.arguments))
        else:
            found.append((item.type, item.status, "".join(part.text for part in item.content)))
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"max_output_tokens": 30},
        {"tools": [WEATHER, NOW], "tool_choice": "required"},
        {"tools": [WEATHER, NOW], "tool_choice": {"type": "function", "name": "now"}},
        {"tools": [WEATHER, NOW], "max_output_tokens": 30, "instructions": "Be short."},
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": PARAMETERS}}},
    ],
)
def test_streams_are_whole_responses(client, given):
    whole = ask(client, **given, body={"seed": 5})
    names, numbers, deltas, last = [], [], {}, None
    for event in ask(client, **given, body={"seed": 5}, stream=True):
        names.append(event.type)
        numbers.append(event.sequence_number)
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        last = event
    assert names[:2] == ["response.created", "response.in_progress"]
    assert numbers == list(range(len(numbers)))
    assert names[-1] == f"response.{whole.status}"
    assert items(last.response) == items(whole)
    assert [deltas.get(i, "") for i in range(len(whole.output))] == [item[-1] for item in items(whole)]
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == len(whole.output)
    assert last.response.usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert not whole.store
    assert (whole.incomplete_details is not None) == (whole.status == "incomplete")
    if whole.status == "completed" and "tools" in given and "tool_choice" in given:
        for kind, status, name, arguments in items(whole):
            assert (kind, status) == ("function_call", "completed")
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if whole.status == "completed" and "text" in given:
        jsonschema.validate(json.loads(whole.output_text), PARAMETERS)


def test_the_clients_stream(client):
    asked = {"tools": [NOW], "tool_choice": {"type": "function", "name": "now"}}
    body = {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.0}
    with client.responses.stream(model="tiny", input="x", **asked, extra_body=body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds[0] == "response.created"
    assert "response.function_call_arguments.delta" in kinds or final is None  # gpt-oss may go on thinking
    if final is not None:
        assert final.output[-1].parsed_arguments is not None or final.output[-1].arguments == "{}"


def test_a_loop_sends_all_that_was_said(client):
    """The items of a response, and what the function returned, are the next input."""
    asked = [{"role": "user", "content": "How late is it?"}]
    first = ask(client, input=asked, tools=[NOW], tool_choice={"type": "function", "name": "now"}, body={"seed": 2})
    (call,) = [item for item in first.output if item.type == "function_call"]
    given = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    after = ask(client, input=[*asked, *given, result], tools=[NOW], max_output_tokens=8)
    assert after.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"tools": [{"type": "web_search"}]}, "invalid_parameter", "tools[0]"),
        ({"input": []}, "invalid_parameter", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_parameter", "input[0]"),
        ({"body": {"inputs": 3}}, "unsupported_parameter", "inputs"),
        ({"text": {"format": NEGATED}}, "unsupported_schema", "response_format"),
    ],
)  # fmt: skip
def test_what_needs_state_is_refused(client, given, code, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **given)
    assert (error.value.code, error.value.param) == (code, param)


def test_items_become_messages():
    call = lambda i: {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
    result = lambda i: {"type": "function_call_output", "call_id": f"c{i}", "output": str(i)}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    given = [*ASKED, reasoning, said, call(0), call(1), result(0), result(1), reasoning, said, said]
    messages = chat_body({"input": given, "instructions": "Be short.", "reasoning": {"effort": "low"}})["messages"]
    assert [message["role"] for message in messages] == "system user assistant tool tool assistant assistant".split()
    first = messages[2]
    assert (first["reasoning_content"], first["content"]) == ("hm", said["content"])
    assert [one["id"] for one in first["tool_calls"]] == ["c0", "c1"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c0", "content": "0"}
    body = chat_body({"input": "x", "max_output_tokens": 3, "store": True, "include": ["reasoning.encrypted_content"]})
    assert body == {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "model": None}
    with pytest.raises(RequestError, match="n must be 1"):
        chat_body({"input": "x", "n": 2})
