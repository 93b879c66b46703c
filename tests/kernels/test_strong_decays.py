"""The gated delta rule where single positions forget nearly everything: its error stays that of float32, against the
recurrence itself in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels.delta_rule import advance, read_block, read_prompt
from tests.kernels.test_delta_rule import B, case, close, recurrence, single

BOUND = 1e-6  # of the largest value
DECAYS = [-300.0, -1e4, -1e5, -3e38]


def strong(T, H, Hv, decay, places, seed=0):
    """The inputs of `case`, with so strong a decay at these places in every other head."""
    inputs = case(T, H, Hv, seed=seed)
    inputs[3][:, list(places), :, ::2] = np.float32(decay)
    return inputs


def ancestors_of(parents):
    ancestors = np.eye(len(parents), dtype=bool)
    for t, parent in enumerate(parents[1:], 1):
        ancestors[t] |= ancestors[parent]
    return ancestors


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("places", [(0,), (-1,), (1, 7, 8)])
def test_a_block_and_every_commit_of_it(places, decay):
    T = 16
    inputs = strong(T, 16, 24, decay, places)
    _, k, _, g, _, state = single(inputs)
    out, u = jax.jit(read_block)(*single(inputs), None)
    expected, corrections, states = recurrence(*inputs)
    close(out, expected, BOUND)
    close(u, corrections, BOUND)
    commit = jax.jit(advance)
    for kept in range(1, T + 1):
        close(commit(state, k, u, g, jnp.full(B, kept)), states[kept - 1], BOUND)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_tree_and_every_path_of_it(decay):
    T, rng = 24, np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(0, t - 4), t)) for t in range(1, T))]
    ancestors, inputs = ancestors_of(parents), strong(T, 16, 16, decay, (2, 9, 15))
    _, k, _, g, _, state = single(inputs)
    out, u = jax.jit(read_block)(*single(inputs), jnp.asarray(ancestors)[None])
    expected, corrections, states = recurrence(*inputs, parents=parents)
    close(out, expected, BOUND)
    close(u, corrections, BOUND)
    for leaf in range(T):
        path = np.flatnonzero(ancestors[leaf])
        path = np.pad(path, (0, T - len(path)))  # one program for all lengths
        after = advance(state, *(x[:, path] for x in (k, u, g)), jnp.full(B, ancestors[leaf].sum()))
        close(after, states[leaf], BOUND)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("places", [(10,), (63, 140), (0, 20, 21, 64, 128)])
def test_a_prompt(places, decay):
    """Of documents, too, of which the first goes on from the state."""
    inputs = strong(150, 16, 24, decay, places)
    documents = np.stack([np.repeat([0, 30, 64, 100], [30, 34, 36, 50]), np.zeros(150, int)])
    before = np.asarray([0, 0])
    out, state = jax.jit(read_prompt)(*single(inputs), jnp.asarray(documents), jnp.asarray(before))
    expected, _, states = recurrence(*inputs, documents=documents, before=before)
    close(out, expected, BOUND)
    close(state, states[-1], BOUND)


def test_gradients_are_finite():
    inputs = strong(8, 8, 8, -1e5, (2, 6))
    inputs[3][:, 4, 0] = -np.inf
    tree = jnp.asarray(ancestors_of([-1, 0, 0, 1, 2, 3, 3, 5]))[None]
    total = lambda call, *more: lambda *given: sum(jnp.sum(x**2) for x in call(*given, *more))
    for call in (total(read_prompt), total(read_block, tree)):
        for x in jax.jit(jax.grad(call, argnums=range(6)))(*single(inputs)):
            assert np.isfinite(x).all()


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_the_tpu_kernel_in_the_interpreter(tree):
    T = 11
    inputs = strong(T, 128, 128, -1e5, (1, 6))
    parents = [-1, 0, 0, 1, 1, 2, 3, 4, 6, 6, 8] if tree else list(range(-1, T - 1))
    seen = jnp.asarray(ancestors_of(parents))[None] if tree else None
    with pltpu.force_tpu_interpret_mode():
        out, u = jax.jit(lambda *given: read_block(*given, implementation="tpu"))(*single(inputs), seen)
    expected, corrections, _ = recurrence(*inputs, parents=parents)
    close(out, expected, BOUND)
    close(u, corrections, BOUND)
