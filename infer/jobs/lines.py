"""Lines of a job's input, each a request or the reason why it is none."""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Fields
from dflash_jax.infer import openai
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError, invalid
from dflash_jax.infer.plain import plain_request, refusal, sample_count
from dflash_jax.infer.text import Text, valid_text


@dataclass(frozen=True)
class Line:
    """One input line: a request, or the reason why it is none.

    Attributes:
        index: line number in the input, blank lines not counted, from 0.
        id: the line's own id, else its index.
        request, stop, messages, later, template_arguments, form: see `PlainRequest`; the `later` user turns follow one
            answer after the other.
        error: instead of a request.
        named: whether the line itself has the id.
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
    messages: tuple[dict[str, str], ...] = ()
    later: tuple[str, ...] = ()
    template_arguments: Fields = field(default_factory=dict)
    form: Form | None = None
    error: RequestError | None = None
    named: bool = False
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
        plain, n = plain_request(row, str(line_id), text, defaults), sample_count(row)
        if n > 1 and plain.later:
            raise invalid("n works with a single prompt, not with a conversation's turns")
    except Exception as error:  # whatever a line provokes is its own fault, and stops no other
        return Line(index, line_id, error=refusal(error), named=named, is_batch=is_batch, metadata=metadata)
    return Line(index, line_id, *plain, named=named, n=n, metadata=metadata, batch=batch, is_batch=is_batch)


def _parse_json(raw: bytes) -> Fields:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the line must be a JSON object in UTF-8: {error!s:.200}") from error
    if not isinstance(row, dict):
        raise RequestError("invalid_json", f"the line must be a JSON object, got {type(row).__name__}")
    return row


def _metadata(row: Fields) -> Any:
    """The metadata of a line, which its record repeats; raises RequestError if it cannot be written."""
    found = row.get("metadata")
    try:
        valid_text(json.dumps(found, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # such as a number that is not finite
        raise RequestError("invalid_request", f"metadata must be JSON that can be written again: {error}") from error
    return found
