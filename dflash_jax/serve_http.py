"""`serve --http`: the options of the server, and from them to the server."""

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import UseAppendAction, arg

from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions, check_least, optional
from dflash_jax.engines import LARGEST_CHUNK, check_options, engine_for, needs_of, row_length
from dflash_jax.infer.progress import counted, warm_up
from dflash_jax.loading import Loaded, load

if TYPE_CHECKING:
    from dflash_jax.infer.engine.engine import Engine
    from dflash_jax.infer.http.server import Limits

LENGTH = 4096  # tokens of a row where --max-length does not say
SHARED_LENGTH = 512  # tokens of a request, as a guess, where rows share memory
HOST, PORT = "127.0.0.1", 8000  # where an address leaves them out
Names = Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]", help_behavior_hint="(default: that of the target)")]
Origins = Annotated[tuple[str, ...], arg(metavar="ORIGIN [ORIGIN ...]", help_behavior_hint="(default: none)")]
Keys = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY", help_behavior_hint="")]


@dataclass(frozen=True)
class HttpOptions:
    """With --http.

    Attributes:
        host: address to listen on; 0.0.0.0 accepts connections from other machines
        port: port to listen on; the same as --http HOST:PORT
        api_key: API key that requests must send as a bearer token; repeat the option for further keys. The environment
            variable DFLASH_API_KEY sets them, too, separated by commas
        allow_unauthenticated: accept requests from other machines without an API key
        served_model_name: model names to list at /v1/models, the first of which stands in answers
        allowed_origins: origins of web pages that may use the server from a browser (CORS), such as
            https://chat.example.com, or * for all
        log_level: lowest level that is logged; debug includes requests to /health and /metrics
        no_access_log: do not log requests that were answered; refused ones are logged all the same
        max_request_bytes: maximum size of a request body
        max_waiting: maximum number of requests that are queued, or whose client has yet to read the answer; further
            ones get status 429
        client_timeout: timeout in seconds for receiving a request, and for the client to read each part of an answer
        shutdown_timeout: seconds that running requests have to finish when the server is told to stop
    """

    host: Annotated[str | None, optional(str, "HOST", HOST)] = None
    port: Annotated[int | None, optional(int, "PORT", str(PORT))] = None
    api_key: Keys = ()
    allow_unauthenticated: bool = False
    served_model_name: Names = ()
    allowed_origins: Origins = ()
    log_level: Annotated[Literal["debug", "info", "warning", "error"], arg(metavar="LEVEL")] = "info"
    no_access_log: bool = False
    max_request_bytes: int = 2**20
    max_waiting: int = 1024
    client_timeout: float = 30.0
    shutdown_timeout: float = 60.0

    @property
    def address(self) -> str | None:
        """Of the host and the port; None if neither is given."""
        if self.host is None and self.port is None:
            return None
        host, port = self.host or HOST, PORT if self.port is None else self.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the options, or of the environment."""
        found = os.environ.get("DFLASH_API_KEY")
        return self.api_key or (() if found is None else tuple(key.strip() for key in found.split(",")))

    def check(self, host: str) -> "Limits":
        """The limits for clients.

        Raises:
            ValueError: a value out of range, an empty key, or no key where other machines can connect.
        """
        from dflash_jax.infer.http.listening import is_local
        from dflash_jax.infer.http.server import Limits

        check_least(self, max_request_bytes=1, max_waiting=0, client_timeout=1, shutdown_timeout=0)
        if not all(key.strip() for key in self.keys):
            raise ValueError("the API key is empty (--api-key or DFLASH_API_KEY); set one, or leave it out")
        if not self.keys and not is_local(host) and not self.allow_unauthenticated:
            raise ValueError(
                f"{host} can be reached from other machines, and no key is asked for; give --api-key, or "
                "--allow-unauthenticated if everybody may use the server"
            )
        return Limits(self.max_request_bytes, self.client_timeout)


def address_of(text: str) -> tuple[str, int]:
    """Host and port of an address: HOST:PORT, or a port alone, which is of this machine.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--http must be HOST:PORT or PORT, like {HOST}:{PORT}; got {text!r:.80}")
    return host.strip("[]") or HOST, int(port)


def serve_http(
    address: str,
    models: ModelOptions,
    generation: GenerationOptions,
    engine_options: EngineOptions,
    options: HttpOptions,
    *,
    speculative: bool,
) -> int:
    """Answers at HOST:PORT until a signal ends it; returns the exit status. While it loads and compiles it answers that
    it is starting.

    Raises:
        ValueError: an option is out of range, or a package is missing.
        OSError: the address cannot be used.
    """
    host, port = address_of(address)
    try:
        from dflash_jax.infer.engine.params import MOST_ALTERNATIVES
        from dflash_jax.infer.http.entrance import Entrance, entered
        from dflash_jax.infer.http.listening import listen, make_server, running, until_signal
        from dflash_jax.infer.http.server import Worker, make_app
    except ImportError as error:
        raise ValueError(f"{error}; the server needs more packages: pip install '.[server]' in the checkout") from error
    limits = options.check(host)
    _set_log(options.log_level)
    entrance = Entrance()
    app = entered(entrance, origins=options.allowed_origins, access_log=not options.no_access_log)
    server = make_server(app, limits.client_seconds, options.shutdown_timeout)
    with listen(host, port) as listener, running(server, listener) as thread:
        shown = f"[{host}]" if ":" in host else host
        here = f"http://{shown}:{listener.getsockname()[1]}"
        print(f"starting; {here}/health says when it is ready", file=sys.stderr)
        longest = engine_options.max_length or engine_options.cache_tokens
        loaded = load(models, generation, speculative=speculative, max_length=longest)
        target = loaded.target
        generation, engine_options = _with_memory(loaded, generation, engine_options)
        needs = needs_of(target.config, [], engine_options, logprobs=MOST_ALTERNATIVES, growing=True)
        engine = engine_for(loaded, needs, generation, engine_options, plain=not engine_options.deterministic)
        entrance.programs = engine.programs(first=True)
        warm_up(engine, first=True, background=True, progress=entrance.count)
        worker = Worker(engine, options.max_waiting)
        given = models.target or str(target.directory)
        name = Path(given).resolve().name if Path(given).exists() else given  # a hub id as it is
        model, *aliases = options.served_model_name or (name,)
        app = make_app(
            worker,
            loaded.text,
            loaded.defaults,
            model=model,
            aliases=aliases,
            root=given,
            api_key=options.keys,
            limits=limits,
        )
        if engine.constraints is not None:
            engine.constraints.prepare_beside()
        worker.start()
        entrance.app = app
        print(_room(engine), file=sys.stderr)
        print(f"answering at {here}/v1; a page to try it: {here}/", file=sys.stderr)
        try:
            until_signal(server, thread)
        finally:
            worker.stop()
            if engine.constraints is not None:
                engine.constraints.close()
    return 0


def _room(engine: "Engine") -> str:
    """How many requests and tokens an engine has memory for."""
    rows, pages = counted(engine.slots, "concurrent request"), engine.batch.pages
    if pages is None:
        return f"{rows} of {engine.max_length:,} tokens"
    return f"{rows} of up to {engine.max_length:,} tokens; memory for {pages.tokens:,} tokens in all"


def _with_memory(
    loaded: Loaded, generation: GenerationOptions, options: EngineOptions
) -> tuple[GenerationOptions, EngineOptions]:
    """With a number of rows, how long one may be and, unless rows have memory of their own, what they have together."""
    from dflash_jax.infer.engine.memory import tokens_for_a_server
    from dflash_jax.mesh import rows_of

    check_options(generation, options)
    config, parts = loaded.target.config, rows_of(loaded.target.mesh)
    usual = LENGTH if options.cache_tokens is None else options.cache_tokens // parts
    most = row_length(config, options.max_length, usual)
    alone = replace(options, max_length=most)
    if options.cache_tokens is None and not options.deterministic:
        length = min(most, LENGTH)
        of_length = _with_rows(loaded, generation, replace(options, max_length=length))
        slots = -(-of_length.rows // parts) * parts
        kept = slots * length // LARGEST_CHUNK if options.prefix_chunks is None else options.prefix_chunks
        sizes = slots, length, options.max_length
        how = {"chunk": LARGEST_CHUNK, "kept": kept, "draft_window": options.draft_window}
        if found := tokens_for_a_server(loaded.target, loaded.drafter, *sizes, **how):
            tokens, longest = found
            return of_length, replace(options, cache_tokens=tokens, max_length=longest, prefix_chunks=kept)
    return _with_rows(loaded, generation, alone), alone


def _with_rows(loaded: Loaded, generation: GenerationOptions, options: EngineOptions) -> GenerationOptions:
    """With as many rows as suit a server, unless they are given. What decides the bits of answers is no memory."""
    if generation.batch_size is not None:
        return generation
    from dflash_jax.infer.engine.memory import ROWS_ON_CPU, rows_that_fit

    if options.deterministic:
        return replace(generation, batch_size=ROWS_ON_CPU)
    length, together = options.max_length or LENGTH, options.cache_tokens
    if together is not None:  # a row takes what it needs, which is less than it may
        length = min(length, SHARED_LENGTH)
    rows = rows_that_fit(loaded.target, loaded.drafter, length, LARGEST_CHUNK)
    return replace(generation, batch_size=rows if together is None else max(1, min(rows, together // length)))


def _set_log(level: str) -> None:
    """The log of a server has times, which that of a command needs not."""
    log = logging.getLogger("dflash_jax")
    log.setLevel(level.upper())
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
