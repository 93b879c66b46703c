"""Lines of a job's input, each a request or the reason why it is none."""

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Fields, Json
from dflash_jax.infer import openai
from dflash_jax.infer.constrained import NAMES, constraint_of
from dflash_jax.infer.engine.params import MOST_ALTERNATIVES, SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError, invalid
from dflash_jax.infer.plain import plain_request, refusal, sample_count
from dflash_jax.infer.text import Text, valid_text

TURN = 32  # tokens that a chat template puts around two turns, at most, as a guess


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
        row: the line as it was read, if it is kept.
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
    row: Json | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt and of all that may follow, as far as that is known: a token has at least one byte."""
        if self.request is None:
            return 0
        new = max(self.request.params.max_new_tokens, 1)
        later = sum(len(turn.encode(errors="replace")) + TURN + new for turn in self.later)
        return len(self.request.prompt_token_ids) + new + later


def read_lines(stream: Iterable[bytes], text: Text, defaults: SamplingParams) -> list[Line]:
    """Parses the lines of a whole input; a bad line becomes a `Line` with an error and stops nothing.

    Raises:
        ValueError: two lines with the same id.
    """
    rows = [read_row(raw, i) for i, raw in enumerate(line for line in stream if line.strip())]
    # Requests without a seed draw from their id, so 7 and "7" are one id; generated ids step aside.
    given = Counter(str(row.id) for row in rows if row.named)
    if repeated := [name for name, count in given.items() if count > 1]:
        raise ValueError(repeated_ids(repeated))
    return [line_of(renamed(row, given), text, defaults) for row in rows]


def repeated_ids(names: Sequence[str]) -> str:
    """The message about ids that appear more than once."""
    which = ", ".join(names[:5])
    return f"ids must be unique, but these appear more than once: {which}; a line may also have none"


def renamed(row: "Row", given: Container[str]) -> "Row":
    """The row under an id that none of these is, if it has no id of its own."""
    name = str(row.id)
    if row.named or name not in given:
        return row
    name = f"line-{row.index}"
    while name in given:
        name += "-"
    return replace(row, id=name)


def detached(line: Line) -> Line:
    """The line without what cannot leave this process; see `attached`."""
    return replace(line, request=line.request and replace(line.request, find_stop=None))


def attached(line: Line, text: Text) -> Line:
    """A line that came from another process, as it was there."""
    if line.request is None:
        return line
    find_stop = text.find_stop(line.stop, line.request.params.min_tokens)
    return replace(line, request=replace(line.request, find_stop=find_stop))


@dataclass(frozen=True, slots=True)
class Row:
    """A line that was read and not yet turned into a request.

    Attributes:
        index, id, named, is_batch, digest: see `Line`.
        fields: of the line; None for what is no JSON object.
        error: why it cannot be a request; None if that is not known yet.
    """

    index: int
    id: Any
    named: bool = False
    is_batch: bool = False
    fields: Json | None = None
    error: RequestError | None = None
    digest: bytes = b""


def read_row(raw: bytes, index: int) -> Row:
    """Reads one input line as far as it needs no tokenizer."""
    digest, fields = hashlib.sha256(raw.strip()).digest(), None
    try:
        fields = _parse_json(raw)
        name = "custom_id" if "custom_id" in fields else "id"
        given = fields.get(name, str(index))
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise RequestError("invalid_request", f"{name} must be a string, an integer or absent, got {given!r:.80}")
        if isinstance(given, str):
            given = valid_text(given)
        return Row(index, given, name in fields, name == "custom_id", fields, None, digest)
    except Exception as error:  # whatever a line provokes is its own fault, and stops no other
        return Row(index, str(index), fields=fields, error=refusal(error), digest=digest)


def line_of(
    row: Row, text: Text, defaults: SamplingParams, *, keep: bool = False, prompt_column: str | None = None
) -> Line:
    """The request of a row, against the job's defaults.

    Args:
        keep: keeps the row itself, too.
        prompt_column: the field with the prompt, see `only_prompt`; None is a row in one of the forms of requests.
    """
    batch, metadata, kept = None, None, None
    try:
        kept = _writable("the line", row.fields) if keep else None
        if row.error is not None:
            raise row.error
        assert row.fields is not None
        fields = row.fields
        if prompt_column is not None:
            fields = only_prompt(fields, prompt_column, text)
        elif row.is_batch:
            fields, batch = openai.plain_line(fields)
        metadata = _writable("metadata", (fields if prompt_column is None else row.fields).get("metadata"))
        plain, n = plain_request(fields, str(row.id), text, defaults), sample_count(fields)
        if n > 1 and plain.later:
            raise invalid("n works with a single prompt, not with a conversation's turns")
    except Exception as error:
        line = Line(row.index, row.id, error=refusal(error))
    else:
        line = Line(row.index, row.id, *plain, n=n, batch=batch)
    how = {"named": row.named, "is_batch": row.is_batch, "metadata": metadata, "digest": row.digest, "row": kept}
    return replace(line, **how)


def only_prompt(fields: Fields, column: str, text: Text) -> Json:
    """The request of a row of a table that was not made for this: a column is its prompt, and the others are data.

    A text is a user's message where the tokenizer has a chat template, and else continued. A list has messages or token
    ids.

    Raises:
        RequestError: it is something else.
    """
    value = fields.get(column)
    if isinstance(value, str):
        return {"messages": [{"role": "user", "content": value}]} if text.has_chat_template else {"prompt": value}
    if isinstance(value, list) and value:
        return {"prompt_token_ids" if isinstance(value[0], int) else "messages": value}
    found = "it is missing" if value is None else f"found {value!r:.80}"
    raise invalid(f"{column} must be a text or a list of messages or token ids; {found}", column)


def parse_line(raw: bytes, index: int, text: Text, defaults: SamplingParams) -> Line:
    """Parses one input line against the job's defaults."""
    return line_of(read_row(raw, index), text, defaults)


# Fields without which `asks` is nothing.
_ASKING = frozenset((*NAMES, "logprobs", "top_logprobs", "tools"))


def asks(row: Row) -> tuple[int | None, bool]:
    """How many alternative log-probabilities a row asks for, and whether it has a constraint or tools: what an engine
    must be made for. Needs no tokenizer."""
    fields = row.fields
    body = fields.get("body") if fields and row.is_batch else fields
    if row.error is not None or not isinstance(body, dict) or not _ASKING & body.keys():
        return None, False
    try:
        plain = openai.plain_line(fields)[0] if row.is_batch and fields else body
        count = plain.get("logprobs")
        served = type(count) is int and 0 <= count <= MOST_ALTERNATIVES
        return count if served else None, constraint_of(plain) is not None or bool(plain.get("tools"))
    except Exception:  # its line will say so
        return None, False


def _parse_json(raw: bytes) -> Json:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the line must be a JSON object in UTF-8: {error!s:.200}") from error
    if not isinstance(row, dict):
        raise RequestError("invalid_json", f"the line must be a JSON object, got {type(row).__name__}")
    return row


def _writable(name: str, value: Any) -> Any:
    """What a record repeats of its line; raises RequestError if it cannot be written."""
    try:
        valid_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError as error:  # such as a number that is not finite
        raise RequestError("invalid_request", f"{name} must be JSON that can be written again: {error}") from error
    return value
