"""Engines that answer the same requests side by side, each on a clock of its own."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs.records import acceptance_summary

PLAIN = "autoregressive"  # the engine without a drafter


def warm_up(engines: Mapping[str, Engine], requests: Sequence[Request]) -> None:
    """Compiles what the engines need, and has each fill its rows once. Nothing of it counts."""
    for engine in engines.values():
        if not engine.choosers:
            engine.warm_up()
        engine.generate(requests[: engine.slots])
        engine.stats.reset()


def acceptance(answers: Iterable[Completion], width: int = 0) -> Figures:
    """What `acceptance_summary` says of all these answers."""
    return acceptance_summary(Counter(n for answer in answers for n in answer.acceptance_lengths), width)


class Turns:
    """One engine among several that take turns: only its own turns count.

    Args:
        requests: to be answered.
        in_flight: how many of them are submitted at once; None submits all.

    Attributes:
        seconds: of its turns so far.
        tokens: of all answers so far.
        answers: finished completions, by the place of their request.
    """

    def __init__(self, engine: Engine, requests: Iterable[Request], in_flight: int | None = None):
        self.engine, self.seconds, self.tokens = engine, 0.0, 0
        self.answers: dict[int, Completion] = {}
        self._waiting = deque(enumerate(requests))
        self._in_flight = len(self._waiting) if in_flight is None else in_flight
        self._open: dict[int, tuple[int, float]] = {}  # ticket: place, and when it was submitted
        self._counted: dict[int, int] = {}
        self._first: dict[int, tuple[float, float]] = {}  # place: when it was submitted, and its first token came
        self._rest: list[float] = []  # seconds per further token

    @property
    def left(self) -> bool:
        """Whether requests are unanswered."""
        return bool(self._waiting or self._open)

    def take(self) -> None:
        """One turn of the engine's work."""
        begin = time.perf_counter()
        while self._waiting and len(self._open) < self._in_flight:
            place, request = self._waiting.popleft()
            self._open[self.engine.submit(request)] = place, self.seconds
        events = self.engine.step()
        self.engine.wait()
        self.seconds += time.perf_counter() - begin
        for ticket, answer in events:
            place, submitted = self._open[ticket]
            self.tokens += len(answer.token_ids) - self._counted.get(ticket, 0)
            self._counted[ticket] = len(answer.token_ids)
            self._first.setdefault(place, (submitted, self.seconds))
            if answer.finish_reason:
                self.answers[place] = answer
                del self._open[ticket], self._counted[ticket]
                if len(answer.token_ids) > 1:
                    self._rest.append((self.seconds - self._first[place][1]) / (len(answer.token_ids) - 1))

    @property
    def tokens_per_second(self) -> float:
        """The rate of all rows together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_and_user(self) -> float | None:
        """The rate at which one answer grows after its first token, on average; None if none grew."""
        mean = float(np.mean(self._rest)) if self._rest else 0.0
        return 1 / mean if mean > 0 else None

    def first_token_seconds(self, share: float) -> float:
        """A percentile of the seconds from a request to its first token."""
        return float(np.percentile([came - submitted for submitted, came in self._first.values()], share))

    @property
    def tau(self) -> float | None:
        """Mean acceptance length; None without a step."""
        return acceptance(self.answers.values())["tau"]


def side_by_side(
    engines: Mapping[str, Engine], requests: Sequence[Request], in_flight: int | None = None
) -> dict[str, Turns]:
    """All engines answer all requests. The one that is behind takes the next turn: what else the machine does weighs
    on all alike, within a fraction of a second."""
    turns = {name: Turns(engine, requests, in_flight) for name, engine in engines.items()}
    while behind := [one for one in turns.values() if one.left]:
        min(behind, key=lambda one: one.tokens).take()
    return turns
