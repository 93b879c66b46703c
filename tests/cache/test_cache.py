"""`commit`, the only writer; snapshots of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import KV, Cache, Fresh, commit, init_cache
from dflash_jax.drafters import drafter_config
from tests import tiny


def numbered(B, T, start=1.0):
    """Keys [B, 1, T, 1] that count up; values are their negatives."""
    x = start + jnp.arange(B * T, dtype=jnp.float32).reshape(B, 1, T, 1)
    return Fresh(x, -x)


def empty(B, S, ring=False):
    return Cache((KV(jnp.zeros((B, 1, S, 1)), jnp.zeros((B, 1, S, 1)), ring),), (0,))


def keys(cache, row=0):
    return cache.entries[0].k[row, 0, :, 0].tolist()


def test_rows_keep_different_counts():
    cache = commit(empty(2, 5), [numbered(2, 3)], jnp.asarray([0, 0]), jnp.asarray([2, 0]))
    cache = commit(cache, [numbered(2, 3, 10.0)], jnp.asarray([2, 0]), jnp.asarray([1, 3]))
    assert keys(cache) == [1, 2, 10, 0, 0]
    assert keys(cache, 1) == [13, 14, 15, 0, 0]
    np.testing.assert_array_equal(cache.entries[0].v, -cache.entries[0].k)


def test_full_cache_drops_what_does_not_fit():
    cache = commit(empty(1, 4), [numbered(1, 3)], jnp.asarray([0]), jnp.asarray([3]))
    cache = commit(cache, [numbered(1, 3, 10.0)], jnp.asarray([3]), jnp.asarray([1]))
    assert keys(cache) == [1, 2, 3, 10]
    assert keys(commit(cache, [numbered(1, 3, 20.0)], jnp.asarray([4]), jnp.asarray([2]))) == [1, 2, 3, 10]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 12])
def test_ring_holds_the_last_positions_whatever_the_chunks(chunk):
    cache, total = empty(1, 5, ring=True), 12
    for start in range(0, total, chunk):
        count = min(chunk, total - start)
        cache = commit(cache, [numbered(1, chunk, 1.0 + start)], jnp.asarray([start]), jnp.asarray([count]))
    assert sorted(keys(cache)) == [8, 9, 10, 11, 12]
    assert keys(cache) == [11, 12, 8, 9, 10]  # position p in slot p modulo 5


def test_path_and_row():
    path, rows = jnp.asarray([[0, 3, 1]]), jnp.asarray([1])
    cache = commit(empty(3, 4), [numbered(1, 4)], jnp.asarray([0]), jnp.asarray([2]), path=path, rows=rows)
    assert [keys(cache, row) for row in range(3)] == [[0] * 4, [1, 4, 0, 0], [0] * 4]


@pytest.mark.parametrize(("slots", "ring"), [(16, False), (9, False), (8, True), (5, True), (12, True)])
def test_a_snapshot_restores_into_an_entry_of_another_size(slots, ring):
    """Rows move between slots of different lengths: what a window of 5 sees after position 8 is there in all."""
    for source, is_ring in ((16, False), (5, True), (8, True)):
        cache = commit(empty(2, source, is_ring), [numbered(2, 8)], jnp.asarray([0, 0]), jnp.asarray([8, 8]))
        snapshot = cache.snapshot(jnp.int32(1), jnp.int32(0), 8)
        after = empty(2, slots, ring).begin(jnp.int32(0)).restore(snapshot, jnp.int32(0), jnp.int32(8))
        seen = [keys(after)[p % slots] for p in range(8 - 5, 8)]
        assert seen == [9 + p for p in range(8 - 5, 8)]
        assert keys(after, 1) == [0] * slots


def test_windowed_layers_are_allocated_as_rings():
    raw = tiny.drafter_config(
        layer_types=["sliding_attention", "full_attention"], sliding_window=9, use_sliding_window=True
    )
    cache = init_cache(drafter_config(raw).mixers, 2, 100, jnp.float32)
    assert [(entry.ring, entry.k.shape[2]) for entry in cache.entries] == [(True, 8), (False, 128)]
