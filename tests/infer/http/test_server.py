"""The HTTP server, spoken to by the official client over a real socket."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient  # noqa: E402

from dflash_jax import Engine, SamplingParams, load_drafter, load_target  # noqa: E402
from dflash_jax.infer.http.listening import listen, make_server  # noqa: E402
from dflash_jax.infer.http.server import Limits, Worker, make_app  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402
from tests import tiny  # noqa: E402

KEY = "secret"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
LIMITS = Limits(request_bytes=5000, client_seconds=300)  # however busy the machine is
HASTY = Limits(request_bytes=5000, client_seconds=1)  # for clients that are to be hung up on


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    tiny.write_target(directory, tiny.target_config())
    tiny.write_tokenizer(directory)
    return Text(str(directory))


@pytest.fixture(scope="module")
def server(text, tmp_path_factory):
    """Address of a server with two slots, and its worker."""
    target = load_target(text._directory)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), tiny.drafter_config()))
    engine = Engine(target, drafter, slots=2, max_length=256, steps_per_visit=2, logprobs=20, plain=True)
    engine.warm_up()
    worker = Worker(engine, most_waiting=8)
    worker.start()
    with serving(worker, text) as (address, _):
        yield f"http://{address}", worker
    worker.stop()


@pytest.fixture(scope="module")
def hasty(server, text):
    """Address of a server that waits only a second for its clients."""
    with serving(server[1], text, HASTY) as (address, _):
        yield f"http://{address}"


@pytest.fixture
def held(server, monkeypatch):
    """The engine makes no step before this is set."""
    go_on, step = threading.Event(), server[1].engine.step
    monkeypatch.setattr(server[1].engine, "step", lambda **options: go_on.wait(300) and step(**options))
    yield go_on
    go_on.set()


@contextlib.contextmanager
def serving(worker, text, limits=LIMITS):
    """Address of a server, and what ends it."""
    app = make_app(worker, text, SamplingParams(16), model="tiny", api_key=KEY, limits=limits)
    with running(app, limits) as served:
        yield served


@contextlib.contextmanager
def running(app, limits=LIMITS):
    """Address of an application's server, and what ends it."""
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that the kernel takes little of an answer
    served = make_server(app, limits.client_seconds, shutdown_seconds=300)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    address = "{}:{}".format(*listener.getsockname())
    thread.start()
    while not served.started:
        time.sleep(0.01)

    def end():
        served.should_exit = True
        thread.join(200)
        assert not thread.is_alive()

    yield address, end
    end()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def until(true):
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


MESSAGES = [{"role": "user", "content": "hello there"}]


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


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(client, server, streamed, monkeypatch):
    engine = server[1].engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda **options: time.sleep(0.2) or step(**options))
    if streamed:
        stream = client.completions.create(model="m", prompt="abc", max_tokens=200, stream=True)
        next(iter(stream))
        assert engine.busy == 1
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).completions.create(model="m", prompt="abc", max_tokens=200)
    until(lambda: engine.busy == 0)
    assert client.completions.create(model="m", prompt="abc", max_tokens=4).usage.completion_tokens == 4


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


def test_a_full_queue_is_answered_with_429(client, server, held):
    streams = [client.completions.create(model="m", prompt="abc", max_tokens=200, stream=True) for _ in range(10)]
    with pytest.raises(openai.RateLimitError) as error:  # two slots, eight that wait
        client.completions.create(model="m", prompt="abc")
    assert error.value.response.headers["retry-after"] == "5"
    assert error.value.code == "overloaded"
    held.set()
    for stream in streams:
        stream.close()
    until(lambda: server[1]._present == 0)
    assert client.completions.create(model="m", prompt="abc", max_tokens=4).usage.completion_tokens == 4


def test_prompts_that_wait_to_be_read_count(client, server, text, monkeypatch):
    encode, go_on = text.encode, threading.Event()
    monkeypatch.setattr(text, "encode", lambda prompt: go_on.wait(300) and encode(prompt))
    ask = lambda: client.completions.create(model="m", prompt="abc", max_tokens=1)
    waiting = [threading.Thread(target=ask) for _ in range(10)]  # two slots, eight that wait
    for thread in waiting:
        thread.start()
    until(lambda: server[1]._present == 10)
    with pytest.raises(openai.RateLimitError):
        ask()
    go_on.set()
    for thread in waiting:
        thread.join()
    until(lambda: server[1]._present == 0)


def test_a_slow_client_is_hung_up_on(hasty):
    """One that never ends its head, and one that never ends its body."""
    address = hasty.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Length: 100\r\n\r\n{"
    for sent, answer in ((b"", b""), (head, b""), (head + key, b"HTTP/1.1 408")):
        with socket.create_connection((address[0], int(address[1])), timeout=300) as connection:
            connection.sendall(sent)
            assert connection.recv(12) == answer


def test_long_prompts_hold_up_nobody(client, server, text, monkeypatch):
    """While one is turned into tokens, the server answers others, short prompts too."""
    encode, others_were_answered = text.encode, threading.Event()

    def slow(prompt):
        assert len(prompt) < 100 or others_were_answered.wait(300)
        return encode(prompt)

    monkeypatch.setattr(text, "encode", slow)
    asked = threading.Thread(target=lambda: client.completions.create(model="m", prompt="a" * 100, max_tokens=1))
    asked.start()
    assert urllib.request.urlopen(server[0] + "/health", timeout=300).status == 200
    assert client.completions.create(model="m", prompt="abc", max_tokens=4).usage.completion_tokens == 4
    assert asked.is_alive()
    others_were_answered.set()
    asked.join()


@pytest.mark.parametrize("streamed", [True, False])
def test_large_answers_are_written_beside_the_event_loop(server, streamed, monkeypatch):
    """And choice by choice: while Python encodes a value, no other of its threads runs."""
    dumps, written = json.dumps, []

    def watched(*given, **how):
        written.append((threading.current_thread().name, len(made := dumps(*given, **how))))
        return made

    monkeypatch.setattr(json, "dumps", watched)
    with ask_and_read_nothing(server[0], LARGE | {"stream": streamed}, after="close") as connection:
        whole = len(all_that_comes(connection))
    large = [size for thread, size in written if thread.startswith("detokenize") and size > 1000]
    assert sum(large) > 0.9 * whole
    assert max(large) < whole / 3


PATH = "/v1/completions"
STREAMING = {
    "type": "http",
    "method": "POST",
    "path": PATH,
    "raw_path": PATH.encode(),
    "headers": [],
    "query_string": b"",
}


def test_a_client_that_leaves_before_the_first_event_gives_its_place_back(server, text):
    app = make_app(server[1], text, SamplingParams(4), model="tiny", api_key=None)
    body = json.dumps({"prompt": "abc", "stream": True}).encode()
    asked, gone = {"type": "http.request", "body": body}, {"type": "http.disconnect"}

    async def connect():
        messages = iter([asked, gone, gone])

        async def receive():
            return next(messages)

        async def send(message):
            raise OSError("the client has left")

        with pytest.raises(OSError, match="has left"):
            await app(STREAMING, receive, send)

    until(lambda: server[1]._present == 0)
    asyncio.run(connect())
    assert server[1]._present == 0


LARGE = {"prompt": "abc", "max_tokens": 100, "n": 4, "logprobs": 20, "temperature": 1.0}


def ask_and_read_nothing(address, body, after="keep-alive"):
    """A connection that has asked for an answer, of which the kernel takes little."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.settimeout(300)
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: {after}\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def all_that_comes(connection):
    """Bytes until the server has hung up."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(2**16):
            found += more
    return found


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_does_not_read_is_hung_up_on(hasty, server, streamed, monkeypatch):
    """Its place counts as taken until then, though its answer is complete."""
    worker = server[1]
    step = worker.engine.step
    monkeypatch.setattr(worker.engine, "step", lambda **options: time.sleep(0.02) or step(**options))
    with ask_and_read_nothing(hasty, LARGE | {"stream": streamed}) as connection:
        until(lambda: worker._present == 4)
        seen = set()
        until(lambda: seen.add((worker._present, worker.engine.busy)) or worker._present == 0)
        found = all_that_comes(connection)
    assert (4, 2) in seen
    assert streamed or (4, 0) in seen
    assert 0 < len(found) < 40_000  # the whole answer has some 200,000 bytes


def test_a_client_that_reads_slowly_gets_all(server):
    with ask_and_read_nothing(server[0], LARGE) as connection:
        head, found = b"", b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        size = int(re.search(rb"content-length: (\d+)", head)[1])
        while len(found) < size:
            found += connection.recv(2**14)
            time.sleep(0.01)
    assert size > 100_000
    assert len(json.loads(found)["choices"]) == 4


def test_clients_that_do_not_read_hold_up_no_end(server, text):
    worker = server[1]
    with (
        serving(worker, text, HASTY) as (address, end),
        ask_and_read_nothing(address, LARGE) as connection,
        ask_and_read_nothing(address, {"prompt": "abc", "n": 0}),  # takes a short refusal, and stays
    ):
        until(lambda: worker._present == 4)
        begin = time.monotonic()
        end()
        assert time.monotonic() - begin < 150  # of the 300 that others would get
        assert len(all_that_comes(connection)) < 40_000
    assert worker._present == 0


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
    for speculation in (True, False):
        sent = events(server, stream_options={"include_steps": True}, speculation=speculation)
        steps = [step for event in sent for choice in event["choices"] for step in choice["steps"]]
        told = sent[-1]["speculation"]
        counts = [count for count, _ in steps if count]
        assert counts == [1, *told["acceptance_lengths"]]
        assert speculation or counts == [1] * 30
        drafts = [choice["draft"] for event in sent for choice in event["choices"] if "draft" in choice]
        nothing = {"block_size": 1, "tree": 0, "budget": 0, "proposed": 0}
        proposing = nothing | {"block_size": 8, "proposed": 7}
        assert drafts
        assert all(draft == (proposing if speculation else nothing) for draft in drafts)
        assert told["alone"]
        assert told["tokens_per_second"] == pytest.approx(29 / told["decode_seconds"])
        texts.append("".join(piece for _, piece in steps))
        assert texts[-1] == "".join(event["choices"][0]["delta"].get("content") or "" for event in sent)
    assert texts[0] == texts[1] != ""


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


def test_speculation_is_true_or_false(client):
    with pytest.raises(openai.BadRequestError, match="speculation must be true or false"):
        client.chat.completions.create(model="", messages=MESSAGES, extra_body={"speculation": "no"})


def test_the_page_needs_no_key(server):
    with urllib.request.urlopen(server[0] + "/", timeout=300) as response:
        assert b"playground" in response.read()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
