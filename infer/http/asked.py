"""What an HTTP request asks for."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Json, Value
from dflash_jax.infer import openai, responses
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError, invalid
from dflash_jax.infer.fields import flag
from dflash_jax.infer.plain import plain_request, sample_count
from dflash_jax.infer.text import Text

# Fields of a body that a line of a batch has not.
_HTTP_ONLY = "stream", "stream_options", "speculation", "return_meta_info"
MOST_ANSWERS = 1024  # to all prompts of a request


class Asked(NamedTuple):
    """A request for completions, read and checked.

    Attributes:
        endpoint, model: `openai.CHAT` or `openai.TEXT`, and the name that the answer repeats.
        samples: one for each answer: those to the first prompt, to the second one, and so on.
        of_each: answers to each prompt.
        form: what an answer may be made of besides text; None is nothing.
        streamed: whether the answer is sent while it grows, as server-sent events.
        with_usage: whether a stream ends with the numbers of tokens; `always_usage`: whether each chunk has them.
        with_steps: whether to say which step every token of a stream came from.
        with_meta_info: whether the answer has SGLang's `meta_info`.
        echo: whether answers begin with their prompt, whose tokens then have log-probabilities, too, if those of the
            answer have.
        generates: whether there is more to an answer than its prompt.
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
    of_each: int = 1
    echo: bool = False
    generates: bool = True
    response: Json | None = None

    @property
    def prompts(self) -> list[Request]:
        """The first request of each prompt."""
        return self.samples[:: self.of_each]

    @property
    def min_tokens(self) -> int:
        return self.samples[0].params.min_tokens


def read_object(raw: bytes) -> Json:
    """The JSON object that a body is; raises RequestError if it is none."""
    try:
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {type(body).__name__}")
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the body must be a JSON object: {error!s:.200}") from error
    return body


def read_body(raw: bytes, endpoint: str, text: Text, defaults: SamplingParams, model: str) -> Asked:
    """Reads the body of a request.

    Args:
        defaults: settings that the body does not name.
        model: name of the model where the body names none.

    Raises:
        RequestError: it is no request, or has a field that would be ignored.
    """
    body = read_object(raw)
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
    body, echo = (body, False) if endpoint == openai.CHAT else _without_echo(body)
    generates = not (echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0)
    body = body if generates else body | {"max_tokens": None}
    fields, requests, count = {name: value for name, value in body.items() if name not in _HTTP_ONLY}, [], 1
    most = _most(body.get("speculation"))
    for prompt in _prompts(body, endpoint):
        plain = openai.plain_body(fields if prompt is None else {**fields, "prompt": prompt}, endpoint)
        # Without a seed of its own a request draws from its name, so names never repeat.
        asked, count = plain_request(plain, uuid.uuid4().hex, text, defaults), sample_count(plain)
        requests.append(asked)
        if len(requests) * count > MOST_ANSWERS:
            raise invalid(
                f"a request may ask for {MOST_ANSWERS} answers; send several with fewer prompts, or a lower n"
            )
    asked = requests[0]
    if echo and flag(body, "stream"):
        raise invalid("echo is not streamed; leave out stream or echo", "echo")
    return Asked(
        endpoint,
        openai.model_name(body, model),
        [replace(one.request, max_block_size=most, sample=i) for one in requests for i in range(count)],
        asked.form,
        asked.stop,
        of_each=count,
        echo=echo,
        generates=generates,
        streamed=flag(body, "stream") or False,
        with_usage=flag(options, "include_usage") or False,
        always_usage=flag(options, "continuous_usage_stats") or False,
        with_steps=flag(options, "include_steps") or False,
        with_meta_info=flag(body, "return_meta_info") or False,
        response=response,
    )


def _most(speculation: Value) -> int | None:
    """The largest block size that a request takes, by its field `speculation`."""
    if speculation is None or isinstance(speculation, bool):
        return 1 if speculation is False else None
    if isinstance(speculation, dict) and speculation.keys() == {"max_block_size"}:
        size = speculation["max_block_size"]
        if type(size) is int and size >= 1:
            return size
    raise invalid(
        f'speculation must be true, false or {{"max_block_size": N}} with an integer N of 1 or more, got '
        f"{speculation!r:.80}",
        "speculation",
    )


def _without_echo(body: Json) -> tuple[Json, bool]:
    """A body without its field `echo`, and whether that is true."""
    return {name: value for name, value in body.items() if name != "echo"}, flag(body, "echo") or False


def _prompts(body: Json, endpoint: str) -> Sequence[Value]:
    """The prompts of a list of several; else None, for the one that the body has."""
    prompt = body.get("prompt")
    if endpoint == openai.TEXT and isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int:
        return prompt
    return [None]
