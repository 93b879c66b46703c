"""A server in a thread of the test's process."""

import contextlib
import threading
import time
from collections.abc import Iterator

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.http.listening import listen, make_server
from dflash_jax.infer.http.server import make_app
from dflash_jax.infer.http.worker import Worker
from dflash_jax.infer.text import Text


@contextlib.contextmanager
def serving(worker: Worker, text: Text, defaults: SamplingParams) -> Iterator[str]:
    """Address of a server of this worker, which prepares constraints in a process of its own."""
    constraints = worker.engine.constraints
    if constraints is not None:
        constraints.prepare_beside()
    worker.start()
    app = make_app(worker, text, defaults, model="tiny", api_key=None)
    listener = listen("127.0.0.1", 0)
    server = make_server(app, 30.0, shutdown_seconds=60)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        worker.stop()
        if constraints is not None:
            constraints.close()
