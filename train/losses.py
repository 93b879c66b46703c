"""Losses of a block's predictions; the logits exist chunk by chunk (method, section 8.2).

Shapes: M predictions, B rows, A blocks of a row, P predictions of a block, D width, V vocabulary.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.drafters.base import Scored
from dflash_jax.kernels.products import unrounded_gradients
from dflash_jax.mesh import row_parts
from dflash_jax.train.config import Coefficients

DPACE_ALPHA = 0.5
LK_DECAY = 3.0


class Tokens(NamedTuple):
    """Per-prediction results; gradients flow through `loss` alone.

    Attributes:
        loss: cross-entropy and divergences with their coefficients, and what a drafter adds.
        cross_entropy: against the data token; infinite for one that the drafter does not have.
        correct: whether the data token is what the drafter would propose.
    """

    loss: Float[Array, " M"]
    cross_entropy: Float[Array, " M"]
    correct: Bool[Array, " M"]


def combined(
    coefficients: Coefficients,
    scores: Callable[[], Float[Array, "M V"]],
    negative: Float[Array, " M"],
    target: Callable[[], Float[Array, "M V"]],
) -> Float[Array, " M"]:
    """The loss of predictions, given log q, -log q(label) and the target's logits."""
    loss = coefficients.cross_entropy * negative
    if not coefficients.distill:
        return loss
    log_p, log_q = jax.nn.log_softmax(target(), axis=-1), scores()
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    kl = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
    loss += coefficients.kl * kl
    loss += coefficients.total_variation * jnp.sum(jnp.abs(p - q), axis=-1)
    if coefficients.negative_log_acceptance or coefficients.lk_hybrid:
        acceptance = jnp.sum(jnp.minimum(p, q), axis=-1)
        loss -= coefficients.negative_log_acceptance * jnp.log(jnp.maximum(acceptance, 1e-30))
        weight = jnp.exp(-LK_DECAY * jax.lax.stop_gradient(acceptance))
        loss += coefficients.lk_hybrid * (weight * kl + (1 - weight) * (1 - acceptance))
    return loss


Score = Callable[[Any, Any], Float[Array, "M V"]]
Refine = Callable[[Any, Scored], tuple[Array | float, Array]]


def token_losses(
    score: Score,
    refine: Refine,
    target: Callable[[Float[Array, "M D"]], Float[Array, "M V"]],
    heads: Any,
    seen: Any,
    labels: Int[Array, " M"],
    target_hidden: Float[Array, "M D"] | None,
    *,
    coefficients: Coefficients,
    chunk: int,
    per_block: int = 1,
    rounded: bool = True,
) -> Tokens:
    """Losses of M predictions, `chunk` at a time.

    Where no head is trained, a prediction's loss depends on its own states alone. Then the forward pass already finds
    each loss's gradient by them, and the logits are computed once; else the backward pass computes them again.

    Args:
        score, refine: `drafters.base.Drafter.score` and `refine`, of this target.
        target: the target's head.
        heads: trained parameters that these two need.
        seen: of the predictions, a pytree of arrays [M, ...].
        labels: data tokens, as the drafter numbers them; negative for one that it does not have.
        target_hidden: final-normed target states whose logits predict the labels (the position before); needed where
            the target's distribution is.
        per_block: how many predictions must stay together: 1, or those of a block, of which a chunk has at least one.
        rounded: whether the gradient by the logits is rounded to the dtype of the head before its products.
    """
    M, parts = labels.shape[0], row_parts()
    per_part = M // parts  # predictions of one device: a chunk takes some of every one's
    chunk = max(per_block, min(-(-chunk // parts), per_part) // per_block * per_block)

    def fold(x: Array) -> Array:
        pads = [(0, 0), (0, -per_part % chunk)] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x.reshape(parts, per_part, *x.shape[1:]), pads)
        return x.reshape(parts, -1, chunk, *x.shape[2:]).swapaxes(0, 1).reshape(-1, parts * chunk, *x.shape[2:])

    def unfold(x: Array) -> Array:
        x = x.reshape(-1, parts, chunk, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])[:, :per_part].reshape(M, *x.shape[3:])

    def chunk_losses(heads, seen, labels, target_hidden) -> tuple[Array, tuple[Array, Array]]:
        known, places = labels >= 0, jnp.maximum(labels, 0)
        theirs = partial(target, target_hidden)
        known_target = None if target_hidden is None else theirs
        with contextlib.nullcontext() if rounded else unrounded_gradients():
            logits = score(heads, seen)
            more, correct = refine(heads, Scored(seen, logits, labels, per_block, known_target))
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        negative = (total - jnp.take_along_axis(logits, places[:, None], axis=1))[:, 0]
        loss = combined(coefficients, lambda: logits - total, negative, theirs) + more
        return jnp.where(known, loss, 0.0), (jnp.where(known, negative, jnp.inf), correct & known)

    def one(heads, xs) -> Tokens:
        loss, (negative, correct) = chunk_losses(heads, *xs)
        return Tokens(loss, negative, correct)

    def with_gradient(xs) -> tuple[Tokens, Any]:
        seen, *rest = xs
        loss, pull, (negative, correct) = jax.vjp(lambda s: chunk_losses(heads, s, *rest), seen, has_aux=True)
        return Tokens(loss, negative, correct), pull(jnp.ones_like(loss))[0]

    @jax.custom_vjp
    def losses(seen, labels, target_hidden) -> Tokens:
        return forward(seen, labels, target_hidden)[0]

    def forward(seen, labels, target_hidden):
        return jax.tree.map(unfold, jax.lax.map(with_gradient, jax.tree.map(fold, (seen, labels, target_hidden))))

    def backward(gradients, d_tokens):
        scaled = lambda g: g.astype(jnp.float32) * d_tokens.loss.reshape(-1, *(1,) * (g.ndim - 1))
        return jax.tree.map(lambda g: scaled(g).astype(g.dtype), gradients), None, None

    losses.defvjp(forward, backward)
    if not heads:
        return losses(seen, labels, target_hidden)
    folded = jax.tree.map(fold, (seen, labels, target_hidden))
    return jax.tree.map(unfold, jax.lax.map(partial(jax.checkpoint(one), heads), folded))


def decay_weights(count: int, gamma: float) -> Float[Array, " P"]:
    """exp(-(k - 1) / gamma) for the k-th prediction of a block, in both slot conventions."""
    return jnp.exp(-jnp.arange(count, dtype=jnp.float32) / gamma)


def dpace_weights(
    cross_entropy: Float[Array, "B A P"], labelled: Bool[Array, "B A P"], alpha: float = DPACE_ALPHA
) -> Float[Array, "B A P"]:
    """Expected gain of each position in accepted length (D-PACE, arXiv 2605.18810); no gradient flows through."""
    q = (1 - alpha) * jnp.exp(-jax.lax.stop_gradient(cross_entropy)) + alpha
    reached = jnp.where(labelled, jnp.cumprod(jnp.where(labelled, q, 1.0), axis=-1), 0)
    return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=-1), axis=-1), axis=-1)


def teacher_forced_lengths(
    correct: Bool[Array, "B A P"], labelled: Bool[Array, "B A P"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed acceptance lengths (one plus the run of correct predictions) and number of blocks with a label."""
    used = jnp.any(labelled, axis=-1)
    run = jnp.where(labelled, jnp.cumprod((correct | ~labelled).astype(jnp.int32), axis=-1), 0)
    return jnp.sum(jnp.where(used, 1 + jnp.sum(run, axis=-1), 0)).astype(jnp.float32), jnp.sum(used)
