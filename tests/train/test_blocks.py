"""Packed training computes what decoding computes, position by position; three classic mistakes do not."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter, load_target
from dflash_jax.cache import commit
from dflash_jax.decoding.state import Query
from dflash_jax.kernels.dispatch import using
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.models.attention import Pass
from dflash_jax.train import blocks
from dflash_jax.train.blocks import Blocks, draw_blocks, target_features
from tests import tiny

LENGTH = 48
SIZES = [[17, 20, 5], [30, 12]]  # documents of two packed rows; the rest is empty


WINDOWED = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5, "use_sliding_window": True}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    tokens = np.zeros((2, LENGTH), np.int32)
    starts = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH)).copy()
    supervised = np.zeros((2, LENGTH), bool)
    for row, sizes in enumerate(SIZES):
        at = 0
        for size in sizes:
            tokens[row, at : at + size] = rng.integers(0, 60, size)
            starts[row, at : at + size] = at
            supervised[row, at + 3 : at + size] = True
            at += size
    supervised[0, 25] = False  # a hole in an answer
    return jnp.asarray(tokens), jnp.asarray(starts), jnp.asarray(supervised)


@pytest.mark.parametrize("kind", ["full", "windowed", "windowed, whole rows"])
def test_features_of_a_packed_document_are_those_it_has_alone(target, rows, kind, monkeypatch, tmp_path):
    monkeypatch.setattr("dflash_jax.train.blocks.TARGET_CHUNK", 16)  # more than a window's ring holds
    packed, mesh = target, None
    if kind != "full":
        directory = tiny.write_target(tmp_path, tiny.target_config(**WINDOWED))
        mesh = make_mesh(parse_mesh("fsdp=2", jax.devices()[:2]), jax.devices()[:2]) if "whole" in kind else None
        target, packed = load_target(directory), load_target(directory, mesh=mesh)
    tokens, starts, _ = rows
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        features, hidden = jax.jit(lambda t: target_features(t, (0, 2), tokens, starts))(packed)
    alone = jax.jit(lambda t, x: t.forward(x, jnp.arange(LENGTH)[None], None, t.init_cache(1, LENGTH), taps=(0, 2)))
    at = 0
    for size in SIZES[0]:
        expected, tapped, _ = alone(target, jnp.roll(tokens[:1], -at, axis=1))
        np.testing.assert_allclose(features[0, at : at + size], tapped[0, :size], atol=2e-5)
        np.testing.assert_allclose(hidden[0, at : at + size], expected[0, :size], atol=2e-5)
        at += size


@pytest.mark.parametrize(
    "family", [f if f == "qwen3" else pytest.param(f, marks=pytest.mark.slow) for f in tiny.FAMILIES]
)
def test_one_pass_over_a_row_finds_the_features_of_many(family, rows, tmp_path, monkeypatch):
    """As accelerators do it, in one pass or in large ones. Recurrences round differently in other pieces."""
    monkeypatch.setattr(blocks, "TARGET_CHUNK", 16)
    changes = {name: value for name, value in tiny.FAMILIES[family].items() if name != "quantization_config"}
    target = load_target(tiny.write_target(tmp_path, tiny.target_config(model_type=family, **changes)))
    tokens, starts, _ = rows
    find = lambda: jax.jit(lambda t: target_features(t, (0, 2), tokens, starts))(target)
    expected = find()
    with using("xla", "tpu"):
        whole = find()
        monkeypatch.setattr(blocks, "WHOLE_ROW", LENGTH - 1)
        monkeypatch.setattr(blocks, "LARGE_CHUNK", 32)
        for found in (whole, find()):
            for mine, right in zip(found, expected, strict=True):
                for row, sizes in enumerate(SIZES):  # what follows is empty
                    used = right[row, : sum(sizes)]
                    np.testing.assert_allclose(mine[row, : sum(sizes)], used, atol=1e-4 * np.abs(used).max())


def test_fixed_anchors_divide_each_answer_into_blocks(rows):
    _, starts, supervised = (np.asarray(x) for x in rows)
    draw = lambda seed: draw_blocks(
        jax.random.split(jax.random.key(seed), 2),
        *rows,
        count=LENGTH,
        per_document=LENGTH,
        block_size=4,
        predictions=3,
        placement="fixed",
    )
    drawn = draw(0)
    for row in range(2):
        expected = []
        for start in np.cumsum([0, *SIZES[row]])[: len(SIZES[row])]:
            answer = [i for i in range(LENGTH) if starts[row, i] == start and supervised[row, i]]
            expected += [i for i in answer[::4] if i + 1 in answer]
        used = np.asarray(drawn.labelled[row]).any(axis=-1)
        assert np.asarray(drawn.anchors[row])[used].tolist() == expected
    np.testing.assert_array_equal(drawn.anchors, draw(1).anchors)


def test_anchors_where_steps_began(rows):
    _, starts, supervised = (np.asarray(x) for x in rows)
    begins = jnp.arange(LENGTH)[None] % 3 == jnp.asarray([[0], [1]])
    counts = {"count": LENGTH, "per_document": LENGTH, "block_size": 4, "predictions": 3, "placement": "decoded"}
    drawn = draw_blocks(jax.random.split(jax.random.key(0), 2), *rows, begins, **counts)
    for row in range(2):
        follows = lambda i, row=row: supervised[row, i + 1] and starts[row, i + 1] == starts[row, i]
        expected = [i for i in range(LENGTH - 1) if supervised[row, i] and follows(i) and i % 3 == row]
        used = np.asarray(drawn.labelled[row]).any(axis=-1)
        assert np.asarray(drawn.anchors[row])[used].tolist() == expected
        assert expected


@pytest.mark.parametrize("predicts", [False, True])
def test_anchors_and_labels_against_a_truth_table(rows, predicts):
    tokens, starts, supervised = (np.asarray(x) for x in rows)
    compiled = jax.jit(draw_blocks, static_argnames=("count", "per_document", "block_size", "predictions"))
    draw = lambda seed, count, most=LENGTH: compiled(
        jax.random.split(jax.random.key(seed), 2),
        *rows,
        count=count,
        per_document=most,
        block_size=4,
        predictions=4 if predicts else 3,
    )
    everything = draw(0, LENGTH)
    for row in range(2):
        follows = lambda i, row=row: supervised[row, i + 1] and starts[row, i + 1] == starts[row, i]
        valid = [i for i in range(LENGTH - 1) if supervised[row, i] and follows(i)]
        anchors = np.asarray(everything.anchors[row])
        assert anchors[: len(valid)].tolist() == valid
        assert not np.asarray(everything.labelled[row, len(valid) :]).any()
        for a, anchor in enumerate(valid):
            assert everything.tokens[row, a] == tokens[row, anchor]
            assert everything.starts[row, a] == starts[row, anchor]
            for k in range(4 if predicts else 3):
                at = anchor + 1 + k
                counts = at < LENGTH and supervised[row, at] and starts[row, at] == starts[row, anchor]
                assert bool(everything.labelled[row, a, k]) == counts
                if counts:
                    assert everything.labels[row, a, k] == tokens[row, at]
                    assert everything.label_positions[row, a, k] == at
    few, other = draw(0, 5), draw(1, 5)
    assert (np.diff(few.anchors, axis=1) > 0).all()  # without replacement, ascending
    assert np.asarray(few.labelled).any(axis=-1).all()
    assert (few.anchors != other.anchors).any()  # fresh at every visit
    three = draw(2, LENGTH, 3)
    for row in range(2):
        used = np.asarray(three.labelled[row]).any(axis=-1)
        drawn = np.unique(np.asarray(three.starts[row])[used], return_counts=True)
        places = np.cumsum([0, *SIZES[row]])[: len(SIZES[row])]
        enough = [
            min(
                3,
                int(
                    (
                        np.asarray(everything.starts[row])[: len(everything.labelled[row])][
                            np.asarray(everything.labelled[row]).any(axis=-1)
                        ]
                        == place
                    ).sum()
                ),
            )
            for place in places
        ]
        assert dict(zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)) == dict(
            zip(places.tolist(), enough, strict=True)
        )


@partial(jax.jit, static_argnames="block_size")
def decoded(target, drafter, tokens, features, anchor, start, block_size):
    """What decoding computes for one anchor: context committed up to it, then one draft pass."""
    cache = context(drafter, features, start, anchor)
    return drafter.denoise(target, cache, Query(tokens[anchor][None], (anchor - start)[None], block_size))[0]


def context(drafter, features, start, end):
    """A draft cache holding positions `start..end - 1` of a packed row."""
    blocks = drafter.context(jnp.roll(features, -start, axis=0)[None], jnp.arange(LENGTH)[None])
    return commit(drafter.init_state(1, LENGTH), blocks, jnp.zeros(1, jnp.int32), (end - start)[None])


@jax.jit
def inclusive(target, drafter, tokens, features, anchor, start):
    """The mistake of letting a block see its anchor's own feature."""
    block = jnp.full((1, 8), tiny.MASK).at[:, 0].set(tokens[anchor])
    positions = (anchor - start)[None, None] + jnp.arange(8)[None]
    cache, lengths = context(drafter, features, start, anchor + 1), (anchor + 1 - start)[None]
    hidden, _ = drafter.forward(target.embed(block), Pass(positions, None, lengths, None), cache)
    return hidden[0, 0 if drafter.config.anchor_predicts else 1 :]


DRAFTERS = {
    "full": {},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    },
    "causal": {"dflash_config": {"causal": True}},
    "anchor predicts": {"dflash_config": {"sample_from_anchor": True}},
}


@pytest.mark.parametrize("name", [n if n == "full" else pytest.param(n, marks=pytest.mark.slow) for n in DRAFTERS])
def test_packed_blocks_equal_decoding(target, rows, name, tmp_path):
    drafter = load_drafter(tiny.write_drafter(tmp_path, tiny.drafter_config(**DRAFTERS[name])))
    predicts = drafter.config.anchor_predicts
    tokens, starts, _ = rows
    features, _ = target_features(target, drafter.taps, tokens, starts)
    blocks = draw_blocks(
        jax.random.split(jax.random.key(3), 2),
        *rows,
        count=9,
        per_document=9,
        block_size=8,
        predictions=8 if predicts else 7,
    )
    packed = jax.jit(drafter.teacher_forced)(target, features, blocks)

    other, _ = target_features(target, tuple(tap + 1 for tap in drafter.taps), tokens, starts)
    used = np.asarray(blocks.labelled).any(axis=-1)
    assert used.sum() > 9
    wrong = {"inclusive": 0.0, "layer": 0.0}
    for row, a in np.argwhere(used):
        where = blocks.anchors[row, a], blocks.starts[row, a]
        alone = decoded(target, drafter, tokens[row], features[row], *where, 8)
        np.testing.assert_allclose(packed[row, a], alone, atol=5e-5)
        mistakes = {
            "inclusive": inclusive(target, drafter, tokens[row], features[row], *where),
            "layer": decoded(target, drafter, tokens[row], other[row], *where, 8),
        }
        wrong = {name: max(wrong[name], float(jnp.abs(packed[row, a] - x).max())) for name, x in mistakes.items()}
    assert min(wrong.values()) > 1e-2  # an inclusive anchor and an off-by-one layer are seen


@pytest.mark.slow
def test_labels_are_what_decoding_proposes_for(target, drafter, rows):
    """A drafter's own proposals, written into the rows after an anchor, are labeled right in every slot."""
    tokens, starts, _ = rows
    anchor, block_size = 22, 8
    features, _ = target_features(target, drafter.taps, tokens, starts)
    hidden = decoded(target, drafter, tokens[0], features[0], jnp.int32(anchor), jnp.int32(17), block_size)
    proposals = jnp.argmax(drafter.unembed(target, hidden[None])[0], axis=-1)
    written = tokens.at[0, anchor + 1 : anchor + 1 + len(proposals)].set(proposals)
    supervised = jnp.zeros_like(rows[2]).at[0, anchor : anchor + 8].set(True)
    blocks = draw_blocks(
        jax.random.split(jax.random.key(0), 2),
        written,
        starts,
        supervised,
        count=8,
        per_document=8,
        block_size=8,
        predictions=7,
    )
    blocks = Blocks(*(x[:1] for x in blocks))
    (at,) = np.flatnonzero(np.asarray(blocks.anchors[0]) == anchor)[:1]
    hidden = drafter.teacher_forced(target, features[:1], blocks)
    best = jnp.argmax(drafter.unembed(target, hidden[0])[at], axis=-1)
    np.testing.assert_array_equal(best, blocks.labels[0, at])
    assert (best[:-1] != blocks.labels[0, at, 1:]).any()  # labels shifted by one would be seen


def test_unused_blocks_and_empty_rows_have_finite_gradients(target, drafter, rows):
    tokens, starts, supervised = rows
    blocks = draw_blocks(
        jax.random.split(jax.random.key(0), 2),
        tokens,
        starts,
        supervised.at[1].set(False),
        count=40,
        per_document=40,
        block_size=8,
        predictions=7,
    )
    assert not np.asarray(blocks.labelled[1]).any()
    features, _ = target_features(target, drafter.taps, tokens, starts)

    def total(params):
        hidden = drafter.replace(params=params).teacher_forced(target, features, blocks)
        return jnp.sum(jnp.where(blocks.labelled[..., None], hidden, 0))

    gradient = jax.jit(jax.grad(total))(drafter.params)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))
