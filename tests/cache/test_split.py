"""Rows of different lengths in one cache: each row has what it would have in a cache of its own length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Fresh, Group, commit, init_cache
from dflash_jax.cache.split import Split, groups_of
from dflash_jax.config import AttentionConfig

GROUPS = (Group(3, 128), Group(1, 640), Group(2, 256))
ROWS, HEADS, SIZE = 6, 2, 8
FULL = AttentionConfig(2 * HEADS, HEADS, SIZE, None)
WINDOW = AttentionConfig(2 * HEADS, HEADS, SIZE, None, window=9)


def fresh(key, rows, width):
    k, v = (jax.random.normal(key, (rows, HEADS, width, SIZE)) for key in jax.random.split(jax.random.key(key)))
    return Fresh(k, v)


def pair(lengths=(100, 3, 0, 600, 250, 17)):
    """A cache in groups, and one in which every row is the longest; both filled alike."""
    caches = [init_cache([FULL], ROWS, slots, jnp.float32) for slots in (GROUPS, 640)]
    assert isinstance(caches[0].entries[0], Split)
    block, counts = fresh(0, ROWS, 600), jnp.asarray(lengths)
    return [commit(cache, [block], jnp.zeros(ROWS, jnp.int32), counts) for cache in caches], counts


def attended(cache, key, lengths, rows=None, visible="causal"):
    count = ROWS if rows is None else len(rows)
    q = jax.random.normal(jax.random.key(key), (count, 4, 2 * HEADS, SIZE))
    own = lengths if rows is None else lengths[rows]
    where = {"visible": visible, "rows": rows, "starts": None}
    return cache.entries[0].attend(q, own[:, None] + jnp.arange(4)[None], fresh(key, count, 4), own, **where)


@pytest.mark.parametrize(
    "rows",
    [None, [5, 0], *(pytest.param(rows, marks=pytest.mark.slow) for rows in ([3], [4, 3, 1], [2, 5, 1, 4, 0, 3]))],
)
def test_attention_and_commit(rows):
    (split, whole), lengths = pair()
    rows = None if rows is None else jnp.asarray(rows)
    for visible in ("causal", "full", jnp.tril(jnp.ones((4, 4), bool))):
        got, expected = (attended(cache, 1, lengths, rows, visible) for cache in (split, whole))
        np.testing.assert_allclose(got, expected, atol=1e-6)
    count = ROWS if rows is None else len(rows)
    tree = jnp.asarray([[0, 2, 3]] * count)
    own = lengths if rows is None else lengths[rows]
    kept = jnp.arange(count) % 4
    split, whole = (commit(c, [fresh(2, count, 4)], own, kept, path=tree, rows=rows) for c in (split, whole))
    longer = lengths.at[jnp.arange(ROWS) if rows is None else rows].add(kept)
    np.testing.assert_allclose(*(attended(cache, 3, longer) for cache in (split, whole)), atol=1e-6)


def test_a_tree_of_each_row():
    (split, whole), lengths = pair()
    visible = jnp.asarray(np.random.default_rng(0).random((ROWS, 4, 4)) < 0.5) | jnp.eye(4, dtype=bool)[None]
    np.testing.assert_allclose(*(attended(c, 1, lengths, None, visible) for c in (split, whole)), atol=1e-6)


@pytest.mark.parametrize(("source", "target"), [(0, 3), (5, 3), (0, 5), (0, 2)])
@pytest.mark.parametrize("count", [100, 128])
def test_a_row_moves_to_another_group(source, target, count):
    """By a snapshot of as many positions as a short row has, whether or not it is full."""
    (split, whole), lengths = pair((100, 3, 0, 0, 0, 17))

    @jax.jit
    def move(cache, row, to, end):
        return cache.restore(cache.snapshot(row, end - count, count), to, end)

    moved = [move(c, jnp.int32(source), jnp.int32(target), lengths[source]) for c in (split, whole)]
    lengths = lengths.at[target].set(lengths[source])
    np.testing.assert_allclose(*(attended(c, 1, lengths) for c in moved), atol=1e-6)


def test_what_holds_as_much_for_any_length_is_not_split():
    cache = init_cache([FULL, WINDOW], ROWS, GROUPS, jnp.float32)
    assert [type(entry) is Split for entry in cache.entries] == [True, False]


def test_groups_have_all_rows():
    assert groups_of(4, 7) == (Group(4, 7),)
    with pytest.raises(ValueError, match="must have 5 rows, each a multiple of 1"):
        groups_of(5, GROUPS)
