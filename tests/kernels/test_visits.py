"""The list of chunks that the TPU kernel visits, against a plain loop over rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels.block_attention import visits as module
from dflash_jax.kernels.block_attention.pallas_tpu import _visit
from dflash_jax.kernels.block_attention.visits import visits


def chunks_of_rows(low, lengths, slots, chunk):
    """First and last chunk of each row."""
    for bound, length in zip(low, lengths, strict=True):
        if length > slots:  # a ring, which holds the last positions anywhere
            yield 0, -(-slots // chunk) - 1
        else:
            first = min(min(bound) // chunk, length // chunk, -(-slots // chunk) - 1)
            yield first, max(first, -(-length // chunk) - 1)


@pytest.mark.parametrize("most", [1 << 16, 8])  # an entry for each visit, and for several
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("cores", [1, 2])
def test_every_chunk_is_visited_once(monkeypatch, cores, rows, most):
    monkeypatch.setattr(module, "MOST", most)
    rng = np.random.default_rng(rows)
    for _ in range(4):
        slots, chunk = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        lengths = rng.integers(0, slots + 3, rows)
        lengths[rng.integers(rows)] = rng.choice([0, slots])
        low = np.minimum(rng.integers(0, slots + 1, (rows, 3)) * rng.integers(2), lengths[:, None])
        found = visits(jnp.array(low), jnp.array(lengths), slots, chunk, cores)
        assert found.lengths.shape == (min(cores, rows),)
        visited = []
        for part, length in enumerate(found.lengths.tolist()):
            assert length <= found.listed.shape[1]
            for step in range(length << found.together):
                row, at, there = _visit(
                    part,
                    step,
                    found.listed.reshape(-1),
                    found.last,
                    most=found.listed.shape[1],
                    bits=found.bits,
                    together=found.together,
                )
                if there:
                    visited.append((int(row), int(at)))
        bounds = chunks_of_rows(low, lengths, slots, chunk)
        assert visited == [(row, at) for row, (first, last) in enumerate(bounds) for at in range(first, last + 1)]


def test_two_parts_share_the_work():
    """No more than the longest row apart, however unlike the rows are."""
    lengths = np.array([8192, 700, 300, 100, 700, 900, 50, 8000, 500, 1200])
    found = visits(jnp.zeros((10, 1), jnp.int32), jnp.array(lengths), 8192, 128, 2)
    parts = found.lengths.tolist()
    assert sum(parts) == sum(-(-lengths // 128))
    assert abs(parts[0] - parts[1]) <= 64
