"""Stage one: the target answers the prompts itself. No other choice matters as much (method, section 8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.infer.journal import Journal
from dflash_jax.infer.lines import Line
from dflash_jax.infer.requests import Completion


def journal(output: Path, wanted: dict[str, Any], lines: Sequence[Line]) -> Journal:
    """The output, continued if it is there; its keys are line indices.

    Raises:
        ValueError: the file was made with other settings or prompts, or is no output of `regenerate`.
    """
    by_index = {line.index: line.request for line in lines}

    def key(record: dict[str, Any]) -> int:
        index, prompt = record["index"], record.get("prompt_token_ids")
        request = by_index.get(index)
        if index not in by_index or (request and prompt and prompt != list(request.prompt_token_ids)):
            raise ValueError(f"{output} answers other prompts than this input")
        return index

    return Journal(output, wanted, key, remedy="Remove it, or choose another output")


def answer_record(line: Line, turns: Sequence[Completion]) -> dict[str, Any]:
    """The output line of an answer: the token ids of prompt and answer, and the loss mask over both, 1 on every
    answer token, its end token included."""
    assert line.request is not None
    prompt, answer = list(line.request.prompt_token_ids), turns[0].token_ids
    return {
        "id": line.id,
        "index": line.index,
        "prompt_token_ids": prompt,
        "response_token_ids": answer,
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
        "finish_reason": turns[0].finish_reason,
    }
