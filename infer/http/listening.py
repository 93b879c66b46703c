"""The socket of the HTTP server, and the time that a client has to send the head of a request and to take an answer."""

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_jax.infer.interrupt import stop_signals

ABSOLUTE = re.compile(r"https?://[^/]*", re.IGNORECASE)  # before the path, as proxies send it (RFC 9112, 3.2.2)


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, so that an address in use is known before anything is compiled.

    Raises:
        OSError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.set_inheritable(True)
    return listener


def make_server(app: Any, client_seconds: float, shutdown_seconds: float) -> uvicorn.Server:
    """A server to `run(sockets=[...])`.

    Args:
        client_seconds: in which the head of a request must arrive, and each part of an answer be taken.
        shutdown_seconds: that requests in progress have to finish in the end.
    """

    class Protocol(H11Protocol):
        """A connection that is closed unless the head of a request arrives in time, and what was sent is taken in time.
        What the client has not taken by then is dropped."""

        def connection_made(self, transport: Any) -> None:  # asyncio's, or uvloop's, which is none by its type
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # writing pauses until the client has taken everything
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._late.cancel()

        def on_response_complete(self) -> None:
            self._late.cancel()
            super().on_response_complete()
            self._expect_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._untaken = self.loop.call_later(client_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._untaken.cancel()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            if self.flow.write_paused:
                self._untaken.cancel()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            self._late = self.loop.call_later(client_seconds, self._hang_up)

        def _hang_up(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()  # `close` would wait until everything is taken

    async def by_path(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (host := ABSOLUTE.match(scope["path"])):
            scope = scope | {"path": scope["path"][host.end() :] or "/"}
        await app(scope, receive, send)

    patience = max(1, round(shutdown_seconds))
    # The log is ours (see `entrance`); what goes wrong in uvicorn itself reaches the root's handlers.
    config = uvicorn.Config(
        by_path, http=Protocol, log_config=None, access_log=False, timeout_graceful_shutdown=patience
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def running(server: uvicorn.Server, listener: socket.socket) -> Iterator[threading.Thread]:
    """Runs a server in a thread, so that it answers while this one loads and compiles; ends it at last. What
    interrupts this thread ends it at once."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield thread
    except KeyboardInterrupt:
        server.force_exit = True
        raise
    finally:
        server.should_exit = True
        thread.join()


def until_signal(server: uvicorn.Server, thread: threading.Thread) -> None:
    """Waits for SIGINT or SIGTERM, then for the requests in progress; a second one is raised as KeyboardInterrupt."""
    with stop_signals() as caught:
        while thread.is_alive() and not caught:
            thread.join(0.2)
        server.should_exit = True
        while thread.is_alive():
            thread.join(0.2)
