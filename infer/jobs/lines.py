"""Lines of a job's input, each a request or the reason why it is none."""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dflash_jax.files import said
from dflash_jax.infer import openai
from dflash_jax.infer.engine.params import MOST_ALTERNATIVES, SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError
from dflash_jax.infer.fields import LINE, check_fields, token_budget
from dflash_jax.infer.jobs.inputs import input_lines as input_lines
from dflash_jax.infer.jobs.inputs import zstd as zstd
from dflash_jax.infer.text import Text, template_arguments, valid_text

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "turns")
MOST_SAMPLES = 128  # answers to one prompt
MOST_STOPS = 4  # stop strings of a request
LONGEST_STOP = 1024  # bytes of a stop string
SETTINGS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "logprobs": (int,),
    "seed": (int,),
    "min_tokens": (int,),
}


@dataclass(frozen=True)
class Line:
    """One input line: a request, or the reason why it is none.

    Attributes:
        index: line number in the input, blank lines not counted, from 0.
        id: the line's own id, else its index.
        request: what to generate.
        stop: stop strings of the request.
        error: instead of a request.
        named: whether the id is the line's own.
        messages: of a conversation whose `later` user turns follow one answer after the other.
        later: see `messages`.
        template_arguments: of the chat template, the line's own.
        n: answers to give to the prompt.
        metadata: of the line, which its record repeats; None without.
        batch: of an OpenAI batch line, which is answered in that form.
        is_batch: whether it was meant as one, even if it is none.
        digest: of the line as it was read.
    """

    index: int
    id: Any
    request: Request | None = None
    stop: tuple[str, ...] = ()
    error: RequestError | None = None
    named: bool = False
    messages: tuple[dict[str, str], ...] = ()
    later: tuple[str, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    metadata: Any = None
    batch: openai.BatchLine | None = None
    is_batch: bool = False
    digest: bytes = b""


def _renamed(line: Line, given: Container[str]) -> Line:
    name = f"line-{line.index}"
    while name in given:
        name += "-"
    return replace(line, id=name, request=line.request and replace(line.request, id=name))


def read_lines(stream: Iterable[bytes], text: Text, defaults: SamplingParams) -> list[Line]:
    """Parses the lines of a whole input; a bad line becomes a `Line` with an error and stops nothing.

    Raises:
        ValueError: two lines with the same id.
    """
    lines = [
        replace(parse_line(raw, i, text, defaults), digest=hashlib.sha256(raw.strip()).digest())
        for i, raw in enumerate(line for line in stream if line.strip())
    ]
    # Requests without a seed draw from their id, so 7 and "7" are one id; generated ids step aside.
    given = Counter(str(line.id) for line in lines if line.named)
    lines = [line if line.named or str(line.id) not in given else _renamed(line, given) for line in lines]
    if repeated := [name for name, count in given.items() if count > 1]:
        raise ValueError(f"ids must be unique, but these appear more than once: {', '.join(repeated[:5])}")
    return lines


def detached(line: Line) -> Line:
    """The line without what cannot leave this process; see `attached`."""
    return replace(line, request=line.request and replace(line.request, find_stop=None))


def attached(line: Line, text: Text) -> Line:
    """A line that came from another process, as it was there."""
    if line.request is None:
        return line
    find_stop = text.find_stop(line.stop, line.request.params.min_tokens)
    return replace(line, request=replace(line.request, find_stop=find_stop))


def requests_of(lines: Iterable[Line]) -> list[Request]:
    """What an engine for these lines must have room for."""
    return [line.request for line in lines if line.request for _ in range(min(line.n, 2))]


def parse_line(raw: bytes, index: int, text: Text, defaults: SamplingParams) -> Line:
    """Parses one input line against the job's defaults."""
    line_id: Any = str(index)
    named, batch, is_batch, metadata = False, None, False, None
    try:
        row = _parse_json(raw)
        name = "custom_id" if "custom_id" in row else "id"
        line_id = row.get(name, line_id)
        if not isinstance(line_id, str | int) or isinstance(line_id, bool):
            shown, line_id = line_id, str(index)
            raise RequestError("invalid_request", f"{name} must be a string or an integer, got {shown!r:.80}")
        if isinstance(line_id, str):
            given, line_id = line_id, str(index)
            line_id = valid_text(given)
        named = name in row
        if is_batch := name == "custom_id":
            row, batch = openai.plain_line(row)
        metadata = _metadata(row)
        request, stop, messages, later, arguments = plain_request(row, str(line_id), text, defaults)
        n = sample_count(row)
        if n > 1 and later:
            raise RequestError("invalid_parameter", "n works with a single prompt, not with a conversation's turns")
    except Exception as error:  # whatever a line provokes is its own fault, and stops no other
        return Line(index, line_id, error=refusal(error), named=named, is_batch=is_batch, metadata=metadata)
    return Line(
        index,
        line_id,
        request,
        stop,
        named=named,
        messages=messages,
        later=later,
        template_arguments=arguments,
        n=n,
        metadata=metadata,
        batch=batch,
        is_batch=is_batch,
    )


def refusal(error: Exception) -> RequestError:
    """What a request is told whose content provoked this error."""
    if isinstance(error, RequestError):
        return error
    return RequestError("invalid_request", f"the request cannot be read: {said(error):.200}")


class Asked(NamedTuple):
    """What a line in one of the plain forms asks for.

    Attributes:
        stop: stop strings.
        messages, later: of a conversation, its first turn and the user turns after it.
        template_arguments: of the chat template.
    """

    request: Request
    stop: tuple[str, ...]
    messages: tuple[dict[str, str], ...]
    later: tuple[str, ...]
    template_arguments: dict[str, Any]


def plain_request(row: Mapping[str, Any], name: str, text: Text, defaults: SamplingParams) -> Asked:
    """Reads a line in one of the plain forms.

    Raises:
        RequestError: it is in none of them, or has a field that would be ignored (see `fields`).
    """
    check_fields(row, LINE)
    stop = _stop_strings(row.get("stop"))
    arguments = text.reasoning_arguments(row.get("reasoning_effort"))
    arguments |= template_arguments(row.get("chat_template_kwargs"))
    prompt, messages, later = _prompt(row, text, arguments)
    params = replace(defaults, **_settings(row, defaults))
    find_stop = text.find_stop(stop, params.min_tokens)
    return Asked(Request(prompt, params, id=name, find_stop=find_stop), stop, messages, later, arguments)


def _parse_json(raw: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the line must be a JSON object in UTF-8: {error!s:.200}") from error
    if not isinstance(row, dict):
        raise RequestError("invalid_json", f"the line must be a JSON object, got {type(row).__name__}")
    return row


def _metadata(row: Mapping[str, Any]) -> Any:
    """What the record of a line is to repeat; raises RequestError if it cannot be written."""
    found = row.get("metadata")
    try:
        valid_text(json.dumps(found, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # such as a number that is not finite
        raise RequestError("invalid_request", f"metadata must be JSON that can be written again: {error}") from error
    return found


def _settings(row: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    given: dict[str, Any] = {name: row[name] for name in SETTINGS if row.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, SETTINGS[name]) or isinstance(value, bool):
            kind = "an integer" if SETTINGS[name] == (int,) else "a number"
            raise RequestError("invalid_parameter", f"{name} must be {kind}, got {value!r:.80}")
        if not abs(value) < 2**63:
            raise RequestError("invalid_parameter", f"{name} is out of range: {value!r:.80}")
    if not 0 <= given.get("logprobs", 0) <= MOST_ALTERNATIVES:
        raise RequestError("invalid_parameter", f"logprobs must lie in 0..{MOST_ALTERNATIVES}, got {given['logprobs']}")
    if given.get("top_k", 0) >= 2**31:
        raise RequestError("invalid_parameter", f"top_k is out of range: {given['top_k']}")
    if given.get("top_k") == -1:  # the other spelling of "all"
        given["top_k"] = 0
    if (budget := token_budget(row)) is not None:
        given["max_new_tokens"] = budget
    return given | _stop_settings(row, defaults)


def _stop_settings(row: Mapping[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    """`ignore_eos` and `stop_token_ids`: those of a line come to those of the job."""
    given: dict[str, Any] = {}
    if (ignored := row.get("ignore_eos")) is not None:
        if not isinstance(ignored, bool):
            raise RequestError("invalid_parameter", f"ignore_eos must be true or false, got {ignored!r:.60}")
        given["ignore_eos"] = ignored
    if (stops := row.get("stop_token_ids")) is not None:
        if not isinstance(stops, list) or not all(type(token) is int and 0 <= token < 2**31 for token in stops):
            raise RequestError("invalid_parameter", f"stop_token_ids must be a list of token ids, got {stops!r:.60}")
        given["stop_token_ids"] = tuple(dict.fromkeys((*defaults.stop_token_ids, *stops)))
    return given


def sample_count(row: Mapping[str, Any]) -> int:
    """The field `n`, 1 by default; raises RequestError."""
    n = row.get("n")
    if n is None:
        return 1
    if type(n) is not int or not 1 <= n <= MOST_SAMPLES:
        raise RequestError("invalid_parameter", f"n must be an integer in 1..{MOST_SAMPLES}, got {n!r:.60}")
    return n


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) and stop else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("invalid_parameter", f"stop must be a string or a list of strings, got {stop!r:.80}")
    if len(stops) > MOST_STOPS:
        raise RequestError("invalid_parameter", f"stop may have at most {MOST_STOPS} strings, got {len(stops)}")
    if (longest := max((len(valid_text(s).encode()) for s in stops), default=0)) > LONGEST_STOP:
        raise RequestError("invalid_parameter", f"a stop string may have at most {LONGEST_STOP} bytes, got {longest}")
    return tuple(stops)


def _prompt(
    row: Mapping[str, Any], text: Text, arguments: Mapping[str, Any]
) -> tuple[list[int], tuple[dict[str, str], ...], tuple[str, ...]]:
    """Tokens of the first prompt; and its messages and later user turns, if it is a conversation."""
    given = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request",
            f"the line must have exactly one of {', '.join(PROMPT_FIELDS)}; got {given or 'none'}",
        )
    kind, value = given[0], row[given[0]]
    if row.get("chat_template_kwargs") and kind not in ("messages", "turns"):
        raise RequestError(
            "invalid_parameter", "chat_template_kwargs needs messages or turns; another prompt has no template"
        )
    if kind == "prompt" and isinstance(value, str):
        return text.encode(value), (), ()
    if kind == "prompt_token_ids" and isinstance(value, list):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return value, (), ()
    elif kind == "turns" and isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        messages = ({"role": "user", "content": value[0]},)
        return text.encode_chat(messages, **arguments), messages, tuple(map(valid_text, value[1:]))
    elif kind == "messages":
        return text.encode_chat(value, **arguments), (), ()
    expected = {"prompt": "a string", "prompt_token_ids": "a list of integers", "turns": "a list of strings"}
    raise RequestError("invalid_request", f"{kind} must be {expected[kind]}, got {value!r:.80}")
