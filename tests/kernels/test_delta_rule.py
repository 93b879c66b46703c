"""Every implementation of the gated delta rule against the recurrence itself in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from dflash_jax.kernels.delta_rule import advance, read_block, read_prompt
from dflash_jax.kernels.delta_rule.reference import unit_lower_inverse
from dflash_jax.kernels.delta_rule.trial import Trial
from tests.chips import topology

B, K, G = 2, 2, 3


def case(T, H, Hv, alike=0.0, seed=0):
    """Inputs whose keys have a common part, `alike` times as large as what is their own, and little decay."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    draw = lambda *size: rng.standard_normal(size)
    q, k = (unit(draw(B, T, K, H) + alike * draw(1, 1, K, H)) for _ in range(2))
    g, beta = -0.1 * rng.random((B, T, K, G)), 1 / (1 + np.exp(-3 - draw(B, T, K, G)))
    inputs = q * H**-0.5, k, draw(B, T, K, G, Hv), g, beta, draw(B, K, G, H, Hv)
    return [np.float32(x).astype(np.float64) for x in inputs]


def recurrence(q, k, v, g, beta, state, parents=None, documents=None, before=None):
    """Position by position; those of a tree go on from their parents' states."""
    T = q.shape[1]
    states, out, corrections = [state], [], []
    for t in range(T):
        s = states[t if parents is None else parents[t] + 1]
        if documents is not None:
            last = before if t == 0 else documents[:, t - 1]
            s = np.where((documents[:, t] == last)[:, None, None, None, None], s, 0.0)
        s = np.exp(g[:, t])[..., None, None] * s
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("bkghv,bkh->bkgv", s, k[:, t]))
        states.append(s + np.einsum("bkh,bkgv->bkghv", k[:, t], u))
        out.append(np.einsum("bkghv,bkh->bkgv", states[-1], q[:, t]))
        corrections.append(u)
    return np.stack(out, axis=1), np.stack(corrections, axis=1), states[1:]


def close(got, expected, tolerance=2e-5):
    np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


single = lambda inputs: [jnp.asarray(x, jnp.float32) for x in inputs]


@pytest.mark.parametrize("alike", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("T", [1, 7, 16, 64, 100])
def test_a_block_and_what_is_committed_of_it(T, alike):
    inputs = case(T, 16, 24, alike)
    out, u = jax.jit(read_block)(*single(inputs), None)
    expected, corrections, states = recurrence(*inputs)
    close(out, expected)
    close(u, corrections)
    commit = jax.jit(advance)
    for kept in sorted({0, 1, T // 2, T}):
        # What is not kept may be anything.
        rest = lambda x, kept=kept: jnp.where((np.arange(T) < kept).reshape(1, T, *[1] * (x.ndim - 2)), x, jnp.nan)
        given = *map(rest, (single(inputs)[1], u, single(inputs)[3])), jnp.full(B, kept)
        close(commit(jnp.asarray(inputs[5], jnp.float32), *given), states[kept - 1] if kept else inputs[5])


@pytest.mark.parametrize("alike", [0.0, 5.0])
def test_a_tree_and_its_paths(alike):
    T = 32
    inputs, rng = case(T, 16, 16, alike), np.random.default_rng(1)
    parents = [-1, *(int(rng.integers(max(0, t - 4), t)) for t in range(1, T))]
    ancestors = np.eye(T, dtype=bool)
    for t in range(1, T):
        ancestors[t] |= ancestors[parents[t]]
    out, u = jax.jit(read_block)(*single(inputs), jnp.asarray(ancestors)[None])
    expected, corrections, states = recurrence(*inputs, parents=parents)
    close(out, expected)
    close(u, corrections)
    for leaf in (0, 11, T - 1):
        path = np.flatnonzero(ancestors[leaf])
        picked = [x[:, path] for x in (single(inputs)[1], u, single(inputs)[3])]
        close(advance(jnp.asarray(inputs[5], jnp.float32), *picked, jnp.full(B, len(path))), states[leaf])


@pytest.mark.parametrize("T", [64, 200])
@pytest.mark.parametrize("alike", [0.0, 5.0])
def test_a_prompt(T, alike):
    inputs = case(T, 16, 24, alike)
    out, state = jax.jit(read_prompt)(*single(inputs))
    expected, _, states = recurrence(*inputs)
    close(out, expected)
    close(state, states[-1])


def test_positions_that_are_padding_change_nothing():
    inputs = case(80, 16, 16)
    for x in inputs[3:5]:
        x[:, 70:] = 0
    _, state = jax.jit(read_prompt)(*single(inputs))
    close(state, recurrence(*inputs)[2][69])


def test_documents_of_a_packed_row():
    """The first one goes on from the state, or does not; borders lie inside and between chunks of 64."""
    inputs = case(150, 16, 16)
    documents = np.stack([np.repeat([0, 30, 64, 100], [30, 34, 36, 50]), np.repeat([0, 128, 149], [128, 21, 1])])
    before = np.asarray([0, -1])
    out, state = jax.jit(read_prompt)(*single(inputs), jnp.asarray(documents), jnp.asarray(before))
    expected, _, states = recurrence(*inputs, documents=documents, before=before)
    close(out, expected)
    close(state, states[-1])


@pytest.mark.parametrize("T", [5, 8, 16, 37, 64])
def test_the_solver_holds_where_powers_explode(T):
    """Keys that are nearly equal, corrected nearly fully: the inverse is tame, and powers of the matrix are not."""
    rng = np.random.default_rng(0)
    A = np.float32(np.tril(0.98 + 0.01 * rng.random((3, T, T)), -1)).astype(np.float64)
    inverse = np.linalg.inv(np.eye(T) + A)
    close(unit_lower_inverse(jnp.asarray(A, jnp.float32)), inverse, 1e-5)
    if T == 64:  # the control
        doubled, power = np.eye(T, dtype=np.float32)[None], -np.float32(A)
        for _ in range(6):
            doubled, power = doubled @ (np.eye(T, dtype=np.float32) + power), power @ power
        assert np.abs(doubled - inverse).max() > 1


@pytest.mark.parametrize(("T", "tree"), [(16, False), pytest.param(13, True, marks=pytest.mark.slow)])
def test_the_tpu_kernel_in_the_interpreter(T, tree):
    trial = Trial(2, T, 2, 2, 128, 128, tree)
    expected = trial.run(partial(read_block, implementation="xla"))
    with pltpu.force_tpu_interpret_mode():
        for got, reference in zip(trial.run(partial(read_block, implementation="tpu")), expected, strict=True):
            close(got, np.asarray(reference))


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("T", [1, 16, 64])
def test_the_tpu_kernel_compiles(chips, T):
    """With the heads of Qwen3.5-27B: the state is read once, and nothing of its size is made."""
    place = SingleDeviceSharding(topology(chips)[0])
    spec = lambda *size: jax.ShapeDtypeStruct(size, jnp.float32, sharding=place)
    heads, state = (4, T, 16), spec(4, 16, 3, 128, 128)
    inputs = spec(*heads, 128), spec(*heads, 128), spec(*heads, 3, 128), spec(*heads, 3), spec(*heads, 3), state

    def call(*inputs):
        return read_block(*inputs, None, implementation="tpu")

    program = jax.jit(call).lower(*inputs).compile()
    assert "delta_rule" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < state.size * 4
