"""The records that a job writes for its lines, and what they add up to."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dflash_jax.files import Fields, Json, read_json_lines, replace_by
from dflash_jax.infer import openai
from dflash_jax.infer.answers import answer
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.jobs.journal import when_there_is_room
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.jobs.record_fields import ALWAYS, INPUT
from dflash_jax.infer.text import Text


def answer_record(line: Line, completions: Sequence[Completion], text: Text) -> Json:
    """The output line of a finished line: its last answer; all of them in `turns` if it was a conversation, in
    `samples` if more than one was asked for."""
    assert line.request is not None
    least = line.request.params.min_tokens
    name = str(line.id)
    answers = [answer(completion, text, line.stop, least, line.form, name) for completion in completions]
    if line.batch:
        return openai.batch_record(line.id, line.batch, answers if line.n > 1 else answers[-1:])
    record = {"id": line.id, "index": line.index, **_repeated(line), **(answers[0] if line.n > 1 else answers[-1])}
    return record | ({"turns": answers} if line.later else {}) | ({"samples": answers} if line.n > 1 else {})


def error_record(line: Line) -> Json:
    """The output line of a request that cannot be served."""
    assert line.error is not None
    if line.is_batch:
        return openai.batch_error(line.id, line.error)
    error = {"code": line.error.code, "message": str(line.error)}
    return {"id": line.id, "index": line.index, **_repeated(line), "error": error}


def _repeated(line: Line) -> Json:
    """The fields that a record repeats of its line."""
    metadata = {} if line.metadata is None else {"metadata": line.metadata}
    return metadata if line.row is None else {**metadata, INPUT: line.row}


def only(record: Fields, fields: Sequence[str]) -> Json:
    """A record with these fields and those that all have; one of OpenAI's batches as it is."""
    if "custom_id" in record:
        return dict(record)
    inner = lambda answer: {name: value for name, value in answer.items() if name in fields}
    kept = {name: value for name, value in record.items() if name in (*ALWAYS, *fields)}
    return kept | {name: [inner(one) for one in record[name]] for name in ("turns", "samples") if name in kept}


def record_id(record: Fields) -> str:
    """The id of the line that an output record answers; raises KeyError if it has none."""
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def rewrite_in_order(path: Path, place: Callable[[str], int | None]) -> None:
    """Sorts an output file by the places of its records' ids; those without one come last. No record is kept in
    memory.

    Args:
        path: not a pipe.
    """
    places, ends, end = array("q"), array("q"), 0
    for line, name in read_json_lines(path, record_id):
        found, end = place(name), end + len(line)
        places.append(2**62 if found is None else found)
        ends.append(end)
    order = np.argsort(np.array(places, np.int64), kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            for i in order.tolist():
                start = ends[i - 1] if i else 0
                file.seek(start)
                yield file.read(ends[i] - start)

    when_there_is_room(path, lambda: replace_by(path, pieces()))


def acceptance_summary(lengths: Mapping[int, int], width: int) -> Json:
    """Tau, histogram and per-position acceptance of acceptance lengths, given how often each occurred.

    `acceptance_histogram[k]` counts steps that committed k tokens, k = 0..width.
    `acceptance_per_position[k]` is the share of steps that accepted their first k+1 proposals; a step cut by
    a stop token or the budget counts the tokens it committed.
    """
    histogram = [lengths.get(k, 0) for k in range(width + 1)]
    steps = sum(lengths.values())
    return {
        "steps": steps,
        "tau": sum(k * count for k, count in lengths.items()) / steps if steps else None,
        "acceptance_histogram": histogram,
        "acceptance_per_position": [sum(histogram[k + 2 :]) / steps for k in range(width - 1)] if steps else [],
    }


class Tally:
    """Sums over the completions of a job; of each of them no more is kept than some times."""

    def __init__(self) -> None:
        self.tokens = 0
        self.lengths: Counter[int] = Counter()
        self._seconds = {name: array("d") for name in ("queue", "first_token", "per_token", "end_to_end")}

    def add(self, completion: Completion) -> None:
        self.tokens += len(completion.token_ids)
        self.lengths.update(completion.acceptance_lengths)
        if not completion.finished:
            return
        c, seconds = completion, self._seconds
        seconds["queue"].append(c.started - c.submitted)
        seconds["first_token"].append(c.first_token - c.submitted)
        seconds["end_to_end"].append(c.finished - c.submitted)
        if len(c.token_ids) > 1:
            seconds["per_token"].append((c.finished - c.first_token) / (len(c.token_ids) - 1))

    def latencies(self) -> dict[str, dict[str, float]]:
        """Percentiles in seconds: waiting for a slot, to the first token, per further token, and from end to end."""
        return {
            name: {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
            for name, values in self._seconds.items()
            if values
        }


def summarise(tally: Tally, requests: int, failed: int, stats: Stats, width: int, wall_seconds: float) -> Json:
    """The summary of a job: lines and those without an answer, and what this run's completions add up to."""
    return {
        "requests": requests,
        "failed": failed,
        "tokens": tally.tokens,
        "wall_seconds": wall_seconds,
        "compile_seconds": stats.compile_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_copied": stats.prefix_tokens,
        "prompt_tokens_beside": stats.beside_tokens,
        "requests_preempted": stats.preempted,
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": stats.tokens_per_second,
        "device_steps": stats.steps,
        "latency_seconds": tally.latencies(),
        **acceptance_summary(tally.lengths, width),
    }
