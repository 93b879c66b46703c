"""What every request goes through first, and what a server says while it starts."""

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from dflash_jax import SamplingParams, serve, serve_http
from dflash_jax.cli import log_to_stderr
from dflash_jax.infer.http import listening
from dflash_jax.infer.http.entrance import Entrance, entered
from dflash_jax.infer.http.server import Worker, make_app
from dflash_jax.infer.text import Text
from dflash_jax.version import __version__
from tests import tiny


class Idle:
    """An engine that nobody asks anything."""

    slots, max_length, busy, waiting, left = 1, 64, 0, 0, 0
    target = SimpleNamespace(dtype=np.dtype("float32"), params={})
    config, constraints = SimpleNamespace(plain=False), None
    drafter, drafts, block_size = None, SimpleNamespace(auto=False, block_sizes=(1,)), 1

    def check_settings(self, request):
        pass


def client_of(text=None, *, origins=(), access_log=True, **given):
    app = make_app(Worker(Idle()), text or Text(""), SamplingParams(4), **{"model": "tiny", "api_key": None} | given)
    return TestClient(entered(app, origins=origins, access_log=access_log))


def test_a_server_that_starts_says_how_far_it_is():
    entrance = Entrance()
    client = TestClient(entered(entrance))
    assert client.get("/live").status_code == 200
    assert client.get("/health").json() == {"status": "starting", "compiled": 0, "of": None}
    entrance.programs = 13
    entrance.count(4)
    for path in ("/health", "/ready"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json() == {"status": "starting", "compiled": 4, "of": 13}
    for answer in (client.post("/v1/chat/completions", json={}), client.get("/v1/models"), client.get("/metrics")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == "starting"
        assert "has compiled 4 of 13 programs" in answer.json()["error"]["message"]
    entrance.app = make_app(Worker(Idle()), Text(""), SamplingParams(4), model="tiny", api_key=None)
    for path in ("/live", "/health", "/ready", "/v1/models"):
        assert client.get(path).status_code == 200


def test_a_server_answers_while_it_loads_and_compiles(tmp_path, monkeypatch, capsys):
    """From the command line to the end; completions are answered as soon as it says that it is ready."""
    target = tiny.write_target(tmp_path / "target", tiny.target_config())
    tiny.write_tokenizer(target)
    loading, ended, load = threading.Event(), threading.Event(), serve_http.load

    def slow(*given, **how):
        assert loading.wait(300)
        return load(*given, **how)

    def until_ended(server, thread):
        assert ended.wait(300)
        server.should_exit = True
        thread.join(60)

    monkeypatch.setattr(serve_http, "load", slow)
    monkeypatch.setattr(listening, "until_signal", until_ended)
    with listening.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    given = ["--port", str(port), "--target", str(target), "--no-speculation", "--max-length", "64"]
    status = []
    served = threading.Thread(target=lambda: status.append(serve.main(given)))
    served.start()

    def ask(path, **body):
        data = json.dumps(body).encode() if body else None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())
        except urllib.error.URLError:
            return 0, None

    while (found := ask("/health"))[0] == 0:
        time.sleep(0.05)
    assert found == (503, {"status": "starting", "compiled": 0, "of": None})
    assert ask("/live")[0] == 200
    assert ask("/v1/completions", prompt="abc")[0] == 503
    loading.set()
    seen = []
    while (found := ask("/health"))[0] == 503:
        seen.append(found[1])
        time.sleep(0.01)
    assert found == (200, {"status": "ok"})
    assert max(one["of"] or 0 for one in seen) > 1
    assert ask("/v1/completions", prompt="abc", max_tokens=4)[1]["usage"]["completion_tokens"] == 4
    ended.set()
    served.join(60)
    assert status == [0]
    assert "says when it is ready" in capsys.readouterr().err


def test_what_is_wrong_with_the_models_ends_a_server_that_listens(tmp_path, capsys):
    assert serve.main(["--http", "0", "--target", str(tmp_path), "--no-speculation"]) == 2
    assert "must hold config.json" in capsys.readouterr().err


def test_every_answer_carries_the_name_of_its_request():
    with client_of() as client:
        ask = lambda **headers: client.get("/version", headers=headers)
        assert ask().json() == {"version": __version__}
        assert ask(**{"x-request-id": "my-1"}).headers["x-request-id"] == "my-1"
        made = {
            ask(**given).headers["x-request-id"] for given in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 200})
        }
        assert len(made) == 3
        assert all(len(name) == 32 for name in made)
        refused = client.post("/v1/completions", json={"n": 0}, headers={"x-request-id": "my-2"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "my-2")


@pytest.mark.parametrize("access_log", [True, False])
def test_the_log_says_why_a_request_was_refused(caplog, access_log):
    caplog.set_level(logging.INFO, "dflash_jax")
    with client_of(access_log=access_log, api_key="k") as client:
        client.get("/version", headers={"x-request-id": "one"})
        client.get("/health")
        client.get("/v1/models", headers={"x-request-id": "two"})
        client.headers["authorization"] = "Bearer k"
        client.post("/v1/completions", json={"prompt": [1], "colour\n": 1}, headers={"x-request-id": "three"})
        client.get("/nothing%0a", headers={"x-request-id": "four"})
    lines = [record.getMessage() for record in caplog.records if record.name == "dflash_jax"]
    if access_log:
        assert "GET '/version' 200 in " in lines[0]
        assert lines.pop(0).endswith("request one")
    assert len(lines) == 3
    assert "401" in lines[0]
    assert "request two: invalid_api_key: the request needs" in lines[0]
    assert "400" in lines[1]
    assert "request three: unsupported_parameter: unknown parameter 'colour" in lines[1]
    assert "'/nothing%0a' 404" in lines[2]
    assert not any("\n" in line for line in lines)


def test_a_line_is_written_once_and_a_watched_start_is_no_news(capsys):
    log_to_stderr()
    client = TestClient(entered(Entrance()))
    client.get("/health")
    client.post("/v1/completions", json={})
    lines = [line for line in capsys.readouterr().err.splitlines() if "request " in line]
    assert len(lines) == 1
    assert "'/v1/completions' 503" in lines[0]


def test_other_origins_may_ask_where_they_are_allowed():
    """The browser asks first, without the key."""
    here, there = "https://chat.example.com", "https://other.example.com"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    def preflight(client, origin):
        return client.options("/v1/chat/completions", headers={"Origin": origin} | asked)

    with client_of(origins=[here], api_key="k") as client:
        allowed = preflight(client, here)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == here
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert preflight(client, there).status_code == 400
        refused = client.get("/v1/models", headers={"Origin": here})  # which the page can read, too
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, here)
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
    with client_of(origins=["*"]) as client:
        assert preflight(client, there).headers["access-control-allow-origin"] == "*"
    with client_of() as client:
        assert "access-control-allow-origin" not in client.get("/version", headers={"Origin": here}).headers


def test_several_keys():
    with client_of(api_key=("one", "two")) as client:
        ask = lambda key: client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
        assert (ask("one"), ask("two"), ask("one,two"), ask("")) == (200, 200, 401, 401)


def test_keys_of_the_options_or_of_the_environment(monkeypatch):
    monkeypatch.setenv("DFLASH_API_KEY", "one, two")
    options = lambda *given: serve.parse_options(["--port", "1", *given]).server
    assert options().keys == ("one", "two")
    assert options("--api-key", "a", "--api-key", "b").keys == ("a", "b")
    monkeypatch.setenv("DFLASH_API_KEY", "one,")
    with pytest.raises(ValueError, match="the API key is empty"):
        options().check("127.0.0.1")


def test_names_of_the_model():
    began = time.time() - 1
    with client_of(model="owner/name", aliases=["short", "owner/name"]) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["owner/name", "short"]
        assert all(began <= one["created"] <= time.time() for one in listed)
        for one in listed:
            assert client.get(f"/v1/models/{one['id']}").json() == one
        unknown = client.get("/v1/models/other/name")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == "the model here is owner/name or short, got 'other/name'"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("--http 8001", ("127.0.0.1", 8001)),
        ("--http :8001", ("127.0.0.1", 8001)),
        ("--http 0.0.0.0:8001", ("0.0.0.0", 8001)),
        ("--http [::1]:8001", ("::1", 8001)),
        ("--port 8001", ("127.0.0.1", 8001)),
        ("--host 0.0.0.0", ("0.0.0.0", 8000)),
        ("--host ::1 --port 8001", ("::1", 8001)),
    ],
)
def test_forms_of_an_address(given, address):
    assert serve_http.address_of(serve.parse_options(given.split()).http) == address


@pytest.mark.parametrize("wrong", ["host", "host:", "host:a", "1:70000", ""])
def test_what_is_no_address(wrong, capsys):
    assert serve.main(["--http", wrong]) == 2
    assert "--http must be HOST:PORT or PORT, like 127.0.0.1:8000" in capsys.readouterr().err
