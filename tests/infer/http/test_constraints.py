"""Constraints over HTTP, with OpenAI's client and without."""

import concurrent.futures
import json
import threading
import time

import pydantic
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dflash_jax import Engine, SamplingParams, load_drafter, load_target  # noqa: E402
from dflash_jax.infer.http.worker import Worker  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402
from tests import tiny  # noqa: E402
from tests.fakes import vocabulary  # noqa: E402
from tests.fakes.servers import serving  # noqa: E402

NEGATED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}
RAW = {"vocab_size": vocabulary.SIZE, "eos_token_id": vocabulary.END}


class Event(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    day: int = pydantic.Field(ge=1, le=31)
    guests: list[str] = pydantic.Field(max_length=1)
    kind: str | None = None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Address of a server, and its engine."""
    directory = tmp_path_factory.mktemp("target")
    vocabulary.write_tokenizer(tiny.write_target(directory, tiny.target_config(**RAW)))
    drafting = {"mask_token_id": vocabulary.MASK}
    raw = tiny.drafter_config(vocab_size=vocabulary.SIZE, eos_token_id=None, dflash_config=drafting)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), raw))
    engine = Engine(
        load_target(directory),
        drafter,
        slots=4,
        max_length=256,
        steps_per_visit=4,
        constraints=True,
        constraint_states=2**11,
    )
    defaults = SamplingParams(200, 1.0, eos_token_ids=(vocabulary.END,))
    with serving(Worker(engine), Text(str(directory)), defaults) as address:
        yield address, engine


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="x", max_retries=0) as client:
        yield client


def chat(client, content="a person", **given):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], **given)


def test_parse_returns_an_object(client):
    for seed in range(4):
        try:
            done = client.chat.completions.parse(
                model="tiny", messages=[{"role": "user", "content": "who"}], response_format=Event, seed=seed
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(done.choices[0].message.parsed, Event)
        return
    pytest.fail("none of the answers ended within 200 tokens")


def test_a_stream_is_the_whole_answer(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, "seed": 3}
    whole = chat(client, **asked).choices[0]
    pieces = [piece.choices[0].delta.content or "" for piece in chat(client, **asked, stream=True) if piece.choices]
    assert "".join(pieces) == whole.message.content
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.message.content)["n"], int)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes no"),
        ({"guided_choice": ["left", "right"]}, "left right"),
        ({"structured_outputs": {"regex": "(red|green) [0-9]"}}, None),
        ({"regex": "ab{1,3}"}, "ab abb abbb"),
    ],
)
def test_other_forms(client, given, allowed):
    done = chat(client, extra_body=given, n=3).choices
    assert all(choice.finish_reason == "stop" for choice in done)
    texts = [choice.message.content for choice in done]
    assert all(text in allowed.split() for text in texts) if allowed else all(text[-1].isdigit() for text in texts)


def test_plain_completions_have_them_too(client):
    done = client.completions.create(model="tiny", prompt="x", extra_body={"guided_regex": "[0-9]{4}"})
    assert done.choices[0].text.isdigit()


def test_log_probabilities_and_stop_strings_go_with_them(served, client):
    done = chat(client, extra_body={"guided_regex": "ab{30}c"}, stop=["bbb"]).choices[0]
    assert done.message.content == "a"
    assert done.finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "code", "param", "why"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "unsupported_schema",
            "response_format",
            "/not",
        ),
        ({"guided_regex": "("}, "invalid_regex", "guided_regex", "missing"),
        ({"guided_json": {"type": "string", "minLength": 50000}}, "constraint_too_large", "guided_json", "states"),
        ({"guided_grammar": "root ::= x"}, "unsupported_parameter", None, "guided_grammar"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "conflicting_constraints",
            "guided_choice",
            "cannot be combined",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "invalid_parameter", "guided_regex", "ignore_eos"),
        ({"guided_choice": ["ok"], "ignore_eos": True}, "invalid_parameter", "guided_choice", "ignore_eos"),  # known
        ({"guided_regex_": "a"}, "unsupported_parameter", None, "nearest"),
        ({"structured_outputs": {"choice": []}}, "invalid_parameter", "structured_outputs.choice", "at least one"),
    ],
)
def test_what_cannot_be_enforced_is_that_requests_400(client, given, code, param, why):
    with pytest.raises(openai.BadRequestError, match=why) as error:
        chat(client, extra_body=given)
    assert (error.value.code, error.value.param) == (code, param)
    assert chat(client, extra_body={"guided_choice": ["ok"]}).choices[0].message.content == "ok"


def test_others_do_not_wait_for_one_that_is_prepared(client, served, monkeypatch):
    """While a schema is prepared, requests without one, or with a known one, are answered."""
    constraints, prepare = served[1].constraints, served[1].constraints._prepared
    go_on = threading.Event()
    monkeypatch.setattr(constraints, "_prepared", lambda *given: go_on.wait(60) and prepare(*given))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = [pool.submit(chat, client, extra_body={"guided_regex": f"slow{i}"}) for i in range(6)]
        time.sleep(0.2)
        assert chat(client, max_tokens=4).choices
        assert chat(client, extra_body={"guided_choice": ["ok"]}).choices[0].message.content == "ok"
        assert not any(one.done() for one in slow)
        go_on.set()
        assert [one.result().choices[0].message.content for one in slow] == [f"slow{i}" for i in range(6)]


@pytest.mark.slow
def test_five_hundred_requests_half_of_them_constrained(client):
    """None fails, none is another's, all that end are valid."""

    def one(i):
        if i % 2:
            return chat(client, content=str(i), max_tokens=9).choices[0].message.content is not None
        done = chat(client, content=str(i), extra_body={"guided_regex": f"<{i}>[ab]{{1,{i % 9 + 1}}}"}).choices[0]
        return done.finish_reason == "stop" and done.message.content.startswith(f"<{i}>")

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert all(pool.map(one, range(500)))
