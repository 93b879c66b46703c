"""What an HTTP request asks for."""

import json
import uuid
from dataclasses import replace
from typing import NamedTuple

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Json
from dflash_jax.infer import openai, responses
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError, invalid
from dflash_jax.infer.fields import flag
from dflash_jax.infer.plain import plain_request, sample_count
from dflash_jax.infer.text import Text

# Fields of a body that a line of a batch has not.
_HTTP_ONLY = "stream", "stream_options", "speculation", "return_meta_info"


class Asked(NamedTuple):
    """A request for completions, read and checked.

    Attributes:
        endpoint, model: `openai.CHAT` or `openai.TEXT`, and the name that the answer repeats.
        samples: one for each answer.
        form: what an answer may be made of besides text; None is nothing.
        streamed: whether the answer is sent while it grows, as server-sent events.
        with_usage: whether a stream ends with the numbers of tokens; `always_usage`: whether each chunk has them.
        with_steps: whether to say which step every token of a stream came from.
        with_meta_info: whether the answer has SGLang's `meta_info`.
        response: of a request for a response, that response as it begins.
    """

    endpoint: str
    model: str
    samples: list[Request]
    form: Form | None
    stop: tuple[str, ...]
    streamed: bool
    with_usage: bool
    always_usage: bool
    with_steps: bool
    with_meta_info: bool
    response: Json | None = None

    @property
    def min_tokens(self) -> int:
        return self.samples[0].params.min_tokens


def read_body(raw: bytes, endpoint: str, text: Text, defaults: SamplingParams, model: str) -> Asked:
    """Reads the body of a request.

    Args:
        defaults: settings that the body does not name.
        model: name of the model where the body names none.

    Raises:
        RequestError: it is no request, or has a field that would be ignored.
    """
    try:
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {type(body).__name__}")
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the body must be a JSON object: {error!s:.200}") from error
    response = None
    if endpoint == responses.PATH:
        response, body, endpoint = (
            responses.response(body, openai.model_name(body, model)),
            responses.chat_body(body),
            openai.CHAT,
        )
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid(f"stream_options must be an object, got {options!r:.60}")
    options = options or {}
    plain = openai.plain_body({name: value for name, value in body.items() if name not in _HTTP_ONLY}, endpoint)
    # Without a seed of its own a request draws from its name, so names never repeat.
    asked = plain_request(plain, uuid.uuid4().hex, text, defaults)
    request = replace(asked.request, speculative=flag(body, "speculation") is not False)
    return Asked(
        endpoint,
        openai.model_name(body, model),
        [replace(request, sample=i) for i in range(sample_count(plain))],
        asked.form,
        asked.stop,
        streamed=flag(body, "stream") or False,
        with_usage=flag(options, "include_usage") or False,
        always_usage=flag(options, "continuous_usage_stats") or False,
        with_steps=flag(options, "include_steps") or False,
        with_meta_info=flag(body, "return_meta_info") or False,
        response=response,
    )
