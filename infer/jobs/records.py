"""The records that a job writes for its lines."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from dflash_jax.files import read_json_lines, write
from dflash_jax.infer import openai
from dflash_jax.infer.answers import answer
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.jobs.journal import when_there_is_room
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.text import Text


def answer_record(line: Line, completions: Sequence[Completion], text: Text) -> dict[str, Any]:
    """The output line of a finished line: its last answer; all of them in `turns` if it was a conversation, in
    `samples` if more than one was asked for."""
    assert line.request is not None
    least = line.request.params.min_tokens
    answers = [answer(completion, text, line.stop, least) for completion in completions]
    if line.batch:
        return openai.batch_record(line.id, line.batch, answers if line.n > 1 else answers[-1:])
    record = {"id": line.id, "index": line.index, **_repeated(line), **(answers[0] if line.n > 1 else answers[-1])}
    return record | ({"turns": answers} if line.later else {}) | ({"samples": answers} if line.n > 1 else {})


def error_record(line: Line) -> dict[str, Any]:
    """The output line of a request that cannot be served."""
    assert line.error is not None
    if line.is_batch:
        return openai.batch_error(line.id, line.error)
    return {
        "id": line.id,
        "index": line.index,
        **_repeated(line),
        "error": {"code": line.error.code, "message": str(line.error)},
    }


def _repeated(line: Line) -> dict[str, Any]:
    """What a record repeats of its line."""
    return {} if line.metadata is None else {"metadata": line.metadata}


def record_id(record: Mapping[str, Any]) -> str:
    """The id of the line that an output record answers; raises KeyError if it has none."""
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def rewrite_in_order(path: Path, lines: Sequence[Line]) -> None:
    """Sorts an output file by input order."""
    place = {str(line.id): i for i, line in enumerate(lines)}
    records = sorted(read_json_lines(path, lambda record: place.get(record_id(record), len(place))), key=itemgetter(1))
    whole = b"".join(line for line, _ in records)
    when_there_is_room(path, lambda: write(path, whole))
