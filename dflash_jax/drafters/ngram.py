"""n-gram proposals: what followed the last times the text ended as it ends now. They need no network, so they serve any
target; `Mixture` has them beside a drafter, for texts that repeat what was said before.

Prompt lookup (A. Saxena, 2023) and SuffixDecoding (arXiv 2411.04975) propose so; here the search is part of the step.
Shapes: B rows.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, PyTree

from dflash_jax.cache import Capacity, Carried
from dflash_jax.config import TargetConfig
from dflash_jax.decoding import copying
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.sampling import if_any
from dflash_jax.decoding.state import DraftConfig, Query, Seen, TargetModel
from dflash_jax.drafters.around import Around

NAME = "ngram"  # in the place of a checkpoint; a folder of this name is `./ngram`
BRANCHES = 4  # least copies that a tree begins with
LONG = copying.LONGEST  # tokens that match, with which no drafter is asked


class Stateless(struct.PyTreeNode):
    """What a drafter carries that needs nothing but the text so far, which `Choice.history` has."""

    def begin(self, row: Int[Array, ""]) -> Self:
        return self

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> Self:
        return self

    def restore(self, snapshot: PyTree, row: Int[Array, ""], end: Int[Array, ""]) -> Self:
        return self

    def partition(self) -> Self:
        return self


@dataclass(frozen=True)
class NgramConfig:
    """Of n-gram proposals alone.

    Attributes:
        block_size: the largest one.
    """

    block_size: int = 16

    def check_pair(self, target: TargetConfig) -> None:
        """Any target will do."""


class FromText(struct.PyTreeNode):
    """A drafter that proposes chains from nothing but the text so far; what they are, others say."""

    config: NgramConfig = struct.field(pytree_node=False, default=NgramConfig())

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def depth(self, block_size: int) -> int:
        return block_size - 1

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Carried:
        return Stateless()

    def commit(self, target: TargetModel, state: PyTree, seen: Seen) -> PyTree:
        return state


class Ngram(FromText):
    """Proposes n-grams, for any target: a chain of the best copy, or a tree of several that part at the anchor."""

    scored: ClassVar[bool] = True

    def propose(self, target: TargetModel, state: PyTree, query: Query, choice: Choice) -> Proposal:
        depth, nodes = self.depth(query.block_size), choice.nodes
        count = min(max(BRANCHES, -(-nodes // depth)), choice.ranks) if nodes else 1
        copied = copying.allowed(choice, copying.copies(choice.history, choice.known, depth, count))
        return copying.tree(choice, copied) if nodes else copying.chain(choice, copied)


@dataclass(frozen=True)
class LongerBlocks:
    """The configuration of a drafter, for larger blocks than its own.

    Attributes:
        drafter: its own.
        block_size: the largest one.
    """

    drafter: DraftConfig
    block_size: int

    @property
    def proposal_sharpness(self) -> tuple[float, ...]:
        return getattr(self.drafter, "proposal_sharpness", ())

    def check_pair(self, target: TargetConfig) -> None:
        self.drafter.check_pair(target)


class Mixture(Around):
    """A drafter with n-grams beside it. In a chain, a row goes on as its text did before where that promises more
    tokens than its drafter does; while the last `LONG` tokens of all rows stand in their text before, the drafter is
    not run. In a tree, the best copy competes with the drafter's nodes.

    Attributes:
        block_size: the largest one, unless the drafter's is larger. What a drafter of smaller blocks does not reach is
            for copies alone.
    """

    block_size: int = struct.field(pytree_node=False, default=NgramConfig.block_size, kw_only=True)

    @property
    def config(self) -> DraftConfig:
        own = self.drafter.config
        return own if own.block_size >= self.block_size else LongerBlocks(own, self.block_size)

    def depth(self, block_size: int) -> int:
        own = min(block_size, self.drafter.config.block_size)
        return self.drafter.depth(own) + block_size - own

    def propose(self, target: TargetModel, state: PyTree, query: Query, choice: Choice) -> Proposal:
        copied = copying.copies(choice.history, choice.known, self.depth(query.block_size))
        copied = copying.allowed(choice, copied)
        how = choice if choice.nodes else choice.replace(scored=self.scored)
        own = query.replace(block_size=min(query.block_size, self.drafter.config.block_size))
        drafted = lambda: copying.extended(self.drafter.propose(target, state, own, how), copied)
        if choice.nodes:
            proposal = drafted()
            ranked = proposal.parents is not None and proposal.scores is not None
            return copying.joined(proposal, copied) if ranked else proposal
        long = copied.matched[:, 0] >= LONG
        long &= True if copied.fits is None else copied.fits[:, 0, 0]
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(drafted))
        proposal = if_any(~long & (query.lengths > 0), drafted, nothing)
        if proposal.parents is not None:  # a tree that nobody asked for
            return proposal
        found = copying.either(proposal, copied, long)
        return found if choice.scored else found.replace(scores=None)


def named(source: str) -> tuple[bool, str | None]:
    """Whether n-grams are asked for where a drafter is named, and the checkpoint that is named, if one is: "ngram",
    "ngram+CHECKPOINT" or "CHECKPOINT".

    Raises:
        ValueError: nothing stands after the plus.
    """
    first, plus, rest = source.partition("+")
    if first != NAME:
        return False, source
    if plus and not rest:
        raise ValueError(f"{source!r} must name a drafter after the plus, or be {NAME!r} alone")
    return True, rest or None
