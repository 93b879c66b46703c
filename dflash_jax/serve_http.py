"""`serve --http`: the options of the server, and from them to the server."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions, check_least, optional
from dflash_jax.engines import engine_for, needs_of, row_length
from dflash_jax.infer.progress import warm_up
from dflash_jax.loading import load

if TYPE_CHECKING:
    from dflash_jax.infer.http.server import Limits

LENGTH = 4096  # tokens of a row where --max-length does not say


@dataclass(frozen=True)
class HttpOptions:
    """With --http.

    Attributes:
        api_key: bearer key that requests must carry (or DFLASH_API_KEY)
        allow_unauthenticated: serve other machines without a key
        max_request_bytes: size of a request body, at most
        max_waiting: requests that wait for a slot, or for the client to take the answer, at most; further ones get
            status 429
        client_timeout: seconds in which a request must have arrived whole, and each part of an answer be taken
        shutdown_timeout: seconds that requests in progress have to finish when the server is asked to end
    """

    api_key: Annotated[str | None, optional(str, "KEY")] = None
    allow_unauthenticated: bool = False
    max_request_bytes: int = 2**20
    max_waiting: int = 1024
    client_timeout: float = 30.0
    shutdown_timeout: float = 60.0

    def check(self, host: str, api_key: str | None) -> "Limits":
        """The limits for clients.

        Raises:
            ValueError: a value out of range, an empty key, or no key where other machines can connect.
        """
        from dflash_jax.infer.http.listening import is_local
        from dflash_jax.infer.http.server import Limits

        check_least(self, max_request_bytes=1, max_waiting=0, client_timeout=1, shutdown_timeout=0)
        if api_key is not None and not api_key.strip():
            raise ValueError("the key is empty (--api-key or DFLASH_API_KEY); give one, or leave it out")
        if api_key is None and not is_local(host) and not self.allow_unauthenticated:
            raise ValueError(
                f"{host} can be reached from other machines, and no key is asked for; give --api-key, or "
                "--allow-unauthenticated if everybody may use the server"
            )
        return Limits(self.max_request_bytes, self.client_timeout)


def serve_http(
    address: str,
    models: ModelOptions,
    generation: GenerationOptions,
    engine_options: EngineOptions,
    options: HttpOptions,
    *,
    speculative: bool,
) -> int:
    """Answers at HOST:PORT until a signal ends it; returns the exit status.

    Raises:
        ValueError: an option is out of range, or a package is missing.
        OSError: the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--http must be HOST:PORT, got {address!r}")
    try:
        from dflash_jax.infer.engine.params import MOST_ALTERNATIVES
        from dflash_jax.infer.http.listening import listen, make_server
        from dflash_jax.infer.http.server import Worker, make_app
        from dflash_jax.mesh import rows_of
    except ImportError as error:
        raise ValueError(f"{error}; the server needs more packages: pip install '.[server]' in the checkout") from error
    api_key = options.api_key if options.api_key is not None else os.environ.get("DFLASH_API_KEY")
    limits = options.check(host.strip("[]"), api_key)
    with listen(host.strip("[]"), int(port)) as listener:
        usual = engine_options.cache_tokens or LENGTH
        length = usual if engine_options.max_length is None else engine_options.max_length
        loaded = load(models, generation, speculative=speculative, max_length=length)
        target = loaded.target
        if engine_options.cache_tokens is not None:  # of each part of the mesh, whose rows share memory
            usual //= rows_of(target.mesh)
        length = row_length(target.config, engine_options.max_length, usual)
        engine_options = replace(engine_options, max_length=length)
        needs = needs_of(target.config, [], engine_options, logprobs=MOST_ALTERNATIVES, growing=True)
        engine = engine_for(loaded, needs, generation, engine_options, plain=not engine_options.deterministic)
        warm_up(engine, first=True)
        worker = Worker(engine, options.max_waiting)
        given = models.target or str(target.directory)
        name = Path(given).resolve().name if Path(given).exists() else given  # a hub id as it is
        app = make_app(worker, loaded.text, loaded.defaults, model=name, root=given, api_key=api_key, limits=limits)
        if engine.constraints is not None:
            engine.constraints.prepare_beside()
        worker.start()
        here = f"http://{host}:{listener.getsockname()[1]}"
        print(f"answering at {here}/v1; a page to try it: {here}/", file=sys.stderr)
        try:
            make_server(app, limits.client_seconds, options.shutdown_timeout).run(sockets=[listener])
        finally:
            worker.stop()
            if engine.constraints is not None:
                engine.constraints.close()
    return 0
