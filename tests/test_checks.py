"""Shapes are checked at every call while tests run: see `conftest`."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from dflash_jax.cache import once_read
from dflash_jax.decoding.sampling import greedy_rows, select
from dflash_jax.train.blocks import draw_blocks


def test_wrong_shapes_are_refused(drafter):
    tokens = jnp.zeros((2, 8), jnp.int32)
    calls = {
        "decoding": lambda n: select(jnp.zeros((2, 3, 5)), jnp.zeros((2, n, 5)), greedy_rows(2)),
        "cache": lambda n: once_read(jnp.zeros(n - 1, jnp.int32), jnp.zeros((2, 3, 4))),
        "drafters": lambda n: drafter.context(jnp.zeros((2, 3, 64)), jnp.zeros((2, n), jnp.int32)),
        "train": lambda n: draw_blocks(
            jax.random.split(jax.random.key(0), n - 1),
            tokens,
            tokens,
            tokens > 0,
            count=4,
            per_document=4,
            block_size=2,
            predictions=1,
        ),
    }
    for call in calls.values():
        call(3)
        with pytest.raises(TypeCheckError):
            call(4)
