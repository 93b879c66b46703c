"""Losses of a block's predictions; the logits exist chunk by chunk (method, section 8.2).

Shapes: M predictions, B rows, A blocks of a row, P predictions of a block, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.mesh import row_parts

DPACE_ALPHA = 0.5


class Tokens(NamedTuple):
    """Per-prediction results; gradients flow through `loss` alone.

    Attributes:
        loss: cross-entropy and divergences with their coefficients.
        cross_entropy: against the data token.
        correct: whether the data token has the best score.
    """

    loss: Float[Array, " M"]
    cross_entropy: Float[Array, " M"]
    correct: Bool[Array, " M"]


Unembed = Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]


def token_losses(
    draft: Unembed,
    target: Unembed,
    hidden: Float[Array, "M D"],
    labels: Int[Array, " M"],
    target_hidden: Float[Array, "M D"] | None,
    *,
    cross_entropy: float,
    kl: float,
    total_variation: float,
    chunk: int,
) -> Tokens:
    """Losses of M predictions, `chunk` at a time.

    Heads are frozen and a prediction's loss depends on its own state alone, so the forward pass already
    finds each loss's gradient by its state, and the logits are computed once.

    Args:
        draft, target: heads of drafter and target.
        hidden: of the predictions.
        labels: data tokens.
        target_hidden: final-normed target states whose logits predict the labels (the position before); needed
            for `kl` and `total_variation`.
        cross_entropy, kl, total_variation: coefficients of -log q(label), of KL(target || draft), and of the
            sum over the vocabulary of |target - draft| (as DSpark has it).
    """
    M, parts = hidden.shape[0], row_parts()
    each = M // parts  # predictions of one device: a chunk takes some of every one's
    chunk = min(-(-chunk // parts), each)

    def fold(x: Array) -> Array:
        x = jnp.pad(x.reshape(parts, each, *x.shape[1:]), [(0, 0), (0, -each % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(parts, -1, chunk, *x.shape[2:]).swapaxes(0, 1).reshape(-1, parts * chunk, *x.shape[2:])

    def unfold(x: Array) -> Array:
        x = x.reshape(-1, parts, chunk, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])[:, :each].reshape(M, *x.shape[3:])

    def chunk_losses(hidden, labels, target_hidden) -> tuple[Array, tuple[Array, Array]]:
        logits = draft(hidden[None])[0]
        scores = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        negative = -jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
        correct = jnp.max(logits, axis=-1) == jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        loss = cross_entropy * negative
        if kl or total_variation:
            target_scores = jax.nn.log_softmax(target(target_hidden[None])[0], axis=-1)
            p = jnp.exp(target_scores)
            loss += kl * jnp.sum(p * (target_scores - scores), axis=-1)
            loss += total_variation * jnp.sum(jnp.abs(p - jnp.exp(scores)), axis=-1)
        return loss, (negative, correct)

    def one(xs) -> tuple[Tokens, Array]:
        hidden, labels, target_hidden = xs
        loss, pull, (negative, correct) = jax.vjp(
            lambda h: chunk_losses(h, labels, target_hidden), hidden, has_aux=True
        )
        return Tokens(loss, negative, correct), pull(jnp.ones_like(loss))[0]

    @jax.custom_vjp
    def losses(hidden, labels, target_hidden) -> Tokens:
        return forward(hidden, labels, target_hidden)[0]

    def forward(hidden, labels, target_hidden):
        parts = (fold(hidden), fold(labels), None if target_hidden is None else fold(target_hidden))
        tokens, gradient = jax.tree.map(unfold, jax.lax.map(one, parts))
        return tokens, gradient

    def backward(gradient, d_tokens):
        return (gradient.astype(jnp.float32) * d_tokens.loss[:, None]).astype(gradient.dtype), None, None

    losses.defvjp(forward, backward)
    return losses(hidden, labels, target_hidden)


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
