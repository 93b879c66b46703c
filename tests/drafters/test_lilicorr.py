"""LiLiCorr: its paths, its trees by a heap, and its loss by the formula. Its scores: test_golden_drafters.py."""

import dataclasses
import heapq
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from dflash_jax import load_drafter, load_target
from dflash_jax.decoding.state import Query, Seen
from dflash_jax.drafters.base import Scored
from dflash_jax.drafters.lattice import Lattice
from dflash_jax.train.config import make_config
from dflash_jax.train.drafters import converted, save_drafter, with_block_size
from dflash_jax.train.operations import trained_operations
from tests import tiny

SLOTS, K = 4, tiny.LATTICE["candidate_topk"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    target = load_target(tiny.write_target(directory / "target", tiny.target_config()))
    return target, load_drafter(tiny.write_drafter(directory / "drafter", tiny.kinds()["lilicorr"]))


def begun(target, drafter):
    """A state after six positions of two rows, and what to propose after them."""
    features = jax.random.normal(jax.random.key(1), (2, 6, 2 * target.config.hidden_size))
    positions, count = jnp.broadcast_to(jnp.arange(6)[None], (2, 6)), jnp.asarray([6, 4])
    seen = Seen(positions, features, positions, jnp.zeros(2, jnp.int32), count)
    state = drafter.commit(target, drafter.init_state(2, 16), seen)
    return state, features, Query(jnp.asarray([5, 9]), count, SLOTS + 1)


def scored(target, drafter):
    """Candidates of every slot, as they stand for rows without penalties, and their potentials."""
    state, features, query = begun(target, drafter)
    hidden = drafter.denoise(target, state.cache, query)
    logits = drafter.unembed(target, hidden)
    _, ids = jax.lax.top_k(logits.at[:, :, drafter.config.mask_token_id].set(-jnp.inf), K)
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=2)
    last = features[jnp.arange(2), query.lengths - 1]
    anchor = drafter.anchor(drafter._apply("fuse", last[:, None]), jnp.ones((2, 1), bool))
    scores = drafter.potentials(target, drafter.params["lilicorr"], Lattice(ids, likely), hidden, anchor)
    return state, query, np.asarray(ids), *map(np.asarray, scores)


def test_a_chain_takes_the_best_candidate_after_the_one_before(pair):
    state, query, ids, first, pairs = scored(*pair)
    chain = pair[1].propose(pair[0], state, query, tiny.choice_of(2, SLOTS, tiny.VOCAB))
    rank = 0
    for row in range(2):
        path = [int(np.argmax(first[row]))]
        for slot in range(SLOTS - 1):
            path.append(int(np.argmax(pairs[row, slot, path[-1]])))
        assert chain.tokens[row].tolist() == [ids[row, slot, place] for slot, place in enumerate(path)]
        rank += sum(path)
    assert rank > 0  # it is not only the drafter's own choice


@pytest.mark.parametrize("nodes", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_tree_is_that_of_a_heap(pair, nodes):
    state, query, ids, first, pairs = scored(*pair)
    choice = tiny.choice_of(2, SLOTS, tiny.VOCAB).replace(nodes=nodes)
    tree = pair[1].propose(pair[0], state, query, choice)
    for row in range(2):
        frontier, found = [(0.0, ())], set()
        while len(found) <= nodes:
            cost, path = heapq.heappop(frontier)
            found.add(path)
            if len(path) == SLOTS:
                continue
            scores = pairs[row, len(path) - 1, path[-1]] if path else first[row]
            for place, score in enumerate(scores - np.logaddexp.reduce(scores)):
                heapq.heappush(frontier, (cost - score, (*path, place)))
        paths = [()]
        for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
            paths.append((*paths[parent], token))
        assert set(paths) == {tuple(int(ids[row, slot, place]) for slot, place in enumerate(path)) for path in found}


def test_what_may_not_be_proposed_is_not(pair, monkeypatch):
    target, drafter = pair
    state, query, *_ = scored(target, drafter)
    choice = tiny.choice_of(2, SLOTS, tiny.VOCAB)
    chosen = np.asarray(drafter.propose(target, state, query, choice).tokens)
    forbidden = tuple({*chosen[:, 0].tolist(), *chosen[:, -1].tolist()})
    monkeypatch.setattr(type(drafter), "restricted", lambda _, choice: choice.restricted(None, forbidden=forbidden))
    for nodes in (0, 6):
        other = drafter.propose(target, state, query, choice.replace(nodes=nodes)).tokens
        assert not set(forbidden) & set(np.asarray(other).ravel().tolist())


@pytest.mark.parametrize("taught", [True, False])
def test_the_loss_is_that_of_the_formula(pair, taught):
    """Cross-entropy after the label of the slot before, and the target's distance weighed by the head's probability,
    as far as labels are candidates (ModelOpt, `plugins/hf_lilicorr.py`)."""
    target, drafter = pair
    rng, blocks = np.random.default_rng(0), 6
    hidden = jnp.asarray(rng.standard_normal((blocks, SLOTS, drafter.config.hidden_size)), jnp.float32)
    anchor = jnp.asarray(rng.standard_normal((blocks, 1, drafter.config.lilicorr_hidden_size)), jnp.float32)
    logits = drafter.unembed(target, hidden)
    teacher = rng.standard_normal(logits.shape).astype(np.float32) * 3
    likely, ids = jax.lax.top_k(jax.nn.log_softmax(logits), K)
    first, pairs = drafter.potentials(target, drafter.params["lilicorr"], Lattice(ids, likely), hidden, anchor)
    place = rng.integers(0, K, (blocks, SLOTS))
    labels = np.take_along_axis(np.asarray(ids), place[:, :, None], axis=2)[:, :, 0]
    labels[1, 2], labels[2, 0] = np.argmin(logits[1, 2]), -1  # no candidate; no token of the drafter's
    flat = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])
    seen = flat(hidden), flat(jnp.broadcast_to(anchor, (blocks, SLOTS, anchor.shape[2])))
    scored = Scored(seen, flat(logits), flat(labels), SLOTS, (lambda: flat(teacher)) if taught else None)
    loss, correct = drafter.refine(target, drafter.heads(), scored)
    expected, right = np.zeros((blocks, SLOTS)), np.zeros((blocks, SLOTS), bool)
    for block in range(blocks):
        scores = [first[block], *(pairs[block, slot, place[block, slot]] for slot in range(SLOTS - 1))]
        for slot, score in enumerate(scores):
            if labels[block, slot] not in ids[block, slot]:
                break
            chosen, p = place[block, slot], np.asarray(jax.nn.softmax(score), np.float64)
            theirs = teacher[block, slot, ids[block, slot]].astype(np.float64)
            expected[block, slot] = -0.25 * np.log(p[chosen])
            if taught:
                expected[block, slot] += 0.25 * np.sum(p * np.maximum(theirs[chosen] - theirs, 0))
            right[block, slot] = np.argmax(score) == chosen
    np.testing.assert_allclose(loss.reshape(blocks, SLOTS), expected, rtol=1e-4, atol=1e-6)
    assert correct.reshape(blocks, SLOTS).tolist() == right.tolist()
    assert (expected == 0).sum() == 2 + SLOTS


def test_it_begins_with_the_layers_of_a_dflash_drafter(pair, tmp_path):
    """Its head is new: unlike other kinds it does not begin by proposing the same."""
    raw = tiny.drafter_config(block_size=5)
    started = load_drafter(tiny.write_drafter(tmp_path / "dflash", raw))
    settings = {"lilicorr_candidate_topk": 4, "conv_kernel_size": 2, "conv_group_size": 8}
    config = make_config({"drafter": "lilicorr", "block_size": 5, "num_layers": 2, **settings})
    drafter, made = converted(pair[0], started, raw, config)
    query = Query(jnp.asarray([5, 9]), jnp.zeros(2, jnp.int32), 5)
    ours = drafter.denoise(pair[0], drafter.init_state(2, 16).cache, query)
    np.testing.assert_allclose(ours, started.denoise(pair[0], started.init_state(2, 16), query), atol=1e-5)
    assert made["architectures"] == ["LiLiCorrDraftModel"]
    assert drafter.config.conv_kernel_size == 2
    with pytest.raises(ValueError, match="positive"):
        make_config({"drafter": "lilicorr", "lilicorr_num_heads": 0})


def test_a_drafter_for_smaller_blocks_has_the_tensors_of_these(pair, tmp_path):
    """As other engines expect them; it proposes what the larger one does in such a block."""
    target, drafter = pair
    smaller, raw = with_block_size(drafter, tiny.kinds()["lilicorr"], 3)
    save_drafter(tmp_path / "smaller", smaller, raw)
    with safe_open(tmp_path / "smaller" / "model.safetensors", "numpy") as file:
        assert file.get_tensor("lilicorr.slot_embedding").shape == (1, 1, 2, 1, 24)
        assert file.get_tensor("lilicorr.relative_slot_bias").shape == (2, 5)
    loaded = load_drafter(tmp_path / "smaller")
    state, _, query = begun(target, drafter)
    choice, query = tiny.choice_of(2, SLOTS, tiny.VOCAB), query.replace(block_size=3)
    ours, theirs = (one.propose(target, state, query, choice).tokens for one in (loaded, drafter))
    np.testing.assert_array_equal(ours, theirs)


def test_operations_of_a_step_count_every_candidate(pair):
    """Of a head with one candidate for each slot and of this one."""
    config = make_config({"drafter": "lilicorr", "block_size": 5, "num_layers": 2, "lilicorr_candidate_topk": K})
    drafter, params = pair[1], {"lilicorr": pair[1].params["lilicorr"]}
    one = drafter.replace(config=dataclasses.replace(drafter.config, lilicorr_candidate_topk=1))
    both = [trained_operations(config, of, params) for of in (one, drafter)]
    assert 0.8 * K < both[1] / both[0] < K


def test_features_of_the_last_position_are_those_of_one_chunk(pair):
    """Committed in two parts, of which the last may be empty."""
    target, drafter = pair
    state, features, query = begun(target, drafter)
    parts, at = drafter.init_state(2, 16), jnp.zeros(2, jnp.int32)
    for start, end in pairwise((0, 4, 6)):
        positions = jnp.broadcast_to(jnp.arange(start, end)[None], (2, end - start))
        kept = jnp.clip(query.lengths - at, 0, end - start)
        parts = drafter.commit(target, parts, Seen(positions, features[:, start:end], positions, at, kept))
        at = at + kept
    np.testing.assert_allclose(parts.feature, state.feature, atol=1e-5)
