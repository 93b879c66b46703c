"""Drafters of one target take turns: a cell of their table is one drafter on one task at one temperature.

Nothing is kept of one prompt for another, what was answered to warm up does not count, and every answer is compared
with autoregressive decoding's.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.step_times import PARTS, StepTimes, samples_due
from dflash_jax.benchmarks.turns import PLAIN, acceptance, warm_up
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request


def compare_drafters(
    engines: Mapping[str, Engine], tasks: Mapping[str, Sequence[Request]], temperature: float, rounds: int
) -> tuple[list[Figures], list[Figures]]:
    """Cells of the table at a temperature, and what a step of each drafter costs there.

    Times of a step depend on shapes and on the length of the rows, not on the text. So they are measured once for all
    tasks, at the mean length of their rows.

    Args:
        engines: of PLAIN and of the drafters.
        tasks: requests of each.
        rounds: how often all of them are answered.

    Raises:
        ValueError: nothing was decoded.
    """
    together = [request for requests in tasks.values() for request in requests]
    warm_up(engines, together)
    length = sum(len(r.prompt_token_ids) + r.params.max_new_tokens // 2 for r in together) // len(together)
    drafting = {name: engine for name, engine in engines.items() if name != PLAIN}
    parts = {name: StepTimes(engines[PLAIN], one, length, temperature=temperature) for name, one in drafting.items()}
    cells, steps = [], []
    for task, requests in tasks.items():
        answered = _answered(engines, requests, rounds, parts)
        cells += [{"task": task, "temperature": temperature} | cell for cell in _cells(task, engines, answered)]
    for name, times in parts.items():
        seconds = times.seconds()
        steps.append(
            {
                "drafter": name,
                "temperature": temperature,
                "length": length,
                "ms": {part: 1e3 * seconds[part] for part in (*PARTS, "speculative", PLAIN)},
                "fused_step_over_parts": times.fused_over_parts(),
            }
        )
    return cells, steps


class Answered(NamedTuple):
    """What an engine made of the requests of a task.

    Attributes:
        answers: of each round.
        tokens, seconds: of decoding, by round and batch of requests.
    """

    answers: list[list[Completion]]
    tokens: np.ndarray
    seconds: np.ndarray


def _answered(
    engines: Mapping[str, Engine], requests: Sequence[Request], rounds: int, parts: Mapping[str, StepTimes]
) -> dict[str, Answered]:
    """The engines take turns on batches of the requests; between these, the parts of a step are timed."""
    slots = engines[PLAIN].slots
    starts = range(0, len(requests), slots)
    shape = rounds, len(starts)
    found = {name: Answered([[] for _ in range(rounds)], np.zeros(shape), np.zeros(shape)) for name in engines}
    for turn in range(rounds):
        for batch, start in enumerate(starts):
            for name, engine in engines.items():
                engine.stats.reset()
                found[name].answers[turn] += engine.generate(requests[start : start + slots])
                found[name].tokens[turn, batch] = engine.stats.decode_tokens
                found[name].seconds[turn, batch] = engine.stats.decode_seconds
            for _ in range(samples_due(turn * len(starts) + batch, rounds * len(starts))):
                for times in parts.values():
                    times.sample()
    return found


def _cells(task: str, engines: Mapping[str, Engine], answered: Mapping[str, Answered]) -> list[Figures]:
    """Cells of one task; raises ValueError if nothing was decoded."""
    if not all(one.tokens.any() for one in answered.values()):
        raise ValueError(f"{task}: nothing was decoded; raise --max-new-tokens")
    rate = lambda one: float(one.tokens.sum() / one.seconds.sum())
    plain, cells = answered[PLAIN], []
    for name, side in answered.items():
        if name == PLAIN:
            continue
        figures = acceptance(chain.from_iterable(side.answers), engines[name].width)
        speedup = rate(side) / rate(plain)
        equal = [
            all(turn[i].token_ids == plain.answers[0][i].token_ids for turn in side.answers)
            for i in range(len(side.answers[0]))
        ]
        cells.append(
            {
                "drafter": name,
                "samples": len(equal),
                "equal_outputs": sum(equal),
                "proposals": engines[name].width - 1,
                "block_size": engines[name].block_size,
                "nodes": engines[name].tree,
                "tau": figures["tau"],
                "tau_error": tau_error(side.answers),
                "acceptance_per_position": figures["acceptance_per_position"],
                "tokens_per_second": rate(side),
                "tokens_per_second_error": rate(side) * relative_error([side.tokens], [side.seconds]),
                "autoregressive_tokens_per_second": rate(plain),
                "speedup": speedup,
                "speedup_error": speedup * relative_error([side.tokens, plain.seconds], [side.seconds, plain.tokens]),
                "omega": figures["tau"] / speedup - 1,
            }
        )
    return cells


def relative_error(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> float:
    """Relative standard error of a product of sums over another, batches of prompts and rounds being drawn by chance.

    The errors over batches and over rounds, to first order in each sum, are added in squares; where there is only one
    batch or one round, its error is left out.

    Args:
        above, below: of each sum what it is of, by round and batch.
    """
    squares = []
    for axis in (0, 1):
        sums = [(x.sum(axis=axis), sign) for terms, sign in ((above, 1), (below, -1)) for x in terms]
        if (n := len(sums[0][0])) > 1 and all(x.sum() for x, _ in sums):
            influence = sum(sign * x / x.sum() for x, sign in sums)
            squares.append(float(np.sum(influence**2)) * n / (n - 1))
    return math.sqrt(sum(squares)) if squares else math.nan


def tokens_and_steps(answers: Sequence[Sequence[Completion]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that steps committed, and these steps, of each answer."""
    of = lambda measure: np.array([[measure(x.acceptance_lengths) for x in turn] for turn in answers], float)
    return of(sum), of(len)


def tau_error(answers: Sequence[Sequence[Completion]]) -> float:
    """Standard error of the mean acceptance length over prompts, the columns, and over rounds."""
    tokens, steps = tokens_and_steps(answers)
    return float(tokens.sum() / steps.sum()) * relative_error([tokens], [steps]) if steps.sum() else math.nan
