"""Stage one: the target answers the prompts itself. No other choice matters as much (method, section 8)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.jobs.journal import Journal
from dflash_jax.infer.jobs.lines import Line


def journal(
    output: Path, settings: dict[str, Any], lines: Sequence[Line], stopping: Callable[[], object] = lambda: False
) -> Journal:
    """The output, continued if it is there; its keys are line indices. `stopping` is as in `Journal`.

    Raises:
        ValueError: the file was made with other settings or prompts, or is no output of `regenerate`.
    """
    known = {line.index for line in lines}

    def key(record: dict[str, Any]) -> int:
        if record["index"] not in known:
            raise ValueError(f"index {record['index']!r:.60} is not in the input")
        return record["index"]

    return Journal(output, settings, key, remedy="Remove it, or choose another output", stopping=stopping)


def answer_record(line: Line, turns: Sequence[Completion]) -> dict[str, Any]:
    """The output line of an answer: the token ids of prompt and answer, and the loss mask over both, 1 on every
    answer token, its end token included. If a drafter helped, also the tokens after which its blocks began."""
    assert line.request is not None
    prompt, answer = list(line.request.prompt_token_ids), turns[0].token_ids
    committed = turns[0].acceptance_lengths
    record = {
        "id": line.id,
        "index": line.index,
        "prompt_token_ids": prompt,
        "response_token_ids": answer,
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
        "finish_reason": turns[0].finish_reason,
    }
    if committed and sum(committed) == len(answer) - 1:
        record["anchors"] = np.cumsum([len(prompt), *committed[:-1]]).tolist()
    return record
