"""Chunked losses against plain ones, and the weights of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.losses import decay_weights, dpace_weights, teacher_forced_lengths, token_losses

M, D, V = 11, 5, 7


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(M, D), jnp.asarray(rng.integers(0, V, M)), draw(M, D), draw(V, D), draw(V, D)


@pytest.mark.parametrize("chunk", [4, 11, 100])
@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.1, 0.5, 0.9)])
def test_losses_and_gradients(case, chunk, weights):
    hidden, labels, wanted, head, target_head = case
    coefficients = dict(zip(("cross_entropy", "kl", "total_variation"), weights, strict=True))
    importance = jnp.asarray(np.random.default_rng(1).uniform(size=M), jnp.float32)

    def ours(hidden):
        heads = (lambda h: h @ head.T), (lambda h: h @ target_head.T)
        tokens = token_losses(*heads, hidden, labels, wanted, **coefficients, chunk=chunk)
        return jnp.sum(tokens.loss * importance), tokens

    def plain(hidden):
        q, p = jax.nn.log_softmax(hidden @ head.T), jax.nn.softmax(wanted @ target_head.T)
        negative = -q[jnp.arange(M), labels]
        kl = jnp.sum(p * (jnp.log(p) - q), axis=-1)
        total = jnp.sum(jnp.abs(p - jnp.exp(q)), axis=-1)
        return jnp.sum((weights[0] * negative + weights[1] * kl + weights[2] * total) * importance), negative

    (loss, tokens), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(hidden)
    (expected, negative), expected_gradient = jax.value_and_grad(plain, has_aux=True)(hidden)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(tokens.cross_entropy, negative, rtol=1e-5)
    np.testing.assert_array_equal(tokens.correct, jnp.argmax(hidden @ head.T, axis=-1) == labels)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


def test_decay():
    np.testing.assert_allclose(decay_weights(4, 7.0), np.exp(-np.arange(4) / 7), rtol=1e-6)


def test_dpace():
    cross_entropy = -jnp.log(jnp.asarray([[[0.5, 0.2, 0.9]]], jnp.float32))
    labelled = jnp.asarray([[[True, False, True]]])
    q = 0.5 * np.array([0.5, 0.2, 0.9]) + 0.5
    reached = np.array([q[0], 0, q[0] * q[2]])  # what is not labelled counts 1 in the product, 0 in the sum
    expected = np.array([reached.sum(), reached[2], reached[2]])
    np.testing.assert_allclose(dpace_weights(cross_entropy, labelled)[0, 0], expected, rtol=1e-5)
    assert (jax.grad(lambda c: jnp.sum(dpace_weights(c, labelled)))(cross_entropy) == 0).all()


def test_teacher_forced_lengths():
    correct = jnp.asarray([[[True, True, False, True], [False, True, True, True], [True, True, True, True]]])
    labelled = jnp.asarray([[[True] * 4, [True] * 4, [False] * 4]])
    total, blocks = teacher_forced_lengths(correct, labelled)
    assert (float(total), int(blocks)) == (1 + 2 + 1, 2)
