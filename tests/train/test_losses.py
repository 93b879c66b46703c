"""Chunked losses against plain ones, and the weights of a block."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.config import Coefficients
from dflash_jax.train.losses import decay_weights, dpace_weights, teacher_forced_lengths, token_losses

M, D, V = 11, 5, 7


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(M, D), jnp.asarray(rng.integers(0, V, M)), draw(M, D), draw(V, D), draw(V, D)


@pytest.mark.parametrize("chunk", [4, 11, 100])
@pytest.mark.parametrize("trained", [False, True], ids=["head frozen", "head trained"])
@pytest.mark.parametrize("weights", [(1.0,), (0.0, 2.0), (0.1, 0.5, 0.9), (0.0, 0.0, 0.0, 1.5), (0.2, 0, 0, 0, 0.7)])
def test_losses_and_gradients(case, chunk, weights, trained):
    hidden, labels, wanted, head, target_head = case
    labels = labels.at[3].set(-1)  # a token that a reduced vocabulary does not have
    coefficients = Coefficients(*weights)
    weights = (*weights, 0, 0, 0, 0)[:5]
    importance = jnp.asarray(np.random.default_rng(1).uniform(size=M), jnp.float32)

    def score(heads, hidden):
        return hidden @ heads.get("head", head).T

    def refine(heads, scored):
        return 0.0, jnp.argmax(scored.logits, axis=-1) == scored.labels

    def ours(hidden, heads):
        tokens = token_losses(
            score,
            refine,
            lambda h: h @ target_head.T,
            heads,
            hidden,
            labels,
            wanted,
            coefficients=coefficients,
            chunk=chunk,
        )
        return jnp.sum(tokens.loss * importance), tokens

    def plain(hidden, heads):
        q, p = jax.nn.log_softmax(score(heads, hidden)), jax.nn.softmax(wanted @ target_head.T)
        negative = -q[jnp.arange(M), labels]
        kl = jnp.sum(p * (jnp.log(p) - q), axis=-1)
        total = jnp.sum(jnp.abs(p - jnp.exp(q)), axis=-1)
        alpha = jnp.sum(jnp.minimum(p, jnp.exp(q)), axis=-1)
        mix = jnp.exp(-3 * jax.lax.stop_gradient(alpha))
        each = negative, kl, total, -jnp.log(alpha), mix * kl + (1 - mix) * (1 - alpha)
        loss = sum(weight * x for weight, x in zip(weights, each, strict=True))
        return jnp.sum(jnp.where(labels >= 0, loss, 0) * importance), negative

    heads = {"head": head} if trained else {}
    (loss, tokens), gradient = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(hidden, heads)
    (expected, negative), expected_gradient = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, heads)
    has = np.asarray(labels) >= 0
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(tokens.cross_entropy[has], negative[has], rtol=1e-5)
    assert np.isposinf(tokens.cross_entropy[~has]).all()  # their q is 0, as D-PACE counts it
    np.testing.assert_array_equal(tokens.correct, jnp.argmax(hidden @ head.T, axis=-1) == labels)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), gradient, expected_gradient)


def test_decay():
    np.testing.assert_allclose(decay_weights(4, 7.0), np.exp(-np.arange(4) / 7), rtol=1e-6)


def test_dpace():
    cross_entropy = -jnp.log(jnp.asarray([[[0.5, 0.2, 0.9]]], jnp.float32))
    labelled = jnp.asarray([[[True, False, True]]])
    q = 0.5 * np.array([0.5, 0.2, 0.9]) + 0.5
    reached = np.array([q[0], 0, q[0] * q[2]])  # what is not labeled counts 1 in the product, 0 in the sum
    expected = np.array([reached.sum(), reached[2], reached[2]])
    np.testing.assert_allclose(dpace_weights(cross_entropy, labelled)[0, 0], expected, rtol=1e-5)
    assert (jax.grad(lambda c: jnp.sum(dpace_weights(c, labelled)))(cross_entropy) == 0).all()


def test_dpace_of_a_token_that_the_drafter_does_not_have():
    cross_entropy = jnp.asarray([[[-np.log(0.5), np.inf, -np.log(0.9)]]], jnp.float32)
    q = 0.5 * np.array([0.5, 0, 0.9]) + 0.5
    reached = np.cumprod(q)
    weights = dpace_weights(cross_entropy, jnp.ones((1, 1, 3), bool))[0, 0]
    np.testing.assert_allclose(weights, [reached.sum(), reached[1:].sum(), reached[2]], rtol=1e-5)


def test_teacher_forced_lengths():
    correct = jnp.asarray([[[True, True, False, True], [False, True, True, True], [True, True, True, True]]])
    labelled = jnp.asarray([[[True] * 4, [True] * 4, [False] * 4]])
    total, blocks = teacher_forced_lengths(correct, labelled)
    assert (float(total), int(blocks)) == (1 + 2 + 1, 2)
