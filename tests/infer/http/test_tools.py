"""Tools over HTTP, with OpenAI's client: whole answers and streams say the same, and every finished call is valid."""

import concurrent.futures
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
jsonschema = pytest.importorskip("jsonschema")

from dflash_jax import Engine, SamplingParams, load_drafter, load_target  # noqa: E402
from dflash_jax.constraints.tools.formats import FORMATS  # noqa: E402
from dflash_jax.infer.http.worker import Worker  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402
from tests import tiny  # noqa: E402
from tests.fakes import vocabulary  # noqa: E402
from tests.fakes.servers import serving  # noqa: E402
from tests.fakes.templates import TEMPLATES  # noqa: E402

PARAMETERS = {
    "type": "object",
    "properties": {"kind": {"enum": ["rain", "sun"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["kind", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
NEGATED = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
SCHEMAS = {"weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}}
ASKED = [{"role": "user", "content": "How will it be?"}]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def served(request, tmp_path_factory):
    """Format, address and engine of a server."""
    name, directory = request.param, tmp_path_factory.mktemp("target")
    marks = [*FORMATS[name].marks, TEMPLATES[name].end]
    size = vocabulary.size(marks)
    raw = {"vocab_size": size, "eos_token_id": vocabulary.END}
    vocabulary.write_tokenizer(tiny.write_target(directory, tiny.target_config(**raw)), marks, TEMPLATES[name].text)
    drafting = {"mask_token_id": vocabulary.MASK}
    raw = tiny.drafter_config(vocab_size=size, eos_token_id=None, dflash_config=drafting)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), raw))
    made = {"slots": 4, "max_length": 1024, "steps_per_visit": 4, "constraints": True, "plain": True}
    engine = Engine(load_target(directory), drafter, constraint_states=2**11, **made)
    defaults = SamplingParams(300, 1.0, eos_token_ids=(vocabulary.END,))
    with serving(Worker(engine), Text(str(directory)), defaults) as address:
        yield name, address, engine


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served[1] + "/v1", api_key="x", max_retries=0, timeout=300) as client:
        yield client


def chat(client, **given):
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    given = {"messages": ASKED, "tools": [WEATHER, NOW], "extra_body": thinking} | given
    return client.chat.completions.create(model="tiny", **given)


def gathered(chunks):
    """The message that the chunks of a stream add up to, and its finish reason; asserts their form."""
    content, calls, reason, reasoning = "", {}, None, ""
    for chunk in chunks:
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.index == len(calls)
                assert call.id
                assert call.type == "function"
                assert call.function.arguments == ""
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.id is None
                assert call.function.name is None
                calls[call.index][1] += call.function.arguments
        assert reason is None
        reason = choice.finish_reason
    return content or None, reasoning or None, list(calls.values()), reason


def said(choice):
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", None)
    return choice.message.content, reasoning, calls, choice.finish_reason


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"max_tokens": 40},
        {"tool_choice": "required", "max_tokens": 40},
        {"tool_choice": "none", "max_tokens": 40},
    ],
)
def test_streams_are_whole_answers_and_calls_are_valid(client, given):
    named = isinstance(given.get("tool_choice"), dict)
    for seed in range(2):
        whole = said(chat(client, **given, seed=seed).choices[0])
        assert gathered(chat(client, **given, seed=seed, stream=True)) == whole
        content, _, calls, reason = whole
        if given.get("tool_choice") == "none":
            assert not calls
            assert reason in ("stop", "length")
        elif reason == "tool_calls" or (named and reason == "stop"):
            assert calls
            assert named == (reason == "stop")
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            assert len(calls) == 1 or not named
            assert len(calls) == 1 or given.get("parallel_tool_calls") is not False
        else:
            assert reason == "length" or not calls
        if given.get("tool_choice", "auto") != "auto":
            assert content is None or given["tool_choice"] == "none"


def test_speculation_changes_no_token_of_a_call(client):
    for seed in range(3):
        given = {"tool_choice": "required", "seed": seed}
        with_it = said(chat(client, **given).choices[0])
        body = {"speculation": False, "chat_template_kwargs": {"enable_thinking": False}}
        assert said(chat(client, **given, extra_body=body).choices[0]) == with_it


def test_the_clients_stream(client):
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for seed in range(8):  # gpt-oss may think until its tokens are used up
        with client.chat.completions.stream(
            model="tiny", messages=ASKED, seed=seed, extra_body=body, **asked
        ) as stream:
            assert "chunk" in [event.type for event in stream]
            try:
                final = stream.get_final_completion().choices[0]
            except openai.LengthFinishReasonError:
                continue
        (call,) = final.message.tool_calls
        assert call.function.name == "weather"
        assert set(call.function.parsed_arguments) == {"kind", "days"}
        return
    pytest.fail("none of the answers ended")


def test_a_loop_with_a_tool(client, served):
    """Call, result, and the next answer; the ids lead from one to the other."""
    done = chat(client, tool_choice={"type": "function", "function": {"name": "now"}}, seed=2).choices[0].message
    (call,) = done.tool_calls
    assert json.loads(call.function.arguments) == {}
    messages = [
        *ASKED,
        done.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    after = chat(client, messages=messages, tool_choice="none", max_tokens=8)
    assert after.usage.prompt_tokens > chat(client, tool_choice="none", max_tokens=8).usage.prompt_tokens


def test_reasoning_stands_apart(client, served):
    """It goes on until its mark, which a random model seldom writes; what is cut has no text."""
    name = served[0]
    done = chat(client, tools=openai.NOT_GIVEN, extra_body={"guided_regex": "[ab]+"}, max_tokens=60, seed=3, n=3)
    for choice in done.choices:
        content, reasoning, calls, reason = said(choice)
        assert reason == "length" or set(content) <= set("ab")
        assert content is None or set(content) <= set("ab")
        assert not calls
        assert name != "gpt_oss" or reasoning or content or reason == "length"


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"tools": [NEGATED]}, "unsupported_schema", "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_parameter", "tools[0].function.name"),
        ({"response_format": {"type": "json_object"}}, "conflicting_constraints", "response_format"),
        ({"extra_body": {"ignore_eos": True}}, "invalid_parameter", "tools"),
        ({"tool_choice": "sometimes"}, "invalid_parameter", "tool_choice"),
    ],
)
def test_bad_tools_are_that_requests_400(client, given, code, param):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **given)
    assert (error.value.code, error.value.param) == (code, param)


@pytest.mark.slow
def test_half_of_two_hundred_requests_have_tools(client):
    """None fails, and none gets another's calls."""

    def one(i):
        if i % 2:
            return chat(client, tools=openai.NOT_GIVEN, max_tokens=9).choices[0].message.tool_calls is None
        tool = {"type": "function", "function": {"name": f"f{i}"}}
        done = chat(client, tools=[tool], tool_choice={"type": "function", "function": {"name": f"f{i}"}}, seed=i)
        return [call.function.name for call in done.choices[0].message.tool_calls or []] == [f"f{i}"]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(200)))
