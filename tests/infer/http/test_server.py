"""The HTTP server, spoken to by the official client over a real socket: what it answers."""

import json
import threading
import urllib.error
import urllib.request

import pytest

openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from dflash_jax import Engine, SamplingParams, load_target  # noqa: E402
from dflash_jax.infer.http.server import make_app  # noqa: E402
from tests import tiny  # noqa: E402
from tests.infer.http.serving import AUTHORISED, MESSAGES, until  # noqa: E402


def test_answers_and_streams_are_the_engines(client, server, text):
    whole = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=20, seed=3, temperature=0.7)
    prompt = text.encode_chat(MESSAGES)
    engine = Engine(load_target(text._directory), None, max_length=256)
    expected = engine.generate([tiny.ask(prompt, 20, seed=3, temperature=0.7)])[0]
    assert whole.choices[0].message.content == text.decode(expected.token_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.total_tokens == len(prompt) + len(expected.token_ids)
    assert sum(whole.model_extra["speculation"]["acceptance_lengths"]) == len(expected.token_ids) - 1
    stream = client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_completion_tokens=20,
        seed=3,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    plain = client.completions.create(model="any", prompt=prompt, max_tokens=20, seed=3, temperature=0.7)
    assert plain.choices[0].text == whole.choices[0].message.content
    parts = client.completions.create(model="any", prompt=prompt, max_tokens=20, seed=3, temperature=0.7, stream=True)
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text


def test_arguments_of_the_chat_template(client, text, monkeypatch):
    """The server's own, and over them the request's."""
    template = text._tokenizer.chat_template
    thoughts = "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    monkeypatch.setattr(text._tokenizer, "chat_template", template + thoughts)

    def size(**body):
        answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1, extra_body=body)
        return answer.usage.prompt_tokens

    plain = size()
    assert size(chat_template_kwargs={"enable_thinking": False}) == plain + len("no thoughts")
    monkeypatch.setattr(text, "template_arguments", {"enable_thinking": False})
    assert size() == plain + len("no thoughts")
    assert size(chat_template_kwargs={"enable_thinking": True}) == plain
    for wrong in ([1], {"tokenize": True}):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            size(chat_template_kwargs=wrong)
    with pytest.raises(openai.BadRequestError, match="has no template"):
        client.completions.create(model="m", prompt="a", extra_body={"chat_template_kwargs": {"a": 1}})


def test_several_answers_to_one_prompt(client):
    ask = lambda n: client.completions.create(model="m", prompt="abc", max_tokens=9, n=n, seed=3, temperature=1.0)
    three, one = ask(3), ask(1)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({choice.text for choice in three.choices}) == 3
    assert three.choices[0].text == one.choices[0].text
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert len(three.model_extra["speculation"]) == 3


def test_several_streams_of_one_prompt(client):
    ask = lambda **more: client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=12, n=3, seed=3, temperature=1.0, **more
    )
    whole, texts, ends = ask(), [""] * 3, [None] * 3
    for chunk in ask(stream=True):
        (choice,) = chunk.choices
        assert ends[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_logprobs(client, server, text):
    given = {"model": "m", "messages": MESSAGES, "max_tokens": 14, "seed": 3, "temperature": 1.0}
    given |= {"logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}}
    whole = client.chat.completions.create(**given).choices[0]
    prompt = text.encode_chat(MESSAGES)
    request = tiny.ask(prompt, 14, 1.0, seed=3, presence_penalty=0.5, repetition_penalty=1.2, logprobs=2)
    (expected,) = Engine(load_target(text._directory), None, max_length=256, logprobs=2).generate([request])
    shown = [i for i, token in enumerate(expected.token_ids) if not text.is_special(token)]
    content = whole.logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([expected.logprobs[i] for i in shown], abs=1e-5)
    assert [entry.token for entry in content] == [text.token(expected.token_ids[i]) for i in shown]
    assert [[other.logprob for other in entry.top_logprobs] for entry in content] == [
        pytest.approx([value for _, value in expected.top_logprobs[i]], abs=1e-5) for i in shown
    ]
    streamed = []
    for chunk in client.chat.completions.create(**given, stream=True):
        streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    plain = client.completions.create(model="m", prompt=prompt, max_tokens=5, logprobs=1).choices[0].logprobs
    assert len(plain.tokens) == len(plain.token_logprobs) == len(plain.top_logprobs) <= 5
    assert all(value <= 0 for value in plain.token_logprobs)
    assert client.completions.create(model="m", prompt=prompt, max_tokens=5).choices[0].logprobs is None


def test_a_stop_string_never_shows_in_a_stream(client):
    whole = client.completions.create(model="m", prompt="hello there", max_tokens=30).choices[0].text
    stop = whole[5:8]
    parts = list(client.completions.create(model="m", prompt="hello there", max_tokens=30, stop=stop, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_what_is_refused(client, server):
    for arguments in (
        {"temperature": -1},
        {"n": 0},
        {"presence_penalty": 3},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": 1},
        {"logit_bias": {"5": 3}},
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": "a" * 300}]},
        {"messages": []},
        {"extra_body": {"colour": 1}},
        {"stop": list("abcde")},
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**({"model": "m", "messages": MESSAGES} | arguments))
        assert error.value.code in ("invalid_parameter", "invalid_request", "unsupported_parameter", "prompt_too_long")
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="m", prompt="a" * 6000)
    assert error.value.status_code == 413
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    for body in (b"{", b"[]", b"\xff", b"[" * 4000):
        call = urllib.request.Request(
            server[0] + "/v1/completions", body, AUTHORISED | {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(call)
        assert refused.value.code == 400
        assert json.loads(refused.value.read())["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("change", [{"stop": "\ud800"}, {"model": "\ud800"}, {"model": "\ud800", "stream": True}])
def test_half_characters_are_refused(server, change):
    assert "lone surrogate" in refusal(server, "/v1/completions", {"prompt": "abc"} | change)


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [("\ud800", "a", "lone surrogate"), ("user", "\ud800", "lone surrogate"), ("\ue000", "a", "no role \ue000")],
)
def test_messages_that_the_template_refuses(server, role, content, message):
    asked = {"messages": [{"role": role, "content": content}]}
    assert message in refusal(server, "/v1/chat/completions", asked)


def refusal(server, path, body):
    """The message of a 400."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server[0] + path, json.dumps(body).encode(), AUTHORISED))
    assert refused.value.code == 400
    return json.loads(refused.value.read())["error"]["message"]


def test_models_health_and_metrics(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert json.loads(urllib.request.urlopen(server[0] + "/health").read()) == {"status": "ok"}
    client.completions.create(model="m", prompt="abc", max_tokens=4)
    call = urllib.request.Request(server[0] + "/metrics", headers=AUTHORISED)
    metrics = urllib.request.urlopen(call).read().decode()
    assert 'dflash_requests_total{finish_reason="length"}' in metrics
    assert "dflash_slots 2.0" in metrics


def test_many_clients_at_once(client):
    alone = [
        client.completions.create(model="m", prompt="a" * (i + 1), max_tokens=12).choices[0].text for i in range(6)
    ]
    together = {}

    def ask(i):
        together[i] = client.completions.create(model="m", prompt="a" * (i + 1), max_tokens=12).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(6)] == alone


def test_an_address_nobody_knows_and_a_wrong_method_get_json(client, server):
    for path, method, status in (("/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(server[0] + path, headers=AUTHORISED, method=method))
        assert refused.value.code == status
        assert json.loads(refused.value.read())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", ["Bearer schlüssel", "bearer schlüssel", "Bearer  schlüssel"])
def test_keys_of_any_letters(server, text, given):
    app = make_app(server[1], text, SamplingParams(4), model="tiny", api_key="schlüssel")
    with TestClient(app) as client:
        ask = lambda value: client.get("/v1/models", headers={"Authorization": value}).status_code
        assert ask(given.encode()) == 200
        assert ask(b"Bearer schlussel") == ask(b"Basic " + "schlüssel".encode()) == ask(b"") == ask(b"\xff") == 401


def events(server, **fields):
    """What a stream sends, of one completion."""
    body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 30, "seed": 3, "temperature": 0.7} | fields)
    request = urllib.request.Request(
        server[0] + "/v1/chat/completions", body.encode(), AUTHORISED | {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]


def test_a_stream_says_which_step_its_tokens_came_from(server):
    """The first token comes from the prompt; without speculation every other one has a step of its own."""
    texts = []
    for speculation in (True, False, {"max_block_size": 8}, {"max_block_size": 4}):
        wide = speculation in (True, {"max_block_size": 8})  # the server has a block size of 8, and 1
        sent = events(server, stream_options={"include_steps": True}, speculation=speculation)
        steps = [step for event in sent for choice in event["choices"] for step in choice["steps"]]
        told = sent[-1]["speculation"]
        counts = [count for count, _ in steps if count]
        assert counts == [1, *told["acceptance_lengths"]]
        assert wide or counts == [1] * 30
        drafts = [choice["draft"] for event in sent for choice in event["choices"] if "draft" in choice]
        nothing = {"block_size": 1, "tree": 0, "budget": 0, "proposed": 0}
        proposing = nothing | {"block_size": 8, "proposed": 7}
        assert drafts
        assert all(draft == (proposing if wide else nothing) for draft in drafts)
        assert told["alone"]
        assert told["tokens_per_second"] == pytest.approx(29 / told["decode_seconds"])
        texts.append("".join(piece for _, piece in steps))
        assert texts[-1] == "".join(event["choices"][0]["delta"].get("content") or "" for event in sent)
    assert len({*texts}) == 1
    assert texts[0]


def test_who_had_company_is_said(server, held):
    answers = []
    ask = lambda: answers.append(events(server, max_tokens=200)[-1]["speculation"]["alone"])
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: server[1]._present == 2)
    held.set()
    for thread in threads:
        thread.join()
    assert answers == [False, False]


def test_what_speculation_may_be(client):
    said = r'speculation must be true, false or \{"max_block_size": N\} with an integer N of 1 or more'
    for wrong in ("no", 4, {}, {"max_block_size": 0}, {"max_block_size": True}, {"max_block_size": 4, "tree": 0}):
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(model="", messages=MESSAGES, extra_body={"speculation": wrong})
    assert client.models.retrieve("tiny").model_extra["dflash"]["block_sizes"] == [1, 8]


def test_the_page_needs_no_key(server):
    with urllib.request.urlopen(server[0] + "/", timeout=300) as response:
        assert b"playground" in response.read()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
