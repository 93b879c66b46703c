"""Which block size to decode with: the one that commits most tokens per second, as measured. Pure host code.

Acceptance is watched position by position: how often proposal k is right, given that those before it were. That
tells what a step of any size would commit, and measured step times tell what it would cost.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

SIZES = (1, 4, 8, 16)  # candidates, as far as the drafter goes, and its own size
MEMORY = 400.0  # steps of a row after which an observation has lost most of its weight
BATCH_MEMORY = 128.0  # the same for what new requests are expected to be like
TRUST = 12.0  # observations of the whole batch that count as much as a new request's own
FIRST_PAUSE, LONGEST_PAUSE = 128, 2048  # steps between two tries, at first and at last
CLOSE = 0.8  # a size that promises this share of the best is tried at the first pause for ever
SOON = 32  # the first pause where speculating pays, and after a try that did
TRY = 4  # steps of a try
GIVE_UP = 256  # a longer pause than this, and the draft cache is not kept up any more
TIMING = 0.2  # how far one comparison with another size moves a step's time; the first ones count for more
HICCUP = 1.5  # no comparison tells of a change by more than this factor
MARGIN = 1.03  # by how much a change must promise to pay


def candidates(largest: int) -> tuple[int, ...]:
    """Block sizes to choose from for a drafter of block size `largest`."""
    return tuple(sorted({size for size in SIZES if size < largest} | {largest}))


class Acceptance:
    """How often each proposal of a block is accepted, given that those before it were; the past fades."""

    def __init__(self, positions: int, memory: float = MEMORY):
        self._keep = 1 - 1 / memory
        self.tried, self.right = [0.0] * positions, [0.0] * positions

    def observe(self, proposed: int, committed: int) -> None:
        """A step proposed so many tokens and committed `committed`, one of which was the target's own."""
        for k in range(min(proposed, committed)):
            self.tried[k] = self.tried[k] * self._keep + 1
            self.right[k] = self.right[k] * self._keep + (k + 1 < committed)

    def rates(self, prior: Sequence[float] | float, weight: float) -> list[float]:
        """Estimates that `weight` observations of `prior` are mixed into; of a single number for the first position,
        and of each position's rate for the next, which also tells what was never tried."""
        rates: list[float] = []
        for k, (right, tried) in enumerate(zip(self.right, self.tried, strict=True)):
            expected = prior[k] if isinstance(prior, Sequence) else rates[-1] if rates else prior
            rates.append((right + weight * expected) / (tried + weight))
        return rates


def expected_tokens(rates: Sequence[float], proposed: int) -> float:
    """Tokens a step commits on average if it proposes so many."""
    total, reached = 1.0, 1.0
    for rate in rates[:proposed]:
        reached *= rate
        total += reached
    return total


class BlockChooser:
    """Chooses the block size of each visit to the device.

    Size 1 proposes nothing, but keeps the draft cache of every row up to date, so that speculation can begin at any
    time. Where several tries in a row have not paid, size 0 saves that work too. A row decoded so has lapsed: whatever
    would be proposed for it is worthless. Tries then wait for rows that come anew, and until one is due, these need not
    enter the draft cache either (`wanted`, `lapse`).

    Args:
        seconds: measured time of one step at each block size; `observe` keeps their ratios up to date.
        proposals: tokens proposed at a block size.

    Attributes:
        trying: whether the size last chosen is a try, for which `TRY` steps are enough.
        used: steps taken at each size.
    """

    def __init__(self, seconds: dict[int, float], proposals: Callable[[int], int]):
        self.seconds, self._proposals = dict(seconds), proposals
        self._compared = dict.fromkeys(seconds, 2)  # the weight of what each took at first
        self._most = max(map(proposals, seconds))
        self._batch = Acceptance(self._most, BATCH_MEMORY)
        self._rows: dict[Hashable, Acceptance] = {}
        self._lapsed: set[Hashable] = set()
        self._size, self._tries = max(seconds), 0
        self._last: int | None = None  # size of the last visit
        self._pace = 1.0  # of the machine: what the last visits took, over what `seconds` says
        self._pause, self._since = SOON, 0  # steps to the next try, and since another size was visited
        self.trying = False
        self.used: dict[int, int] = dict.fromkeys(seconds, 0)

    def choose(self, rows: Iterable[Hashable]) -> int:
        """The block size for the next visit, given which requests are decoding."""
        rows = list(rows)
        self._rows = {row: self._rows.get(row) or Acceptance(self._most) for row in rows}
        self._lapsed &= self._rows.keys()
        # Nothing seen yet reads as half accepted: enough to try.
        batch = self._batch.rates(0.5, 2.0)
        nothing = [0.0] * self._most
        rates = [nothing if row in self._lapsed else seen.rates(batch, TRUST) for row, seen in self._rows.items()]
        speed = {
            size: sum(expected_tokens(r, self._proposals(size)) for r in rates or [batch]) / seconds
            for size, seconds in self.seconds.items()
            if size
        }
        best = max(speed, key=lambda size: speed[size])
        if self._size in speed and speed[best] < MARGIN * speed[self._size]:
            best = self._size
        if best != self._size:
            self._pause = SOON if self._proposals(best) else FIRST_PAUSE
        self._size, self.trying = best, False
        # A try now and then, lest a change goes unnoticed: of what the next best size costs, or not speculating ...
        if self._proposals(best):
            second = max((size for size in speed if size != best), key=lambda size: speed[size])
            other = min(speed) if self._tries % 2 else second
            if self._since < (min(self._pause, FIRST_PAUSE) if speed[other] > CLOSE * speed[best] else self._pause):
                return best
        # ... or, where nothing is proposed, of what is accepted.
        elif self._since < self._pause or len(self._lapsed) == len(self._rows):
            return 0 if self._pause > GIVE_UP else best
        else:
            other = min(size for size in speed if self._proposals(size))
        self.trying, self._pause, self._tries = True, min(2 * self._pause, LONGEST_PAUSE), self._tries + 1
        return other

    @property
    def wanted(self) -> bool:
        """Whether a new request should be read into the draft cache."""
        return self._proposals(self._size) > 0 or self._pause <= GIVE_UP or self._since >= self._pause

    def lapse(self, row: Hashable) -> None:
        """Nothing of a request that is about to decode is in the draft cache."""
        self._lapsed.add(row)

    def observe(self, size: int, steps: int, seconds: float, committed: dict[Hashable, Sequence[int]]) -> None:
        """A visit of `steps` steps at this size took so long; tokens each request committed, step by step."""
        if not steps:
            return
        self.used[size] += steps
        proposed = self._proposals(size)
        self._time(size, steps, seconds / steps)
        if size == 0:
            self._lapsed |= committed.keys()
        committed = {row: counts for row, counts in committed.items() if row not in self._lapsed}
        taken = [count for counts in committed.values() for count in counts]
        idle = self.trying and not self._proposals(self._size)
        if idle and taken and sum(taken) / len(taken) > self.seconds[size] / self.seconds[self._size]:
            self._pause = SOON  # it would have paid: see whether that lasts
        for row, counts in committed.items():
            for count in counts:
                self._batch.observe(proposed, count)
                if row in self._rows:
                    self._rows[row].observe(proposed, count)

    def _time(self, size: int, steps: int, seconds: float) -> None:
        """Steps of this size took so long each.

        What changes while the size stays is the machine's pace, and tells nothing of the sizes; the first visit after a
        change of size compares the two.
        """
        trust = min(1.0, steps / TRY)  # a short visit is mostly the way there and back
        if self._last is None or self._last == size:
            self._since += steps
        else:
            self._since = 0
            old, self._compared[size] = self.seconds[size], self._compared[size] + 1
            new = min(max(seconds / self._pace, old / HICCUP), old * HICCUP)
            self.seconds[size] += max(TIMING, 1 / self._compared[size]) * trust * (new - old)
        self._pace += 0.7 * trust * (seconds / self.seconds[size] - self._pace)
        self._last = size
