"""What a decoding batch carries from step to step, and what the algorithm asks of its models.

Shapes: B rows, T block positions, J committed positions, Q stop tokens, V vocabulary, FD tapped features side by side.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax.cache import Cache, Capacity, Carried, Pages, Windowed
from dflash_jax.config import TargetConfig
from dflash_jax.decoding.automata import FREE, Walk, unconstrained
from dflash_jax.decoding.calibration import Calibration, init_calibration
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.penalties import History, Penalties, empty_history, no_penalties
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.sampling import Sampling, greedy_rows
from dflash_jax.models.attention import Inputs


class TargetModel(Protocol):
    """What the algorithm asks of a target model, a pytree of its parameters (see `target.Target`)."""

    @property
    def config(self) -> TargetConfig: ...
    @property
    def decodable(self) -> Bool[Array, " V"] | None: ...
    @property
    def dtype(self) -> jnp.dtype: ...
    def table(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding table itself, for drafters."""
        ...

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Products with the head itself, for drafters."""
        ...

    def init_cache(self, rows: int, slots: Capacity, widest: int = 1) -> Cache: ...
    def forward_all(
        self, blocks: Sequence[Inputs], cache: Cache, *, taps: tuple[int, ...] = ()
    ) -> list[tuple[Float[Array, "b t D"], Float[Array, "b t FD"], tuple[PyTree, ...]]]:
        """See `target.Target.forward_all`. More than one block is given in steps alone that read prompts, too, and
        packing in those with a budget."""
        ...

    def unembed(self, hidden: Float[Array, "b t D"]) -> Float[Array, "b t V"]: ...


class Query(struct.PyTreeNode):
    """What a drafter is asked: to propose what follows each row's anchor.

    Attributes:
        anchor: last committed token of each row, which stands at position `lengths`.
        lengths: committed positions of each row before it.
        block_size: positions of the block, the anchor included.
        rows: row of the drafter's state of each of these rows, all different; None if they are every row, in order.
    """

    anchor: Int[Array, " B"]
    lengths: Int[Array, " B"]
    block_size: int = struct.field(pytree_node=False)
    rows: Int[Array, " B"] | None = None


class Seen(struct.PyTreeNode):
    """Positions that a drafter is to add to its state: of a chunk of a prompt, or accepted in a step.

    Attributes:
        tokens, features, positions: of these positions, in order; what is not kept is arbitrary. Features are the
            outputs of the tapped target layers, side by side.
        lengths: committed positions before them.
        kept: how many of each row are committed, the first ones.
        rows: see `Query`.
    """

    tokens: Int[Array, "B J"]
    features: Float[Array, "B J FD"]
    positions: Int[Array, "B J"]
    lengths: Int[Array, " B"]
    kept: Int[Array, " B"]
    rows: Int[Array, " B"] | None = None


class DraftConfig(Protocol):
    """What an engine asks of a drafter's description.

    It may have `proposal_sharpness`, too: where the calibration of its proposals begins (see `calibration`).
    """

    @property
    def block_size(self) -> int: ...
    def check_pair(self, target: TargetConfig) -> None:
        """Raises ValueError if the drafter was not made for this target configuration."""
        ...


class Drafting(Protocol):
    """How a drafter proposes. Its state is its own affair."""

    def depth(self, block_size: int) -> int:
        """Nodes on the longest path that `propose` proposes."""
        ...

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Carried:
        """What it carries before anything is committed.

        Args:
            rows: of the batch.
            slots: positions of every row, or the pages that they share, or the last positions.
            widest: the most positions that one `commit` adds.
        """
        ...

    def propose(self, target: TargetModel, state: PyTree, query: Query, choice: Choice) -> Proposal:
        """Proposes for the positions after the anchor.

        Args:
            state: what the drafter carries.
            choice: picks tokens under each row's settings, as the target will. It may be asked between passes of the
                drafter.
        """
        ...

    def commit(self, target: TargetModel, state: PyTree, seen: Seen) -> PyTree:
        """The state after more committed positions."""
        ...


class DraftModel(Drafting, Protocol):
    """What the algorithm asks of a drafter, a pytree of its parameters (see `drafters.base.Drafter`)."""

    @property
    def config(self) -> DraftConfig: ...
    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it needs."""
        ...


class State(struct.PyTreeNode):
    """Everything a decoding batch carries from step to step. The engine's own programs donate it.

    Attributes:
        anchor: last committed token of each row. Its keys and values are not in the caches yet: it sits
            at position `lengths`.
        lengths: committed positions of each row, in the target's cache and the drafter's state alike.
        remaining: tokens each row may still commit; 0 is an idle row, which may be waiting for more of its prompt.
        stop_tokens: tokens that end a row, padded with -1.
        sampling, penalties: settings of each row.
        history: tokens of each row up to its anchor, which penalties look at.
        scored: rows that want log-probabilities.
        target_cache: holds exactly the positions before the anchor.
        draft: what the drafter carries; None without one.
        calibration: of its proposals; None without one.
        rows: rows of the cache and of what the drafter carries that these are (see `some_rows`); None is all, in order.
        walk: where each row is in the automaton of its constraint; None in programs that serve none.
    """

    anchor: Int[Array, " B"]
    lengths: Int[Array, " B"]
    remaining: Int[Array, " B"]
    stop_tokens: Int[Array, "B Q"]
    sampling: Sampling
    penalties: Penalties
    history: History
    scored: Bool[Array, " B"]
    target_cache: Cache
    draft: Carried | None
    calibration: Calibration | None = None
    rows: Int[Array, " B"] | None = None
    walk: Walk | None = None

    @property
    def paged_history(self) -> History:
        """The history with the pages of its rows, where it lies in such."""
        cache = self.target_cache
        if cache.held is None or cache.pages is None:
            return self.history
        return self.history.replace(pages=cache.pages if self.rows is None else cache.pages[self.rows])


class RowSettings(NamedTuple):
    """Settings of one row at admission; the fields are those of `State` without their row axis, `walk` at the beginning
    of an answer, and `prompt`: how many of the tokens that are read are a prompt, if not all; others are answer."""

    remaining: Int[Array, ""]
    stop_tokens: Int[Array, " Q"]
    sampling: Sampling
    penalties: Penalties
    scored: Bool[Array, ""]
    walk: Walk | None = None
    prompt: Int[Array, ""] | None = None


def init_state(
    target: TargetModel,
    drafter: DraftModel | None,
    rows: int,
    slots: int | Pages | Windowed,
    stop_width: int,
    widest: int = 1,
    *,
    constraints: bool = False,
) -> State:
    """An idle batch of `rows` rows, each with room for `slots` committed tokens.

    Args:
        slots: positions of every row, or the pages that they share; with a window of the drafter, if it has one.
        stop_width: stop tokens a row may have.
        widest: the longest chunk of a prompt that will be committed at once.
        constraints: whether rows may have one.
    """
    own, drafts = (slots.slots, slots.of_drafter) if isinstance(slots, Windowed) else (slots, slots)
    return State(
        anchor=jnp.zeros(rows, jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        remaining=jnp.zeros(rows, jnp.int32),
        stop_tokens=jnp.full((rows, stop_width), -1, jnp.int32),
        sampling=greedy_rows(rows),
        penalties=no_penalties(rows),
        history=empty_history(rows, own),
        scored=jnp.zeros(rows, jnp.bool_),
        target_cache=target.init_cache(rows, own, widest),
        draft=None if drafter is None else drafter.init_state(rows, drafts, widest),
        calibration=None if drafter is None else _calibration(drafter),
        walk=unconstrained(rows) if constraints else None,
    )


def _calibration(drafter: DraftModel) -> Calibration:
    config = drafter.config
    return init_calibration(drafter.depth(config.block_size), getattr(config, "proposal_sharpness", ()))


def begin_row(state: State, row: Int[Array, ""], length: Int[Array, ""]) -> State:
    """The state with an idle row made ready for a new sequence, as if so many of its tokens were committed."""
    return state.replace(
        lengths=state.lengths.at[row].set(length),
        target_cache=state.target_cache.begin(row),
        draft=None if state.draft is None else state.draft.begin(row),
    )


_OF_ROWS = ("anchor", "lengths", "remaining", "stop_tokens", "sampling", "penalties", "scored", "walk")


def some_rows(state: State, rows: Int[Array, " B"]) -> State:
    """The state of these rows alone, all different, which a step then advances; caches stay as they are.

    Where a mesh splits rows into parts, each part has as many of these, in the order of the parts.
    """
    fields = {name: jax.tree.map(lambda x: x[rows], getattr(state, name)) for name in _OF_ROWS}
    history = state.paged_history.of_rows(rows).replace(pages=None)
    return state.replace(rows=rows, history=history, **fields)


def all_rows(state: State, some: State) -> State:
    """`state` with what became of some of its rows; those beyond its last one are left out."""
    assert some.rows is not None
    put = lambda x, y: x.at[some.rows].set(y)
    fields = {name: jax.tree.map(put, getattr(state, name), getattr(some, name)) for name in _OF_ROWS}
    fields["history"] = state.history.with_rows(some.rows, some.history, paged=state.target_cache.held is not None)
    carried = {"target_cache": some.target_cache, "draft": some.draft, "calibration": some.calibration}
    return state.replace(**carried, **fields)


def without_idle_rows(state: State) -> State:
    """The state as a step sees it: idle rows have no length and neutral settings, lest they count where a step costs
    the longest row, or what any row asks for."""
    busy = state.remaining > 0
    only = lambda x, idle: jnp.where(busy, x, idle)
    return state.replace(
        lengths=only(state.lengths, 0),
        sampling=state.sampling.replace(temperature=only(state.sampling.temperature, 0.0)),
        penalties=jax.tree.map(only, state.penalties, no_penalties(busy.shape[0])),
        scored=state.scored & busy,
        walk=None if state.walk is None else state.walk.replace(state=only(state.walk.state, FREE)),
    )
