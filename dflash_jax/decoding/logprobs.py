"""Log-probabilities of chosen tokens and of the likeliest ones.

They are the target's own: of its logits as they are, before penalties, temperature and filters.
Shapes: B rows, T positions, V vocabulary, N alternatives.
"""

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
    """

    chosen: Float[Array, "B T"]
    top: Float[Array, "B T N"]
    ids: Int[Array, "B T N"]


def log_probabilities(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], asked: Bool[Array, " B"], alternatives: int
) -> Logprobs:
    """Log-probabilities of `tokens` and of the `alternatives` most likely ones; zeros if no row asked for them."""

    def measured() -> Logprobs:
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        # A lookup would gather a split vocabulary.
        is_chosen = jnp.arange(logits.shape[-1])[None, None] == tokens[..., None]
        return Logprobs(jnp.sum(jnp.where(is_chosen, scores, 0.0), axis=-1), *_largest(scores, alternatives))

    shape = (*tokens.shape, alternatives)
    nothing = Logprobs(jnp.zeros(tokens.shape), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
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
