"""Which program to decode with: the candidate that commits most tokens per second, as measured. Pure host code.

A candidate is a compiled step with a measured cost. A chain's gain follows from how often each proposal was accepted,
given that those before it were; a tree's is that of the chain, times what trees gained over it. The candidate in use is
left only for one that promises clearly more, and the others are tried now and then, the less often the longer they have
not paid.
"""

import heapq
import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)

SIZES = (1, 4, 8, 16)  # block sizes to choose from, as far as the drafter goes, and its own; 1 proposes nothing
SMALL = ((8, 7), (8, 5), (4, 3))  # block size and nodes of trees
BUDGETS = ((8, 3), (8, 4), (16, 6))  # block size and positions a row, of verification budgets
BUDGET_ROWS = 32  # that decode in a program at least, for which these are worth compiling
BUDGET_MEMORY = 4096.0  # steps of a row after which what budgets gained has lost most of its weight
CONFIDENT = 1.1  # times the tokens that acceptance rates promise, which a budget is expected to commit at first
SMALL_ROWS = 16  # that decode in a program at least, for which these are worth compiling
MEMORY = 400.0  # steps of a row after which an observation has lost most of its weight
BATCH_MEMORY = 128.0  # the same for what new requests are expected to be like
TRUST = 4.0  # steps of a request that count as much as what is known of the batch
MARGIN = 1.03  # by how much a change must promise to pay
BEGIN = 1.1  # the same to begin to speculate: slots that finish early wait for prompts to be read, and gain less
CLOSE = 0.8  # a candidate that promises this share of the best is tried at the first pause for ever
TRY = 4  # steps of a try at most
TRIED = 32  # steps of single rows that a try observes; with many rows it takes fewer steps
PAUSES = (32, 128, 2048)  # steps between two tries: where speculation pays, at first where it does not, at last
TIMING = 0.2  # how far one comparison moves a candidate's measured time; the first ones count for more
HICCUP = 1.5  # no comparison changes a time by more than this factor
PROMISE = 0.05  # of a tree that nobody has tried: what it gains over the chain with every doubling of its nodes


class Draft(NamedTuple):
    """A kind of step, by its proposal: a chain or a tree.

    Attributes:
        block_size: slots of the draft pass; 0 proposes nothing.
        nodes: of the tree that is made of them; 0 makes a chain.
        budget: positions that are verified of a row on average, the likeliest of all rows; 0 verifies all.
    """

    block_size: int
    nodes: int = 0
    budget: int = 0

    @property
    def label(self) -> str:
        """The block size, and the tree and the budget if there are such, for figures."""
        tree, budget = f", tree {self.nodes}" if self.nodes else "", f", budget {self.budget}" if self.budget else ""
        return f"{self.block_size}{tree}{budget}"


def block_sizes(largest: int) -> tuple[int, ...]:
    """Block sizes to choose from for a drafter of block size `largest`."""
    return tuple(sorted({size for size in SIZES if size < largest} | {largest}))


def tree_sizes(depth: int, *, wide: bool) -> tuple[int, ...]:
    """Nodes of trees to choose from for a drafter that proposes chains of `depth` tokens: as wide a block as that
    chain's, twice, and where wide blocks are cheap four times as wide."""
    return tuple((depth + 1) * times - 1 for times in ((1, 2, 4) if wide else (1, 2)))


def small_trees(largest: int) -> tuple[Draft, ...]:
    """Trees of shorter blocks to choose from for a drafter of block size `largest`: where many rows decode, every
    position of a verify pass costs."""
    return tuple(Draft(*tree) for tree in SMALL if tree[0] < largest)


def budgets(largest: int) -> tuple[Draft, ...]:
    """Chains with a verification budget to choose from for a drafter of block size `largest`."""
    return tuple(Draft(min(size, largest), 0, budget) for size, budget in BUDGETS if budget < min(size, largest))


class Acceptance:
    """How often each proposal of a block is accepted, given that those before it were; the past fades."""

    def __init__(self, positions: int, memory: float = MEMORY):
        self._keep = 1 - 1 / memory
        self.tried, self.right = [0.0] * positions, [0.0] * positions

    def observe(self, proposed: int, committed: int, following: float | None = None) -> None:
        """A step proposed so many tokens and committed `committed`, one of which was the target's own.

        Args:
            following: of a step that verified no more of what its drafter proposed: probability of the next one to be
                right. It stands for an observation: those of positions that are always likely would be no fair sample.
        """
        for k in range(proposed):
            reached = k < committed
            self._count(k, reached, reached and k + 1 < committed)
        if following is not None and committed == proposed + 1 <= len(self.tried):
            self._count(proposed, 1.0, following)

    def _count(self, k: int, tried: float, right: float) -> None:
        self.tried[k] = self.tried[k] * self._keep + tried
        self.right[k] = self.right[k] * self._keep + right

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
        proposed: tokens its step proposes one after the other; 0 does not speculate.
        seconds: of a step, as measured.
        nodes: of a tree; 0 is a chain.
        positions: of a verification budget, of all rows together; 0 is none.
        compared: how many measurements that rests on.
        steps: taken so far.
    """

    proposed: int
    seconds: float
    nodes: int = 0
    positions: int = 0
    compared: int = 2
    steps: int = 0


class Outcome(NamedTuple):
    """The steps of a request in one visit.

    Attributes:
        committed: tokens of each step.
        chain: of steps with a tree, how many proposals of the drafter's chain would have been right; None for a chain.
        verified, following: of steps with a budget, see `forecast.Limited`; None without.
    """

    committed: Sequence[int]
    chain: Sequence[int] | None = None
    verified: Sequence[int] | None = None
    following: Sequence[float] | None = None


class Chains(NamedTuple):
    """Tokens that chains of the same drafter commit in a step: one as deep as a tree may be, and the longest."""

    own: float
    longest: float


class Trees:
    """What trees commit, by what chains of the same drafter do; the past fades."""

    def __init__(self):
        self._tokens, self._chains = 0.0, Chains(0.0, 0.0)
        self._nodes, self._expected = 0, dict[int, float]()

    def observe(self, nodes: int, tokens: float, chains: Chains, steps: int, expected: Mapping[int, float]) -> None:
        """Steps of a tree committed so many tokens.

        Args:
            chains: what these were expected to commit in all of the steps.
            expected: what the tree's best nodes, so many of them, promised in one step on average.
        """
        keep = math.exp(-steps / BATCH_MEMORY)
        if nodes != self._nodes:  # what was learned of another tree, as if of this one
            longest = self._chains.longest
            own = longest * chains.own / chains.longest
            self._tokens = self.tokens(nodes, Chains(own, longest)) if longest else 0.0
            self._chains, self._nodes = Chains(own, longest), nodes
        self._tokens = keep * self._tokens + tokens
        self._chains = Chains(*(keep * old + new for old, new in zip(self._chains, chains, strict=True)))
        self._expected = dict(expected)

    def tokens(self, nodes: int, chains: Chains) -> float:
        """Tokens that a step with such a tree is expected to commit where these chains commit so many.

        The best nodes of a larger tree are a smaller one, whose promise is known beside that of the larger. Of a tree
        that none of this was seen of, its size is all that promises anything.
        """
        promise = lambda nodes: 1 + PROMISE * math.log2(nodes + 1)
        if not self._tokens:
            return chains.own * promise(nodes)
        if {nodes, self._nodes} <= self._expected.keys():
            share = (1 + self._expected[nodes]) / (1 + self._expected[self._nodes])
            return chains.longest * share * self._tokens / self._chains.longest
        return chains.own * promise(nodes) / promise(self._nodes) * self._tokens / self._chains.own


class Budgets:
    """What steps with a verification budget commit, by what the rows' acceptance rates say; the past fades."""

    def __init__(self):
        self._tokens, self._expected = CONFIDENT * TRUST, TRUST  # as if a few steps had shown it

    def observe(self, tokens: float, expected: float, steps: int) -> None:
        """So many steps of rows committed `tokens` where their rates let expect `expected`."""
        keep = math.exp(-steps / BUDGET_MEMORY)
        self._tokens, self._expected = keep * self._tokens + tokens, keep * self._expected + expected

    def tokens(self, candidate: Candidate, rows: Sequence[Sequence[float]]) -> float:
        """Tokens that a step is expected to commit for rows of these acceptance rates: what the likeliest positions
        promise by the rates, and more, since each step knows its drafter's confidence besides."""
        return self._tokens / self._expected * self.by_rates(candidate, rows)

    @staticmethod
    def by_rates(candidate: Candidate, rows: Sequence[Sequence[float]]) -> float:
        """What they promise by the rates."""
        reached = [p for rates in rows for p in itertools.accumulate(rates[: candidate.proposed], operator.mul)]
        return len(rows) + sum(heapq.nlargest(max(0, candidate.positions - len(rows)), reached))


class Estimates:
    """Acceptance rates of the requests that decode, and of the batch, which new ones are expected to be like.

    Args:
        deepest: proposals of the deepest candidate.
    """

    def __init__(self, deepest: int):
        self._deepest = deepest
        self._batch = Acceptance(deepest, BATCH_MEMORY)
        self._rows: dict[Hashable, Acceptance] = {}
        self.trees, self.budgets = Trees(), Budgets()

    def rates(self, rows: Iterable[Hashable]) -> list[list[float]]:
        """Acceptance rates of these requests, all others are forgotten; those of the batch if there are none."""
        self._rows = {row: self._rows.get(row) or Acceptance(self._deepest) for row in rows}
        batch = self._batch.rates(0.5, 2.0)  # nothing seen yet reads as half accepted: enough to try
        return [seen.rates(batch, TRUST) for seen in self._rows.values()] or [batch]

    def gain(self, candidate: Candidate, rows: Sequence[Sequence[float]]) -> float:
        """Tokens that a step is expected to commit for rows of these acceptance rates."""
        if candidate.positions:
            return self.budgets.tokens(candidate, rows)
        chains = [self._chains(candidate, rates) for rates in rows]
        return sum(self.trees.tokens(candidate.nodes, of) if candidate.nodes else of.own for of in chains)

    def _chains(self, candidate: Candidate, rates: Sequence[float]) -> Chains:
        return Chains(expected_tokens(rates, candidate.proposed), expected_tokens(rates, self._deepest))

    def observe(self, candidate: Candidate, seen: Mapping[Hashable, Outcome], expected: Mapping[int, float]) -> None:
        """Learns from steps of this candidate; arguments as in `Chooser.observe`."""
        proposed, counts = candidate.proposed, list[int]()
        if candidate.positions and (rows := {row: outcome for row, outcome in seen.items() if row in self._rows}):
            batch, taken = self._batch.rates(0.5, 2.0), [one.committed for one in rows.values()]
            expected_of_all = self.budgets.by_rates(candidate, [self._rows[row].rates(batch, TRUST) for row in rows])
            steps = sum(map(len, taken))
            self.budgets.observe(sum(map(sum, taken)), steps * expected_of_all / len(rows), steps)
        for row, outcome in seen.items():
            counts += outcome.committed
            for i, count in enumerate(outcome.committed):
                tried, right, following = proposed, count, None
                if outcome.chain is not None:  # a tree says of its chain no more than what was committed can tell
                    tried, right = min(count, proposed), outcome.chain[i] + 1
                elif outcome.verified is not None and outcome.following is not None:
                    tried, following = outcome.verified[i], outcome.following[i]
                self._batch.observe(tried, right, following)
                if row in self._rows:
                    self._rows[row].observe(tried, right, following)
        if candidate.nodes and counts:
            chains = self._chains(candidate, self._batch.rates(0.5, 2.0))
            chains = Chains(*(len(counts) * tokens for tokens in chains))
            self.trees.observe(candidate.nodes, sum(counts), chains, len(counts), expected)


class Chooser(Generic[Name]):
    """Chooses the program of each visit to the device.

    Args:
        candidates: by name.
        estimates: shared by choosers for other numbers of rows.

    Attributes:
        trying: whether the last choice was a try.
        try_steps: how many steps are enough for a try.
    """

    def __init__(self, candidates: Mapping[Name, Candidate], estimates: Estimates | None = None):
        self.candidates = candidates
        self.estimates = estimates or Estimates(max(candidate.proposed for candidate in candidates.values()))
        chains = [name for name, candidate in candidates.items() if not candidate.nodes]
        self._best = max(chains, key=lambda name: candidates[name].proposed)  # in use
        self._last: Name | None = None  # of the last visit
        self._pause, self._since, self._tries = PAUSES[0], 0, 0  # steps to the next try, and since the last change
        self._pace = 1.0  # of the machine: what the last visits took, over what was measured
        self.trying, self.try_steps = False, TRY

    @property
    def used(self) -> dict[Name, int]:
        """Steps taken with each candidate."""
        return {name: candidate.steps for name, candidate in self.candidates.items()}

    def choose(self, rows: Iterable[Hashable]) -> Name:
        """The candidate for the next visit, given which requests are decoding."""
        rates = self.estimates.rates(rows)
        self.try_steps = max(1, min(TRY, TRIED // len(rates)))
        speed = {name: self.estimates.gain(c, rates) / c.seconds for name, c in self.candidates.items()}
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

    def _to_try(self, best: Name, speed: Mapping[Name, float]) -> Name:
        """The candidate to try: the next best and no speculation in turns, or the least speculation there is."""
        if self.candidates[best].proposed == 0:
            least = lambda name: (self.candidates[name].proposed, self.candidates[name].nodes)
            return min((name for name in speed if self.candidates[name].proposed), key=least, default=best)
        if self._tries % 2:
            return min(speed, key=lambda name: self.candidates[name].proposed)
        return max((name for name in speed if name != best), key=lambda name: speed[name], default=best)

    def observe(
        self,
        name: Name,
        steps: int,
        seconds: float | None,
        seen: Mapping[Hashable, Outcome],
        expected: Mapping[int, float] | None = None,
    ) -> None:
        """A visit of `steps` steps took so long, if that is known.

        Args:
            seen: what became of each request.
            expected: of a tree, see `Trees.observe`.
        """
        if not steps:
            return
        candidate, best = self.candidates[name], self.candidates[self._best]
        candidate.steps += steps
        changed = self._last not in (None, name)
        self._since, self._last = 0 if changed else self._since + steps, name
        if seconds is not None:
            self._time(candidate, changed, steps, seconds / steps)
        taken = [count for one in seen.values() for count in one.committed]
        pays = bool(taken) and sum(taken) / len(taken) > candidate.seconds / best.seconds
        if self.trying and not best.proposed and pays:
            self._pause = PAUSES[0]  # see whether that lasts
        self.estimates.observe(candidate, seen, expected or {})

    def _time(self, candidate: Candidate, changed: bool, steps: int, seconds: float) -> None:
        """Steps of this candidate took so long each.

        What changes while the candidate stays is the machine's pace, and tells nothing of the others; the first visit
        after a change compares the two.
        """
        trust = min(1.0, steps / self.try_steps)  # a short visit is mostly the way there and back
        if changed:
            old, candidate.compared = candidate.seconds, candidate.compared + 1
            new = min(max(seconds / self._pace, old / HICCUP), old * HICCUP)
            candidate.seconds += max(TIMING, 1 / candidate.compared) * trust * (new - old)
        self._pace += 0.7 * trust * (seconds / candidate.seconds - self._pace)
