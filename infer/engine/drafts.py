"""What the steps of an engine may propose, and which of it pays."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import jax

from dflash_jax.decoding.state import DraftModel
from dflash_jax.infer.engine.chooser import (
    BUDGET_ROWS,
    SMALL_ROWS,
    Candidate,
    Chooser,
    Draft,
    Estimates,
    block_sizes,
    budgets,
    small_trees,
    tree_sizes,
)
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.requests import invalid

PLAIN = Draft(0)  # a step without speculation


class Drafts:
    """What may be proposed: one draft, or several among which is chosen by measured times and acceptance.

    Args:
        drafter: None proposes nothing.

    Attributes:
        drafter: None where nothing is proposed.
        block_size, tree: of the draft where there is no choice; else the largest, and 0.
        auto: whether there is a choice, among `choices`.
        programs: what `Slots.decode` may be asked for.
        first: those of them that serve every request without a choice among several.
        choosers: by rows of a program; none before `measured`, nor without a choice.
        limited_steps: taken without speculation, where there is no choice, because a request asked for it.

    Raises:
        ValueError: a block size that the drafter was not trained for.
    """

    def __init__(self, drafter: DraftModel | None, config: EngineConfig):
        auto, self.block_size = config.block_size == "auto", 1
        if drafter is not None:
            largest = drafter.config.block_size
            self.block_size = config.block_size if isinstance(config.block_size, int) else largest
            if not 1 <= self.block_size <= largest:
                raise ValueError(
                    f"block_size must lie in 1..{largest} (the largest that this drafter has), got {self.block_size}"
                )
            if drafter.depth(self.block_size) == 0:
                drafter = None
        self.drafter, self.auto = drafter, auto and drafter is not None and not config.deterministic
        self.tree = config.tree if drafter and isinstance(config.tree, int) and not self.auto else 0
        budget = 0 if self.auto else self._within(Draft(self.block_size, self.tree, config.verify_budget or 0)).budget
        self._usual = Draft(self.block_size, self.tree, budget)
        self.choices, self._small, self._budgets = (self._usual,), tuple[Draft, ...](), tuple[Draft, ...]()
        if drafter is not None and self.auto:
            sizes = tree_sizes(drafter.depth(self.block_size), wide=jax.default_backend() != "cpu")
            if isinstance(config.tree, int):
                sizes = (config.tree,) if config.tree else ()
            elif config.slots >= SMALL_ROWS:
                self._small = small_trees(self.block_size)
            trees = (*self._small, *(Draft(self.block_size, nodes) for nodes in sizes))
            given = self._within(Draft(self.block_size, 0, config.verify_budget or 0))
            offered = config.verify_budget is None and getattr(drafter, "scored", False)
            if offered and config.slots >= BUDGET_ROWS and jax.default_backend() != "cpu":
                self._budgets = budgets(self.block_size)
            chains = dict.fromkeys((*map(Draft, block_sizes(self.block_size)), given))
            self.choices = (*chains, *trees, *self._budgets)
        plain = (PLAIN,) if config.plain and drafter else ()
        self.programs = tuple(dict.fromkeys((*map(self.program, self.choices), *plain)))
        usual = self.program(self._usual)
        self.first = tuple(draft for draft in self.programs if draft in (usual, PLAIN))
        self.choosers: dict[int, Chooser[Draft]] = {}
        self.limited_steps = 0
        self._limited: dict[tuple[int, tuple[Draft, ...]], Chooser[Draft]] = {}  # for requests that have a limit

    def program(self, draft: Draft) -> Draft:
        """What `Slots.decode` is asked for: a block size of 1 is no speculation where there is a choice."""
        return PLAIN if self.auto and draft == Draft(1) else draft

    def programs_of(self, rows: int) -> list[Draft]:
        """Those of `programs` that there are for so many rows."""
        least = dict.fromkeys(self._small, SMALL_ROWS) | dict.fromkeys(self._budgets, BUDGET_ROWS)
        return [draft for draft in self.programs if rows >= least.get(draft, 1)]

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes of `programs`; 1 is no speculation."""
        return tuple(sorted({max(1, draft.block_size) for draft in self.programs}))

    def _takes(self, most: int, draft: Draft) -> bool:
        """Whether a request takes this draft whose largest block size is `most`; a tree counts as the block that it is
        made of."""
        return not self._depth(draft) or draft.block_size <= most > 1

    def check_limit(self, most: int | None) -> None:
        """Raises RequestError if there is no program for requests whose largest block size is `most`."""
        if most is not None and not any(self._takes(most, draft) for draft in self.programs):
            raise invalid(
                f"steps cannot be limited to blocks of {most} here, because the engine was made with plain=False or is "
                "deterministic; leave the limit out",
                "speculation",
            )

    def _depth(self, draft: Draft) -> int:
        """Tokens that a step with this draft proposes for a row one after the other."""
        block_size = self.program(draft).block_size
        return self.drafter.depth(block_size) if self.drafter and block_size else 0

    def proposed(self, draft: Draft) -> int:
        """Tokens that a step with this draft proposes for a row."""
        return draft.nodes or self._depth(draft)

    def _within(self, draft: Draft) -> Draft:
        """The same without a budget that leaves nothing out."""
        return draft if draft.budget <= self.proposed(draft) else draft._replace(budget=0)

    def positions(self, draft: Draft) -> int:
        """Positions that a step with this draft verifies of a row, on average."""
        return draft.budget or self.proposed(draft) + 1

    @property
    def width(self) -> int:
        """Most tokens a step can commit per row."""
        depth = self.drafter.depth(self.block_size) if self.drafter else 0
        return 1 + (min(depth, self.tree) if self.tree else depth)

    def measured(self, seconds: Mapping[tuple[Draft, int], float]) -> None:
        """Makes a chooser for each number of rows, given the seconds of a step of each program; programs that were not
        measured are not chosen. What was learned of requests stays."""
        before = dict(self.choosers)
        known = [chooser.estimates for chooser in before.values()]
        estimates = known[0] if known else Estimates(max(map(self._depth, self.choices)))
        self.choosers.clear()
        self._limited.clear()
        for rows in dict.fromkeys(rows for _, rows in seconds):
            used = before[rows].used if rows in before else {}
            self.choosers[rows] = Chooser(
                {
                    draft: Candidate(
                        self._depth(draft), time, draft.nodes, draft.budget * rows, steps=used.get(draft, 0)
                    )
                    for draft in self.choices
                    if (time := seconds.get((self.program(draft), rows))) is not None
                },
                estimates,
            )

    def forget(self) -> None:
        """Forgets what was learned of requests; measured times stay."""
        estimates = Estimates(max(map(self._depth, self.choices)))
        for chooser in (*self.choosers.values(), *self._limited.values()):
            chooser.estimates = estimates

    def choose(
        self, requests: Iterable[Hashable], rows: int, most: int | None = None
    ) -> tuple[Draft, Chooser[Draft] | None]:
        """The draft of the next visit of these requests, in a program of so many rows, and who chose it.

        Args:
            most: the largest block size that they all take, see `Request.max_block_size`.
        """
        chooser = self.choosers.get(rows)
        if chooser is None:
            return self._usual if most is None or self._takes(most, self._usual) else PLAIN, None
        if most is not None:
            chooser = self._limited_to(most, chooser, rows)
        return chooser.choose(requests), chooser

    def _limited_to(self, most: int, chooser: Chooser[Draft], rows: int) -> Chooser[Draft]:
        """One that chooses among fewer candidates, with the same times and estimates."""
        candidates = {draft: one for draft, one in chooser.candidates.items() if self._takes(most, draft)}
        if len(candidates) == len(chooser.candidates):
            return chooser
        return self._limited.setdefault((rows, tuple(candidates)), Chooser(candidates, chooser.estimates))

    def plain_seconds(self, rows: int) -> float | None:
        """Seconds of a step of so many rows without speculation; None if that was not measured."""
        chooser = self.choosers.get(rows)
        found = chooser.candidates.values() if chooser else ()
        return next((one.seconds for one in found if not one.proposed and one.seconds), None)

    def used(self, steps: int) -> dict[str, int]:
        """How many of the engine's `steps` were taken with each draft, by its label."""
        alone = Counter({self._usual: steps - self.limited_steps})
        if self.limited_steps:
            alone[Draft(1)] += self.limited_steps
        used = [chooser.used for chooser in self.choosers.values()] or [alone]
        return {draft.label: sum(counts[draft] for counts in used) for draft in used[0]}
