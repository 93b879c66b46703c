"""Stage one: the target answers the prompts itself. No other choice matters as much (method, section 8)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import write_json
from dflash_jax.infer.jobs import Line
from dflash_jax.infer.requests import Completion


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
        if differ := [name for name in wanted if found.get(name) != wanted[name]]:
            raise ValueError(
                f"{output} was made with other settings: "
                + "; ".join(f"{name} {found.get(name)!r}, now {wanted[name]!r}" for name in differ)
            )
        by_index = {line.index: line.request for line in lines}
        *whole, torn = output.read_bytes().split(b"\n")
        for number, text in enumerate(whole, 1):
            try:
                record = json.loads(text)
                index, prompt = record["index"], record.get("prompt_token_ids")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{output} is damaged in line {number}: {error!s:.100}") from error
            request = by_index.get(index)
            if index not in by_index or (request and prompt and prompt != list(request.prompt_token_ids)):
                raise ValueError(f"{output} answers other prompts than this input, in line {number}")
            done.add(index)
        if torn:
            with output.open("rb+") as file:
                file.truncate(output.stat().st_size - len(torn))
    write_json(beside, wanted)
    return done


def answer_record(line: Line, completion: Completion) -> dict[str, Any]:
    """The output line of an answer: the token ids of prompt and answer, and the loss mask over both, 1 on every
    answer token, its end token included."""
    assert line.request is not None
    prompt, answer = list(line.request.prompt_token_ids), completion.token_ids
    return {
        "id": line.id,
        "index": line.index,
        "prompt_token_ids": prompt,
        "response_token_ids": answer,
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
        "finish_reason": completion.finish_reason,
    }
