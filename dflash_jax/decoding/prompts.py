"""Prompts that a pass reads: alone, or beside rows that decode.

Shapes: B rows of the program, C tokens of each at most, b t its block as the pass returns it, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax.cache import commit, once_read
from dflash_jax.decoding.automata import Automata
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.logprobs import Logprobs, log_probabilities
from dflash_jax.decoding.penalties import remember, remember_prompts
from dflash_jax.decoding.sampling import gumbel_noise
from dflash_jax.decoding.state import DraftModel, RowSettings, Seen, State, TargetModel, all_rows
from dflash_jax.mesh import constrain, row_parts, split_rows
from dflash_jax.models.attention import Inputs
from dflash_jax.packing import Packing


class Prompts(struct.PyTreeNode):
    """The next tokens of some prompts.

    Attributes:
        rows: rows to fill: idle, begun, all different; and any others with a count of 0, which stay as they are.
        tokens, counts: of each row, and how many of them are prompt.
        last: whether the prompt ends here: the row then starts decoding.
        settings: of each row, for its answer.
        lengths: committed positions of each row before these, 0 for a row with a count of 0; see `after`.
        total: tokens of all of them together, in each part of a mesh, at most: products have no more rows. 0 is B C.
    """

    rows: Int[Array, " B"]
    tokens: Int[Array, "B C"]
    counts: Int[Array, " B"]
    last: Bool[Array, " B"]
    settings: RowSettings
    lengths: Int[Array, " B"] | None = None
    total: int = struct.field(pytree_node=False, default=0)

    def after(self, state: State) -> "Prompts":
        """The same, to be read after what is committed of the rows."""
        lengths = jnp.where(self.counts > 0, state.lengths[self.rows], 0)  # or all would cost as much as the longest
        return self.replace(lengths=lengths)

    @property
    def inputs(self) -> Inputs:
        """As a pass is given them."""
        assert self.lengths is not None
        B, C = self.tokens.shape
        tokens = constrain(self.tokens, P(split_rows(B)))
        positions = self.lengths[:, None] + jnp.arange(C)[None]
        packing = Packing.of(self.counts, C, self.total * row_parts() // B) if self.total else None
        return Inputs(tokens, positions, None, self.lengths, self.rows, counts=self.counts, packing=packing)


class Read(NamedTuple):
    """What a pass found of prompts.

    Attributes:
        inputs: what it was given.
        hidden: final states.
        features: outputs of the tapped target layers, side by side.
        fresh: for every entry of the target's cache.
    """

    inputs: Inputs
    hidden: Float[Array, "b t D"]
    features: Float[Array, "b t FD"]
    fresh: tuple[PyTree, ...]

    def last(self) -> Float[Array, "B 1 D"]:
        """The final states at the last token of each row."""
        assert self.inputs.counts is not None
        final, packing = jnp.maximum(self.inputs.counts - 1, 0)[:, None], self.inputs.packing
        if packing is None:
            return jnp.take_along_axis(self.hidden, final[:, :, None], axis=1)
        return packing.along(self.hidden, jnp.take_along_axis(packing.places, final, axis=1))


def commit_prompts(target: TargetModel, drafter: DraftModel | None, state: State, read: Read) -> State:
    """Commits what was read to the target's cache and the drafter's state."""
    (tokens, positions, _, lengths, rows, _, counts, packing), features = read.inputs, read.features
    assert lengths is not None
    assert counts is not None
    kept = once_read(counts, read.hidden)
    state = state.replace(target_cache=commit(state.target_cache, read.fresh, lengths, kept, rows=rows))
    if drafter is None:
        return state
    features = features if packing is None else packing.spread(features)
    seen = Seen(tokens, features, positions, lengths, kept, rows)
    return state.replace(draft=drafter.commit(target, state.draft, seen))


def first_tokens(
    target: TargetModel,
    state: State,
    prompts: Prompts,
    logits: Float[Array, "B 1 V"],
    automata: Automata | None,
    logprobs: int | None,
    sampled_logprobs: bool = False,
) -> tuple[State, Int[Array, "B 1"], Logprobs | None]:
    """Rows whose prompt has ended choose their first token and decode from then on; others have more committed.

    Args:
        logits: after the last token of each.
        automata: of the rows' constraints, where they may have any.
        logprobs, sampled_logprobs: see `speculative_step`.

    Returns:
        The state, the first token of each row, which counts where the prompt ends, and its log-probabilities.
    """
    rows, counts, lengths, given = prompts.rows, prompts.counts, prompts.lengths, prompts.settings
    assert lengths is not None
    end, read = lengths + counts, counts > 0
    history = remember_prompts(state.paged_history, prompts.tokens, rows, lengths, counts, given.prompt)
    of_rows = history.of_rows(rows)
    noise = gumbel_noise(given.sampling, end[:, None], target.config.vocab_size)
    settings_of_rows = given.sampling, given.penalties, of_rows, end, noise, target.decodable
    choice = Choice(*settings_of_rows, stops=given.stop_tokens, automata=automata, walk=given.walk)
    begun = None if given.walk is None else given.walk.state[:, None]
    token, scores = choice.tokens(logits, states=begun), None
    if logprobs is not None:
        sampled = partial(choice.sampled_scores, logits, token, states=begun) if sampled_logprobs else None
        scores = log_probabilities(choice.masked(logits), token, given.scored, logprobs, sampled)
    goes_on = prompts.last & ~jnp.any(token == given.stop_tokens, axis=1)
    budgets = jnp.where(goes_on, given.remaining - 1, 0)
    of_rows = remember(of_rows, token, end, (read & prompts.last).astype(jnp.int32)).replace(pages=None)
    written = jnp.where(read, rows, state.lengths.shape[0])
    walk = given.walk
    if walk is not None and (after := choice.following(begun, token)) is not None:
        walk = walk.replace(state=after[:, 0])
    settings = given._replace(remaining=budgets, walk=walk)._asdict()
    del settings["prompt"]
    filled = state.replace(rows=written, anchor=token[:, 0], lengths=end, history=of_rows, **settings)
    return all_rows(state.replace(history=history.replace(pages=None)), filled), token, scores


def stacked(settings: tuple[RowSettings, ...]) -> RowSettings:
    """The settings of several rows as those of a program."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *settings)


def stacked_on_host(settings: Sequence[Sequence[RowSettings]]) -> RowSettings:
    """The settings [M, B, ...] of the rows of several steps, whose leaves are on the host but for keys."""

    def stack(*leaves: ArrayLike) -> Array | np.ndarray:
        keys = isinstance(leaves[0], jax.Array) and jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key)
        known = {id(leaf): np.asarray(jax.random.key_data(leaf) if keys else leaf) for leaf in leaves}
        both = np.stack([known[id(leaf)] for leaf in leaves])
        both = both.reshape(len(settings), -1, *both.shape[1:])
        return jax.random.wrap_key_data(jnp.asarray(both)) if keys else both

    return jax.tree.map(stack, *(one for of_step in settings for one in of_step))
