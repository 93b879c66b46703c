"""Batch jobs: lines in, records out, and what they add up to."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoint.fingerprint import fingerprint
from dflash_jax.files import read_json_lines, write
from dflash_jax.infer import openai
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.jobs.journal import when_there_is_room
from dflash_jax.infer.jobs.lines import Line, refusal
from dflash_jax.infer.text import Text


def job_settings(
    directory: str,
    dtype: str,
    text: Text,
    defaults: SamplingParams,
    lines: Sequence[Line],
    seed: int,
    max_length: int | None,
    deterministic: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What the answers of a job depend on.

    `target` and `input` are for people; their fingerprints are what must not change (None for a target that was made
    in memory).

    Args:
        directory, dtype: of the target.
        deterministic: what the last bits depend on besides, of a job that fixes them.
        overrides: replaced fields of `config.json`, by the option that names them.
    """
    more: dict[str, Any] = {}  # defaults are left out
    if text.template_arguments:
        more["chat_template_kwargs"] = text.template_arguments
    if deterministic is not None:
        more["deterministic"] = dict(deterministic)
    more |= {name: dict(fields) for name, fields in (overrides or {}).items() if fields}
    if defaults.min_tokens:
        more["min_tokens"] = defaults.min_tokens
    return more | {
        "target": directory,
        "target_fingerprint": fingerprint(directory) if directory else None,
        "input": f"{len(lines)} lines",
        "input_fingerprint": hashlib.sha256(b"".join(line.digest for line in lines)).hexdigest(),
        "max_new_tokens": defaults.max_new_tokens,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "seed": seed,
        "stop_token_ids": list(defaults.ends),
        "max_length": max_length,
        "dtype": dtype,
        "chat_template": text.chat_template,
    }


Event = tuple[dict[str, Any] | None, list[Completion]]  # output record or None while in progress, answers so far


class Answering:
    """Lines on their way through an engine.

    Args:
        record: what to write of a finished line, given its answers: one a turn of a conversation, one a sample.
        text: continues conversations; without it their first turn is the whole line.
    """

    def __init__(
        self, engine: Engine, record: Callable[[Line, list[Completion]], dict[str, Any]], text: Text | None = None
    ):
        self._engine, self._record, self._text = engine, record, text
        self._tickets: dict[int, tuple[Line, list[Completion]]] = {}  # and its answers

    @property
    def busy(self) -> bool:
        """Whether lines are not finished."""
        return bool(self._tickets)

    def add(self, line: Line) -> Iterator[Event]:
        """Queues a line; yields the record of one that cannot be answered."""
        try:
            if line.error is not None:
                raise line.error
            assert line.request is not None
            answers: list[Completion] = []
            for sample in range(line.n):
                self._tickets[self._engine.submit(replace(line.request, sample=sample))] = line, answers
        except Exception as error:
            yield error_record(replace(line, error=refusal(error))), []

    def turn(self, admit: bool) -> Iterator[Event]:
        """One turn of the engine's work; see `Engine.step`."""
        for ticket, completion in self._engine.step(admit=admit):
            line, answers = self._tickets[ticket]
            if not completion.finish_reason:
                yield None, [*answers, completion]
                continue
            del self._tickets[ticket]
            answers.append(completion)
            try:
                if len(answers) < line.n:
                    yield None, answers
                elif self._text and line.later[len(answers) - 1 :]:
                    self._tickets[self._engine.submit(_next_turn(line, answers, self._text))] = line, answers
                    yield None, answers
                else:
                    answers.sort(key=lambda completion: completion.sample)
                    yield self._record(line, answers), answers
            except Exception as error:  # such as a conversation that has outgrown the engine
                yield error_record(replace(line, error=refusal(error))), answers

    def close(self) -> None:
        """Drops what is not finished."""
        self._engine.cancel(*self._tickets)
        self._tickets.clear()


def run_job(
    engine: Engine,
    lines: Iterable[Line],
    record: Callable[[Line, list[Completion]], dict[str, Any]],
    text: Text | None = None,
    admit: Callable[[], bool] = lambda: True,
) -> Generator[Event, None, None]:
    """Answers every line: yields (output record or None while in progress, its answers so far).

    Args:
        record, text: see `Answering`.
        admit: asked before every turn of work; while it is false no request is begun, and the job ends when those
            in progress are finished.
    """
    answering = Answering(engine, record, text)
    try:
        for line in lines:
            yield from answering.add(line)
        while answering.busy:
            going = admit()
            if not going and not engine.busy:
                return
            yield from answering.turn(going)
    finally:
        answering.close()


def _next_turn(line: Line, turns: Sequence[Completion], text: Text) -> Request:
    """The request of a conversation's next user turn: all before it, answers included, under the chat template."""
    assert line.request is not None
    messages = list(line.messages)
    for completion, following in zip(turns, line.later, strict=False):
        answer = text.answer(completion.token_ids, line.stop, line.request.params.min_tokens) or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    return replace(line.request, prompt_token_ids=text.encode_chat(messages, **line.template_arguments))


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


def answer(completion: Completion, text: Text, stop: Sequence[str] = (), after: int = 0) -> dict[str, Any]:
    """What an output record says of one answer; `stop` and `after` as in `Text.find_stop`."""
    scores = {"logprobs": token_logprobs(completion, text)} if completion.logprobs else {}
    return {
        "text": text.answer(completion.token_ids, stop, after),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": usage(completion),
        "speculation": speculation(completion),
    } | scores


def usage(completion: Completion) -> dict[str, int]:
    """How many tokens an answer took."""
    return {"prompt_tokens": completion.prompt_tokens, "completion_tokens": len(completion.token_ids)}


def speculation(completion: Completion) -> dict[str, Any]:
    """How the steps of an answer went."""
    lengths = completion.acceptance_lengths
    return {"steps": len(lengths), "acceptance_lengths": lengths, "tau": completion.tau}


def token_logprobs(completion: Completion, text: Text, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
    """Tokens from `start` to `stop`, each with its log-probability and its likeliest alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        special = {"special": True} if text.is_special(token) else {}
        return {"token": text.token(token), "id": token, "logprob": logprob} | special

    c, these = completion, slice(start, stop)
    chosen = zip(c.token_ids[these], c.logprobs[these], c.top_logprobs[these], strict=True)
    return [entry(token, p) | {"top": [entry(*other) for other in top]} for token, p, top in chosen]


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


def acceptance_summary(lengths: Mapping[int, int], width: int) -> dict[str, Any]:
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
    """What the completions of a job add up to; of each of them no more is kept than some times."""

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


def summarise(
    tally: Tally, requests: int, failed: int, stats: Stats, width: int, wall_seconds: float
) -> dict[str, Any]:
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
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": stats.tokens_per_second,
        "device_steps": stats.steps,
        "latency_seconds": tally.latencies(),
        **acceptance_summary(tally.lengths, width),
    }
