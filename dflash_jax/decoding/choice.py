"""How a step chooses tokens: everything but the logits.

Target and drafter choose through the same object, so settings, penalties and noise are applied the same way.
Shapes: B rows, T block positions, P proposed tokens, W positions with noise, V vocabulary.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.penalties import History, Penalties, penalise
from dflash_jax.decoding.proposal import Block
from dflash_jax.decoding.sampling import Sampling, first_argmax, gumbel_noise, perturbed_scores, select

Proposals = Literal["coupled", "argmax", "independent"]


class Choice(struct.PyTreeNode):
    """Settings, history and noise of one step.

    Attributes:
        sampling, penalties, history: of every row.
        known: tokens of the history that count; the next one has this position.
        noise: by depth: of position `known + d`. All nodes of a tree at one depth share it.
        decodable: ids that may be chosen; None is all.
        plain: whether the best penalised score is taken, without temperature, filters and noise.
    """

    sampling: Sampling
    penalties: Penalties
    history: History
    known: Int[Array, " B"]
    noise: Float[Array, "B W V"]
    decodable: Bool[Array, " V"] | None
    plain: bool = struct.field(pytree_node=False, default=False)

    def for_block(self, logits: Float[Array, "B T V"], block: Block) -> Int[Array, "B T"]:
        """The target's token behind every position of a block, each given its own ancestors."""
        if block.tree is None:
            seen, noise = None, self.noise[:, : logits.shape[1]]
        else:
            seen = block.tree.ancestors[:, :, 1:]
            noise = jnp.take_along_axis(self.noise, block.tree.depth[:, :, None], axis=1)
        logits = self._allowed(penalise(logits, self.penalties, self.history, self.known, block.proposal.tokens, seen))
        return select(logits, noise, self.sampling)

    def chain_scores(self, logits: Float[Array, "B T V"], following: Int[Array, "B P"]) -> Float[Array, "B T V"]:
        """What the target's tokens behind a chain are the largest of, given the tokens between its positions."""
        logits = self._allowed(penalise(logits, self.penalties, self.history, self.known, following))
        return perturbed_scores(logits, self.noise, self.sampling)

    def tokens(self, logits: Float[Array, "B T _"], *, depth: int = 0, **given: Any) -> Int[Array, "B T"]:
        """Tokens for the depths `depth..depth+T-1`, each from its own logits.

        Args:
            before: tokens proposed at smaller depths, which penalties count.
            forbidden: ids that are never proposed, such as a mask token.
            vocabulary: the id of each of the logits, of a drafter with a reduced vocabulary.
        """
        logits = self.allowed(logits, **given)
        noise = self.noise[:, depth : depth + logits.shape[1]]
        return first_argmax(logits) if self.plain else select(logits, noise, self.sampling)

    def scores(self, logits: Float[Array, "B T _"], *, depth: int = 0, **given: Any) -> Float[Array, "B T V"]:
        """What `tokens` takes the largest of: with it, a tree of likely tokens can be ranked."""
        logits = self.allowed(logits, **given)
        noise = self.noise[:, depth : depth + logits.shape[1]]
        return logits if self.plain else perturbed_scores(logits, noise, self.sampling)

    def among(self, scores: Float[Array, "B C"], candidates: Int[Array, "B C"], *, depth: int = 0) -> Int[Array, " B"]:
        """One of a few candidates for one depth, given what is known of each (see `allowed`)."""
        at = jnp.arange(scores.shape[0])[:, None]
        noise = self.noise[:, depth][at, candidates][:, None]
        best = first_argmax(scores[:, None]) if self.plain else select(scores[:, None], noise, self.sampling)
        return jnp.take_along_axis(candidates, best, axis=1)[:, 0]

    def allowed(
        self,
        logits: Float[Array, "B T _"],
        *,
        before: Int[Array, "B P"] | None = None,
        forbidden: tuple[int, ...] = (),
        vocabulary: Int[Array, " Vd"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of all ids under the row's penalties, minus infinity for what must not be chosen; arguments as in
        `tokens`."""
        B, T = logits.shape[:2]
        if vocabulary is not None:
            nothing = jnp.full((B, T, self.noise.shape[2]), -jnp.inf, logits.dtype)
            logits = nothing.at[:, :, vocabulary].set(logits)
        seen = None if before is None else jnp.ones((1, T, before.shape[1]), bool)
        logits = penalise(logits, self.penalties, self.history, self.known, before, seen)
        if forbidden:
            ids = jnp.arange(logits.shape[-1])
            taken = jnp.any(ids[:, None] == jnp.asarray(forbidden)[None], axis=1)
            logits = jnp.where(taken[None, None], -jnp.inf, logits)
        return self._allowed(logits)

    def for_drafting(self, proposals: Proposals) -> "Choice":
        """The same for a drafter.

        "coupled" adds the target's noise to the draft scores, so that draft and target tend to pick the
        same token at any temperature; "argmax" adds none; "independent" adds noise of its own.
        """
        if proposals == "argmax":
            return self.replace(plain=True)
        if proposals == "independent":
            own = self.sampling.replace(key=jax.vmap(lambda k: jax.random.fold_in(k, 2**31))(self.sampling.key))
            positions = self.known[:, None] + jnp.arange(self.noise.shape[1])[None]
            return self.replace(noise=gumbel_noise(own, positions, self.noise.shape[2]))
        return self

    def _allowed(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        return logits if self.decodable is None else jnp.where(self.decodable[None, None], logits, -jnp.inf)
