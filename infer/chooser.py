"""Which program to decode with: the candidate that commits most tokens per second, as measured. Pure host code.

A candidate is a compiled step with a measured cost. Its gain follows from how often each proposal was accepted, given
that those before it were. The candidate in use is left only for one that promises clearly more, and the others are
tried now and then, the less often the longer they have not paid.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SIZES = (1, 4, 8, 16)  # block sizes to choose from, as far as the drafter goes, and its own; 1 proposes nothing
MEMORY = 400.0  # steps of a row after which an observation has lost most of its weight
BATCH_MEMORY = 128.0  # the same for what new requests are expected to be like
TRUST = 4.0  # steps of a request that count as much as what is known of the batch
MARGIN = 1.03  # by how much a change must promise to pay
BEGIN = 1.1  # the same to begin to speculate: slots that finish early wait for prompts to be read, and gain less
CLOSE = 0.8  # a candidate that promises this share of the best is tried at the first pause for ever
TRY = 4  # steps of a try
PAUSES = (32, 128, 2048)  # steps between two tries: where speculation pays, at first where it does not, at last
TIMING = 0.2  # how far one comparison moves a candidate's measured time; the first ones count for more
HICCUP = 1.5  # no comparison changes a time by more than this factor


def block_sizes(largest: int) -> tuple[int, ...]:
    """Block sizes to choose from for a drafter of block size `largest`."""
    return tuple(sorted({size for size in SIZES if size < largest} | {largest}))


class Acceptance:
    """How often each proposal of a block is accepted, given that those before it were; the past fades."""

    def __init__(self, positions: int, memory: float = MEMORY):
        self._keep = 1 - 1 / memory
        self.tried, self.right = [0.0] * positions, [0.0] * positions

    def observe(self, proposed: int, committed: int) -> None:
        """A step proposed so many tokens and committed `committed`, one of which was the target's own."""
        for k in range(proposed):
            reached = k < committed
            self.tried[k] = self.tried[k] * self._keep + reached
            self.right[k] = self.right[k] * self._keep + (reached and k + 1 < committed)

    def rates(self, prior: Sequence[float] | float, weight: float) -> list[float]:
        """Estimates into which `weight` steps of rates `prior` are mixed: as many observations of the first position,
        and fewer of the later ones, which not all those steps reach. A single number is the prior of the first
        position, whose rate is then the prior of the next, and so on."""
        rates: list[float] = []
        for k, (right, tried) in enumerate(zip(self.right, self.tried, strict=True)):
            expected = prior[k] if isinstance(prior, Sequence) else rates[-1] if rates else prior
            rates.append((right + weight * expected) / (tried + weight))
            weight *= expected
        return rates


def expected_tokens(rates: Sequence[float], proposed: int) -> float:
    """Tokens a step commits on average if it proposes so many, one after the other."""
    total, reached = 1.0, 1.0
    for rate in rates[:proposed]:
        reached *= rate
        total += reached
    return total


@dataclass
class Candidate:
    """A program that may be chosen.

    Attributes:
        proposed: tokens its step proposes; 0 does not speculate.
        seconds: of a step, as measured.
        compared: how many measurements that rests on.
        steps: taken so far.
    """

    proposed: int
    seconds: float
    compared: int = 2
    steps: int = 0

    def gain(self, rates: Sequence[float]) -> float:
        """Tokens that a step is expected to commit for a row of these acceptance rates."""
        return expected_tokens(rates, self.proposed)


class Estimates:
    """Acceptance rates of the requests that decode, and of the batch, which new ones are expected to be like.

    Args:
        deepest: proposals of the deepest candidate.
    """

    def __init__(self, deepest: int):
        self._deepest = deepest
        self._batch = Acceptance(deepest, BATCH_MEMORY)
        self._rows: dict[Hashable, Acceptance] = {}

    def rates(self, rows: Iterable[Hashable]) -> list[list[float]]:
        """Of these requests; all others are forgotten. Of the batch if there are none."""
        self._rows = {row: self._rows.get(row) or Acceptance(self._deepest) for row in rows}
        batch = self._batch.rates(0.5, 2.0)  # nothing seen yet reads as half accepted: enough to try
        return [seen.rates(batch, TRUST) for seen in self._rows.values()] or [batch]

    def observe(self, row: Hashable, proposed: int, committed: Sequence[int]) -> None:
        """Steps of a request proposed so many tokens each, and committed these."""
        for count in committed:
            self._batch.observe(proposed, count)
            if row in self._rows:
                self._rows[row].observe(proposed, count)


class Chooser:
    """Chooses the program of each visit to the device.

    Args:
        seconds: measured time of one step of each candidate, by its name.
        proposed: tokens that a step of a candidate proposes.
        estimates: shared by choosers for other numbers of rows.

    Attributes:
        candidates: by name.
        trying: whether the last choice was a try, for which `TRY` steps are enough.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        proposed: Callable[[int], int],
        estimates: Estimates | None = None,
    ):
        self.candidates = {name: Candidate(proposed(name), each) for name, each in seconds.items()}
        self.estimates = estimates or Estimates(max(candidate.proposed for candidate in self.candidates.values()))
        self._best = max(seconds)  # in use
        self._last: int | None = None  # of the last visit
        self._pause, self._since, self._tries = PAUSES[0], 0, 0  # steps to the next try, and since the last change
        self._pace = 1.0  # of the machine: what the last visits took, over what was measured
        self.trying = False

    @property
    def used(self) -> dict[int, int]:
        """Steps taken with each candidate."""
        return {name: candidate.steps for name, candidate in self.candidates.items()}

    def choose(self, rows: Iterable[Hashable]) -> int:
        """The candidate for the next visit, given which requests are decoding."""
        rates = self.estimates.rates(rows)
        speed = {name: sum(map(c.gain, rates)) / c.seconds for name, c in self.candidates.items()}
        best = max(speed, key=lambda name: speed[name])
        margin = MARGIN if self.candidates[self._best].proposed else BEGIN
        if speed[best] < margin * speed[self._best]:
            best = self._best
        speculates = self.candidates[best].proposed > 0
        if best != self._best:
            self._best, self._pause = best, PAUSES[0] if speculates else PAUSES[1]
        other = self._to_try(best, speed)
        pause = self._pause
        if speculates and speed[other] > CLOSE * speed[best]:
            pause = min(pause, PAUSES[1])
        self.trying = other != best and self._since >= pause
        if not self.trying:
            return best
        self._pause, self._tries = min(2 * self._pause, PAUSES[2]), self._tries + 1
        return other

    def _to_try(self, best: int, speed: Mapping[int, float]) -> int:
        """What to try instead: the next best and plain decoding in turns, or the least speculation there is."""
        if self.candidates[best].proposed == 0:
            return min((name for name in speed if self.candidates[name].proposed), default=best)
        if self._tries % 2:
            return min(speed, key=lambda name: self.candidates[name].proposed)
        return max((name for name in speed if name != best), key=lambda name: speed[name], default=best)

    def observe(
        self, name: int, steps: int, seconds: float | None, committed: Mapping[Hashable, Sequence[int]]
    ) -> None:
        """A visit of `steps` steps took so long, if that is known; tokens that each request committed, step by step."""
        if not steps:
            return
        candidate, best = self.candidates[name], self.candidates[self._best]
        candidate.steps += steps
        changed = self._last not in (None, name)
        self._since, self._last = 0 if changed else self._since + steps, name
        if seconds is not None:
            self._time(candidate, changed, steps, seconds / steps)
        taken = [count for counts in committed.values() for count in counts]
        pays = bool(taken) and sum(taken) / len(taken) > candidate.seconds / best.seconds
        if self.trying and not best.proposed and pays:
            self._pause = PAUSES[0]  # see whether that lasts
        for row, counts in committed.items():
            self.estimates.observe(row, candidate.proposed, counts)

    def _time(self, candidate: Candidate, changed: bool, steps: int, seconds: float) -> None:
        """Steps of this candidate took so long each.

        What changes while the candidate stays is the machine's pace, and tells nothing of the others; the first visit
        after a change compares the two.
        """
        trust = min(1.0, steps / TRY)  # a short visit is mostly the way there and back
        if changed:
            old, candidate.compared = candidate.seconds, candidate.compared + 1
            new = min(max(seconds / self._pace, old / HICCUP), old * HICCUP)
            candidate.seconds += max(TIMING, 1 / candidate.compared) * trust * (new - old)
        self._pace += 0.7 * trust * (seconds / candidate.seconds - self._pace)
