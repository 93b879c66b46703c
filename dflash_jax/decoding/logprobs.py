"""Log-probabilities of chosen tokens and of the likeliest ones.

They are the target's own: of its logits as they are, before penalties, temperature and filters. If asked for, there are
those in the distribution that tokens are sampled from, too.
Shapes: B rows, T positions, V vocabulary, N alternatives.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.sampling import if_any
from dflash_jax.mesh import HEADS, current_mesh, parts_of


class Logprobs(struct.PyTreeNode):
    """Natural logarithms of probabilities; zeros where no row asked for them.

    Attributes:
        chosen: of the chosen token.
        top, ids: of the N likeliest tokens, and which these are; ties in order of id.
        sampled: of the chosen token, in the distribution that it was sampled from; None if it was not asked for.
        sampled_top, sampled_ids: of the N likeliest tokens in that distribution, -inf where it cannot pick them, and
            which these are; None if they were not asked for.
    """

    chosen: Float[Array, "B T"]
    top: Float[Array, "B T N"]
    ids: Int[Array, "B T N"]
    sampled: Float[Array, "B T"] | None = None
    sampled_top: Float[Array, "B T N"] | None = None
    sampled_ids: Int[Array, "B T N"] | None = None


def log_probabilities(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    asked: Bool[Array, " B"],
    alternatives: int,
    sampled: Callable[[], Float[Array, "B T V"]] | None = None,
) -> Logprobs:
    """Log-probabilities of `tokens` and of the `alternatives` most likely ones; zeros if no row asked for them.

    Args:
        sampled: returns the scores whose softmax is the distribution that they were sampled from; None leaves it out.
    """

    def of_chosen(logits: Float[Array, "B T V"]) -> tuple[Float[Array, "B T"], Float[Array, "B T V"]]:
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        # A lookup would gather a split vocabulary.
        is_chosen = jnp.arange(logits.shape[-1])[None, None] == tokens[..., None]
        return jnp.sum(jnp.where(is_chosen, scores, 0.0), axis=-1), scores

    def measured() -> Logprobs:
        chosen, scores = of_chosen(logits)
        top = _largest(scores, alternatives)
        if sampled is None:
            return Logprobs(chosen, *top)
        chosen_there, there = of_chosen(sampled())
        return Logprobs(chosen, *top, chosen_there, *(_largest(there, alternatives) if alternatives else ()))

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measured))
    return if_any(asked, measured, lambda: nothing)


def _largest(scores: Float[Array, "B T V"], count: int) -> tuple[Float[Array, "B T N"], Int[Array, "B T N"]]:
    """The largest scores in order, and where: first within each device's part of the vocabulary, then of those."""
    parts = parts_of(current_mesh(), HEADS)
    size = scores.shape[-1] // parts
    best, ids = jax.lax.top_k(scores.reshape(*scores.shape[:-1], parts, size), min(count, size))
    ids = ids + size * jnp.arange(parts, dtype=ids.dtype)[None, None, :, None]
    best, ids = (x.reshape(*scores.shape[:-1], -1) for x in (best, ids))
    best, at = jax.lax.top_k(best, count)
    return best, jnp.take_along_axis(ids, at, axis=-1)
