"""Batch jobs: JSON lines in, JSON lines out. The only part of `infer` that touches files."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dflash_jax.checkpoint import write_text
from dflash_jax.infer.engine import Engine, Stats
from dflash_jax.infer.requests import Completion, Request, RequestError
from dflash_jax.infer.text import Text, cut_at_stop, valid_text

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "turns")
SETTINGS: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "seed": (int,),
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
    """

    index: int
    id: Any
    request: Request | None = None
    stop: tuple[str, ...] = ()
    error: RequestError | None = None
    named: bool = False


def _renamed(line: Line) -> Line:
    name = f"line-{line.index}"
    return replace(line, id=name, request=line.request and replace(line.request, id=name))


def read_lines(stream: IO[bytes], text: Text, defaults: Request) -> list[Line]:
    """Parses a whole input; a bad line becomes a `Line` with an error and stops nothing.

    Raises:
        ValueError: two lines with the same id.
    """
    lines = [parse_line(raw, i, text, defaults) for i, raw in enumerate(line for line in stream if line.strip())]
    # Requests without a seed draw from their id, so 7 and "7" are one id; generated ids step aside.
    given = Counter(str(line.id) for line in lines if line.named)
    lines = [line if line.named or str(line.id) not in given else _renamed(line) for line in lines]
    if repeated := [name for name, count in given.items() if count > 1]:
        raise ValueError(f"ids must be unique, but these appear more than once: {', '.join(repeated[:5])}")
    return lines


def parse_line(raw: bytes, index: int, text: Text, defaults: Request) -> Line:
    """Parses one input line against the job's defaults."""
    line_id: Any = str(index)
    named = False
    try:
        row = _parse_json(raw)
        line_id = row.get("id", line_id)
        if not isinstance(line_id, str | int) or isinstance(line_id, bool):
            shown, line_id = line_id, str(index)
            raise RequestError("invalid_request", f"id must be a string or an integer, got {shown!r:.80}")
        if isinstance(line_id, str):
            given, line_id = line_id, str(index)
            line_id = valid_text(given)
        named = "id" in row
        stop = _stop_strings(row.get("stop"))
        request = replace(
            defaults,
            prompt_token_ids=_prompt(row, text),
            id=str(line_id),
            find_stop=text.find_stop(stop),
            **_settings(row),
        )
    except RequestError as error:
        return Line(index, line_id, error=error, named=named)
    return Line(index, line_id, request, stop, named=named)


def _parse_json(raw: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_json", f"the line must be a JSON object in UTF-8: {error!s:.200}") from error
    if not isinstance(row, dict):
        raise RequestError("invalid_json", f"the line must be a JSON object, got {type(row).__name__}")
    return row


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: row[name] for name in SETTINGS if row.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, SETTINGS[name]) or isinstance(value, bool):
            kind = "an integer" if SETTINGS[name] == (int,) else "a number"
            raise RequestError("invalid_parameter", f"{name} must be {kind}, got {value!r:.80}")
        if not abs(value) < 2**63:
            raise RequestError("invalid_parameter", f"{name} is out of range: {value!r:.80}")
    if given.get("top_k", 0) >= 2**31:
        raise RequestError("invalid_parameter", f"top_k is out of range: {given['top_k']}")
    return given


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("invalid_parameter", f"stop must be a string or a list of strings, got {stop!r:.80}")
    return tuple(stops)


def _prompt(row: Mapping[str, Any], text: Text) -> list[int]:
    given = [name for name in PROMPT_FIELDS if name in row]
    if len(given) != 1:
        raise RequestError(
            "invalid_request",
            f"the line must have exactly one of {', '.join(PROMPT_FIELDS)}; got {given or 'none'}",
        )
    kind, value = given[0], row[given[0]]
    if kind == "prompt" and isinstance(value, str):
        return text.encode(value)
    if kind == "prompt_token_ids" and isinstance(value, list):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return value
    elif kind == "turns" and isinstance(value, list) and value and isinstance(value[0], str):
        return text.encode_chat([{"role": "user", "content": value[0]}])
    elif kind == "messages" and isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        for message in value:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise RequestError(
                    "invalid_messages", f"a message needs a role and a content string, got {message!r:.80}"
                )
        return text.encode_chat(value)
    expected = {"prompt": "a string", "prompt_token_ids": "a list of integers", "turns": "a list of strings"}
    raise RequestError(
        "invalid_request",
        f"{kind} must be {expected.get(kind, 'a list of role and content objects')}, got {value!r:.80}",
    )


# --------------------------------------------------------------------------------------------------


def run_job(
    engine: Engine, lines: list[Line], record: Callable[[Line, Completion], dict[str, Any]]
) -> Iterator[tuple[dict[str, Any] | None, Completion | None]]:
    """Answers every line: yields (output record or None while in progress, completion or None of a bad line).

    Args:
        record: what to write of a finished request.
    """
    ready = []
    for line in lines:
        if line.error is None and line.request is not None:
            try:
                engine.check(line.request)
            except RequestError as error:
                line = replace(line, error=error)
        if line.error is not None:
            yield error_record(line), None
        else:
            ready.append(line)
    requests = [line.request for line in ready if line.request is not None]
    for i, completion in engine.stream(requests):
        yield (record(ready[i], completion) if completion.finish_reason else None), completion


def answer_record(line: Line, completion: Completion, text: Text) -> dict[str, Any]:
    """The output line of a finished request."""
    assert line.request is not None
    lengths = completion.acceptance_lengths
    return {
        "id": line.id,
        "index": line.index,
        "text": cut_at_stop(text.decode(completion.token_ids), line.stop),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": len(line.request.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
        },
        "speculation": {"steps": len(lengths), "acceptance_lengths": lengths, "tau": completion.tau},
    }


def error_record(line: Line) -> dict[str, Any]:
    """The output line of a request that cannot be served."""
    assert line.error is not None
    return {
        "id": line.id,
        "index": line.index,
        "error": {"code": line.error.code, "message": str(line.error)},
    }


def rewrite_in_order(path: Path) -> None:
    """Sorts an output file by input order."""
    with path.open(encoding="utf-8") as file:
        records = sorted(file, key=lambda record: json.loads(record)["index"])
    write_text(path, "".join(records))


def acceptance_summary(lengths: list[int], width: int) -> dict[str, Any]:
    """Tau, histogram and per-position acceptance of a list of acceptance lengths.

    `acceptance_histogram[k]` counts steps that committed k tokens, k = 0..width.
    `acceptance_per_position[k]` is the share of steps that accepted their first k+1 proposals; a step cut by
    a stop token or the budget counts the tokens it committed.
    """
    histogram = [lengths.count(k) for k in range(width + 1)]
    steps = len(lengths)
    return {
        "steps": steps,
        "tau": sum(lengths) / steps if steps else None,
        "acceptance_histogram": histogram,
        "acceptance_per_position": [sum(histogram[k + 2 :]) / steps for k in range(width - 1)] if steps else [],
    }


def summarise(
    completions: list[Completion], failed: int, stats: Stats, width: int, wall_seconds: float
) -> dict[str, Any]:
    """The summary of a job."""
    lengths = [length for completion in completions for length in completion.acceptance_lengths]
    return {
        "requests": len(completions) + failed,
        "failed": failed,
        "tokens": sum(len(completion.token_ids) for completion in completions),
        "wall_seconds": wall_seconds,
        "compile_seconds": stats.compile_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": stats.tokens_per_second,
        "device_steps": stats.steps,
        **acceptance_summary(lengths, width),
    }
