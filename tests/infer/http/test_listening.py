"""Addresses, ports and keys of the HTTP server, and how its paths may be written."""

import socket
import threading

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dflash_jax import serve
from dflash_jax.infer.http.listening import is_local, listen, make_server


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_addresses(host, local):
    assert is_local(host) is local


def test_a_key_is_needed_where_others_can_connect(capsys, monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    for arguments, problem in (
        (["--http", "0.0.0.0:0"], "--allow-unauthenticated"),
        (["--http", "127.0.0.1:0", "--api-key", ""], "the API key is empty"),
        (["--http", "127.0.0.1:0", "--max-request-bytes", "-5"], "--max-request-bytes must be at least 1"),
    ):
        assert serve.main(arguments) == 2
        assert problem in capsys.readouterr().err


def test_a_port_in_use_is_found_at_once(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--http", f"127.0.0.1:{port}", "--target", "no such place", "--drafter", "none"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_path_may_stand_behind_a_scheme_and_a_host():
    """As in requests that went through a proxy."""
    paths = []

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    listener = listen("127.0.0.1", 0)
    server = make_server(app, client_seconds=10, shutdown_seconds=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    for target in (
        "/health",
        "http://host/health",
        "HTTPS://host:80/v1/models?a=http://b/c",
        "http://host",
        "/http://host/a",
    ):
        with socket.create_connection(listener.getsockname(), timeout=10) as connection:
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: host\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 204"
    server.should_exit = True
    thread.join(20)
    assert paths == ["/health", "/health", "/v1/models", "/", "/http://host/a"]
