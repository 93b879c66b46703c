"""What the answers of a job add up to."""

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.engine.stats import Stats


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
