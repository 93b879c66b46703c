"""A training step whose attention is computed by the kernels, in Pallas' interpreter: against XLA's, on every mesh."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

from dflash_jax import load_target, sharding
from dflash_jax.kernels.anchored_attention.api import IMPLEMENTATIONS
from dflash_jax.kernels.dispatch import using
from dflash_jax.kernels.interval_attention import pallas_tpu
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.drafters import new_drafter
from dflash_jax.train.step import Batch, init_state, train_step
from tests import tiny

CONFIG = TrainConfig(
    block_size=6, num_layers=2, length=32, anchors=12, row_anchors=12, batch_size=4, learning_rate=1e-3, remat=False
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A target whose heads the kernels serve."""
    raw = tiny.target_config(head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    return tiny.write_target(tmp_path_factory.mktemp("target"), raw)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) > 3) for n in rng.integers(8, 30, 12)]
    return Batch(*map(jnp.asarray, Packing(examples, 32, 4, 0).batch(0)))


def one_step(directory, batch, mesh=None, **changes):
    """Loss, gradient norm and the gradient, which after one step Adam's first moment is."""
    config = dataclasses.replace(CONFIG, **changes)
    devices = jax.devices()
    grid = make_mesh(parse_mesh(mesh, devices), devices) if mesh else None
    target = load_target(directory, mesh=grid)
    drafter, _ = new_drafter(load_target(directory), config, tiny.MASK)
    with nullcontext() if grid is None else jax.set_mesh(grid):
        state = init_state(drafter, config, 100)
        if grid is not None:
            drafter, state = (jax.device_put(x, sharding.shardings(x, grid)) for x in (drafter, state))
        state, metrics = jax.jit(partial(train_step, config, 100))(target, drafter, state, batch)
    return metrics, jax.device_get(optax.tree.get(state.optimizer, "mu"))


@pytest.fixture(scope="module")
def plain(directory, batch):
    with using("xla"):
        return one_step(directory, batch)


CASES = {
    "one device": {},
    "in parts, recomputing layers": {"accumulate": 2, "remat": True},
    "fsdp": {"mesh": "data=2,fsdp=2,model=2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_take_the_step_that_xla_takes(directory, batch, name, kind, plain, monkeypatch):
    if kind != "dflash":
        with using("xla"):
            plain = one_step(directory, batch, drafter=kind)
    # The interpreter that makes XLA programs of kernels: what is computed again may have no effects.
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", pallas_tpu)
    with using("xla"):
        metrics, gradient = one_step(directory, batch, drafter=kind, **CASES[name])
    for key in ("loss", "gradient_norm"):
        np.testing.assert_allclose(metrics[key], plain[0][key], rtol=1e-5)
    for mine, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5 * max(1, np.abs(right).max()))
