"""A server for the tests here, over a real socket. Skipped without the packages that it needs."""

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dflash_jax import SamplingParams
from dflash_jax.infer.http.listening import listen, make_server
from dflash_jax.infer.http.server import Limits, make_app

KEY = "secret"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}
LIMITS = Limits(request_bytes=5000, client_seconds=300)  # however busy the machine is
HASTY = Limits(request_bytes=5000, client_seconds=1)  # for clients that are to be hung up on
MESSAGES = [{"role": "user", "content": "hello there"}]


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


def until(true):
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
