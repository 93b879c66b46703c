"""The page on which a server is tried in a browser: its files, and what it needs to know of the engine."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dflash_jax import drafters
from dflash_jax.files import Json

FILES = {
    "playground.html": "text/html",
    "playground.css": "text/css",
    "playground.js": "text/javascript",
    "playground_markdown.js": "text/javascript",
    "playground_panel.js": "text/javascript",
    "playground_recording.js": "text/javascript",
}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def routes() -> list[Route]:
    """Where the files are, none of which needs a key."""
    folder = resources.files("dflash_jax.infer.http")
    return [_route(name, folder.joinpath(name).read_text("utf-8"), kind) for name, kind in FILES.items()]


def _route(name: str, text: str, kind: str) -> Route:
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def send(request: Request) -> Response:
        return Response(text, media_type=kind, headers=headers)

    return Route("/" if kind == "text/html" else f"/{name}", send)


def about(drafter: object, block_size: int | str) -> Json:
    """What may be proposed: the kind of the drafter, and its block size or "auto", if the server chooses one."""
    kinds: dict[type, str] = {kind.drafter: name for name, kind in drafters.KINDS.items()}
    name = None if drafter is None else kinds.get(type(drafter), type(drafter).__name__)
    return {"drafter": name, "block_size": block_size}
