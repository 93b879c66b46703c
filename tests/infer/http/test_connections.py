"""The HTTP server and its clients: those that leave, that wait, and that are slow to write or to read."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.request

import pytest

openai = pytest.importorskip("openai")

from dflash_jax import SamplingParams  # noqa: E402
from dflash_jax.infer.http.server import make_app  # noqa: E402
from tests.infer.http.serving import HASTY, KEY, serving, until  # noqa: E402


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
