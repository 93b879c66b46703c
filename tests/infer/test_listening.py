"""Addresses, ports and keys of the HTTP server."""

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dflash_jax import serve
from dflash_jax.infer.listening import is_local, listen


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
        (["--http", "127.0.0.1:0", "--api-key", ""], "the key is empty"),
        (["--http", "127.0.0.1:0", "--max-request-bytes", "-5"], "--max-request-bytes must be at least 1"),
    ):
        assert serve.main(arguments) == 2
        assert problem in capsys.readouterr().err


def test_a_port_in_use_is_found_at_once(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--http", f"127.0.0.1:{port}", "--target", "no such place", "--drafter", "none"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
