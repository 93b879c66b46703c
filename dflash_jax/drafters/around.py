"""Drafters around others: they do what the one inside does, and something more.

Shapes: B rows, R rows of the batch, S positions of a row, J committed positions, FD tapped features side by side.
"""

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax.cache import Capacity, Carried
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.state import DraftConfig, DraftModel, Query, Seen, TargetModel
from dflash_jax.mesh import ROWS
from dflash_jax.sharding import partition


class Around(struct.PyTreeNode):
    """Does what the drafter inside does.

    Attributes:
        drafter: the one inside.
    """

    drafter: DraftModel

    @property
    def config(self) -> DraftConfig:
        return self.drafter.config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def scored(self) -> bool:
        return getattr(self.drafter, "scored", False)

    def depth(self, block_size: int) -> int:
        return self.drafter.depth(block_size)

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Carried:
        return self.drafter.init_state(rows, slots, widest)

    def propose(self, target: TargetModel, state: PyTree, query: Query, choice: Choice) -> Proposal:
        return self.drafter.propose(target, state, query, choice)

    def commit(self, target: TargetModel, state: PyTree, seen: Seen) -> PyTree:
        return self.drafter.commit(target, state, seen)


def inmost(drafter: DraftModel | None) -> DraftModel | None:
    """The drafter without what is around it."""
    return inmost(drafter.drafter) if isinstance(drafter, Around) else drafter


def with_inmost(drafter: DraftModel | None, new: DraftModel) -> DraftModel:
    """The same with another drafter inside."""
    if not isinstance(drafter, Around):
        return new
    around: DraftModel = drafter.replace(drafter=with_inmost(drafter.drafter, new))
    return around


class Kept(struct.PyTreeNode):
    """What a drafter carries, and the features of all committed positions; a snapshot has one row of some positions."""

    carried: PyTree
    features: Float[Array, "R S FD"]

    def begin(self, row: Int[Array, ""]) -> Self:
        return self.replace(carried=self.carried.begin(row))

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> Self:
        size = (1, count, self.features.shape[2])
        features = jax.lax.dynamic_slice(self.features, (row, start, jnp.int32(0)), size)
        return self.replace(carried=self.carried.snapshot(row, start, count), features=features)

    def restore(self, snapshot: "Kept", row: Int[Array, ""], end: Int[Array, ""]) -> Self:
        at = row, end - snapshot.features.shape[1], jnp.int32(0)
        features = jax.lax.dynamic_update_slice(self.features, snapshot.features, at)
        return self.replace(carried=self.carried.restore(snapshot.carried, row, end), features=features)

    def partition(self) -> Self:
        return self.replace(carried=partition(self.carried), features=P(ROWS))


class Keeping(Around):
    """Keeps the target's features that the drafter is given, from which it can learn later.

    Attributes:
        width: FD.
        dtype: of the features.
    """

    width: int = struct.field(pytree_node=False, kw_only=True)
    dtype: jnp.dtype = struct.field(pytree_node=False, kw_only=True)

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Carried:
        assert isinstance(slots, int)
        carried = self.drafter.init_state(rows, slots, widest)
        return Kept(carried, jnp.zeros((rows, slots, self.width), self.dtype))

    def propose(self, target: TargetModel, state: Kept, query: Query, choice: Choice) -> Proposal:
        return self.drafter.propose(target, state.carried, query, choice)

    def commit(self, target: TargetModel, state: Kept, seen: Seen) -> Kept:
        B, J = seen.tokens.shape
        rows, index = jnp.arange(B) if seen.rows is None else seen.rows, jnp.arange(J)[None]
        places = jnp.where(index < seen.kept[:, None], seen.lengths[:, None] + index, state.features.shape[1])
        features = state.features.at[rows[:, None], places].set(seen.features.astype(self.dtype), mode="drop")
        return state.replace(carried=self.drafter.commit(target, state.carried, seen), features=features)
