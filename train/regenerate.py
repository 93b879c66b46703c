"""Stage one: the target answers the prompts itself. No other choice matters as much (method, section 8)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.infer.engine import Engine
from dflash_jax.infer.jobs import Line, error_record
from dflash_jax.infer.requests import Completion, RequestError
from dflash_jax.train.config import write_json


def settings(target: Any, text: Any, defaults: Any, seed: int, max_length: int | None) -> dict[str, Any]:
    """What the answers depend on, as recorded beside them."""
    return {
        "target": target.directory,
        "max_new_tokens": defaults.max_new_tokens,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "seed": seed,
        "stop_token_ids": list(defaults.stop_token_ids),
        "max_length": max_length,
        "dtype": target.dtype.name,
        "chat_template": text.chat_template,
    }


def resume(output: Path, wanted: dict[str, Any], lines: Sequence[Line]) -> set[int]:
    """Indices already answered in `output`; cuts a torn last line, and records the settings beside it.

    Raises:
        ValueError: the file was made with other settings or prompts, or is no output of `regenerate`.
    """
    beside = output.with_name(output.name + ".settings.json")
    done: set[int] = set()
    if output.exists() and output.stat().st_size:
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{output} exists without readable {beside.name}; remove it or choose another") from error
        differ = [name for name in wanted if found.get(name) != wanted[name]]
        if differ:
            raise ValueError(
                f"{output} was made with other settings: "
                + "; ".join(f"{name} {found.get(name)!r}, now {wanted[name]!r}" for name in differ)
            )
        good = 0
        with output.open("rb") as file:
            for line in file:
                try:
                    int(json.loads(line)["index"])
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                good += len(line)
        if good < output.stat().st_size:
            with output.open("rb+") as file:
                tail = file.read()[good:]
                if tail.count(b"\n") > 1:
                    raise ValueError(f"{output} is damaged after {good} bytes, in more than its last line")
                file.truncate(good)
        done = _done(output, {line.index: line for line in lines})
    write_json(beside, wanted)
    return done


def _done(output: Path, lines: dict[int, Line]) -> set[int]:
    done = set()
    with output.open("rb") as file:
        for record in map(json.loads, file):
            line = lines.get(record["index"])
            request = line.request if line else None
            if line is None or (
                request and record.get("prompt_token_ids", request.prompt_token_ids) != list(request.prompt_token_ids)
            ):
                raise ValueError(f"{output} answers other prompts than this input (line {record['index'] + 1})")
            done.add(record["index"])
    return done


def regenerate(engine: Engine, lines: list[Line]) -> Iterator[tuple[dict[str, Any], Completion | None]]:
    """Yields (output record, completion) as answers finish; a line that cannot be answered gives its error.

    A record has the prompt's and the answer's token ids and the loss mask over both: 1 on every answer token,
    its end token included.
    """
    ready = []
    for line in lines:
        error = line.error
        if error is None and line.request is not None:
            try:
                engine.check(line.request)
            except RequestError as problem:
                error = problem
        if error is not None:
            yield error_record(Line(line.index, line.id, error=error)), None
        else:
            ready.append(line)
    requests = [line.request for line in ready if line.request is not None]
    for i, completion in engine.stream(requests):
        if completion.finish_reason:
            prompt, answer = list(requests[i].prompt_token_ids), completion.token_ids
            yield (
                {
                    "id": ready[i].id,
                    "index": ready[i].index,
                    "prompt_token_ids": prompt,
                    "response_token_ids": answer,
                    "loss_mask": [0] * len(prompt) + [1] * len(answer),
                    "finish_reason": completion.finish_reason,
                },
                completion,
            )
