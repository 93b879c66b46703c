"""TreeFlash: its correction by the formula, and the trees that its tables make by a heap."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter, load_target, spec_generate
from dflash_jax.decoding.state import Query
from dflash_jax.drafters import treeflash
from tests import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    target = load_target(tiny.write_target(directory / "target", tiny.target_config()))
    return target, load_drafter(tiny.write_drafter(directory / "drafter", tiny.kinds()["treeflash"]))


def drafted(target, drafter):
    """States of the slots after two anchors without context, and plain logits of theirs."""
    anchor, lengths = jnp.asarray([5, 9]), jnp.zeros(2, jnp.int32)
    both = drafter.denoise(target, drafter.init_state(2, 16), Query(anchor, lengths, drafter.config.block_size))
    return anchor, both, drafter.unembed(target, both[..., drafter.config.hidden_size :])


def by_formula(target, drafter, both, before):
    """Logits of the slots of a row, each after one token."""
    D, eps, own = drafter.config.hidden_size, drafter.config.rms_norm_eps, drafter.params["ar_approximation"]
    weights = {name: np.asarray(own[name]["weight"], np.float64) for name in ("ug", "d", "norm")}
    rms = lambda x, eps: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    embedding = np.asarray(target.params["embed_tokens"], np.float64)
    h = np.asarray(both, np.float64)[:, :D]
    norm = lambda x: rms(x, eps) * np.asarray(drafter.params["norm"]["weight"], np.float64)
    joined = np.concatenate([rms(embedding[before], 1e-6) * weights["norm"], norm(h)], axis=-1)
    u, g = np.split(joined @ weights["ug"].T + np.asarray(own["ug"]["bias"], np.float64), 2, axis=-1)
    return norm(h + (g / (1 + np.exp(-g)) * u) @ weights["d"].T) @ embedding.T


def test_the_correction_is_that_of_the_formula(pair):
    _, both, _ = drafted(*pair)
    before = np.random.default_rng(0).integers(0, 60, both.shape[:2])
    logits = pair[1].behind(pair[0], both, jnp.asarray(before)[:, :, None])[:, :, 0]
    for row in range(2):
        np.testing.assert_allclose(logits[row], by_formula(*pair, both[row], before[row]), atol=1e-4)


def test_a_chain_goes_by_the_best_tokens_of_the_plain_slots(pair):
    target, drafter = pair
    anchor, both, plain = drafted(target, drafter)
    before = jnp.concatenate([anchor[:, None], jnp.argmax(plain[:, :-1], axis=-1)], axis=1)
    expected = [np.argmax(by_formula(target, drafter, both[row], np.asarray(before[row])), axis=-1) for row in (0, 1)]
    choice = tiny.choice_of(2, 4, tiny.VOCAB)
    lengths = jnp.zeros(2, jnp.int32)
    chain = drafter.propose(target, drafter.init_state(2, 16), Query(anchor, lengths, 5), choice)
    np.testing.assert_array_equal(chain.tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [5, 20])
def test_a_tree_is_that_of_a_heap(pair, nodes, monkeypatch):
    monkeypatch.setattr(treeflash, "TOP", 3)  # so that there are nodes without children
    target, drafter = pair
    anchor, both, plain = drafted(target, drafter)
    choice = tiny.choice_of(2, 4, tiny.VOCAB).replace(nodes=nodes)
    lengths = jnp.zeros(2, jnp.int32)
    tree = drafter.propose(target, drafter.init_state(2, 16), Query(anchor, lengths, 5), choice)
    leaves = 0
    for row in range(2):
        best = np.argsort(-np.asarray(plain[row]), axis=-1)[:, :3]
        frontier, found = [(0.0, ())], []
        while len(found) <= nodes:
            cost, path = heapq.heappop(frontier)
            found.append(path)
            slot = len(path)
            if slot == 4:
                continue
            if slot and path[-1] not in best[slot - 1]:
                leaves += 1
                continue
            before = np.full(4, path[-1] if slot else int(anchor[row]))
            logits = by_formula(target, drafter, both[row], before)[slot]
            logits[drafter.config.mask_token_id] = -np.inf
            scores = logits - np.logaddexp.reduce(logits)
            for token in np.argsort(-scores)[: choice.ranks].tolist():
                heapq.heappush(frontier, (cost - scores[token], (*path, token)))
        assert _paths(tree.tokens[row].tolist(), tree.parents[row].tolist()) == set(found)
    assert leaves > 0


@pytest.mark.slow
def test_without_the_correction_it_is_a_dflash_drafter(pair, tmp_path):
    raw = tiny.kinds()["treeflash"] | {"treeflash_config": {"candidate_tokens": 64, "ar_approximation": None}}
    loaded = load_drafter(tiny.write_drafter(tmp_path / "plain", raw))
    v1 = load_drafter(tiny.write_drafter(tmp_path / "dflash", tiny.drafter_config(block_size=5)))
    settings = {"max_new_tokens": 12, "seed": 1, "temperature": 1.0, "tree": 6}
    ours, theirs = (spec_generate(pair[0], drafter, [[5, 9, 11]], **settings) for drafter in (loaded, v1))
    assert ours == theirs
    assert jax.tree.structure(loaded.params) == jax.tree.structure(v1.params)


@pytest.mark.parametrize("temperature", [*(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 5.0)), 1.0])
def test_a_correction_of_zero_proposes_the_trees_of_a_dflash_drafter(pair, tmp_path, temperature):
    """At a high temperature too, where the noise that draft and target share decides which tokens are likely."""
    target, drafter = pair
    v1 = load_drafter(tiny.write_drafter(tmp_path / "dflash", tiny.drafter_config(block_size=5)))
    params = jax.tree.map(jnp.copy, drafter.params)
    params |= {name: v1.params[name] for name in v1.params}
    params["ar_approximation"]["d"]["weight"] = jnp.zeros_like(params["ar_approximation"]["d"]["weight"])
    choice = tiny.choice_of(2, 4, tiny.VOCAB, temperature).replace(nodes=12)
    asked = Query(jnp.asarray([5, 9]), jnp.zeros(2, jnp.int32), 5), choice
    trees = [one.propose(target, one.init_state(2, 16), *asked) for one in (v1, drafter.replace(params=params))]
    for row in range(2):
        paths = [_paths(tree.tokens[row].tolist(), tree.parents[row].tolist()) for tree in trees]
        assert paths[0] == paths[1]


def _paths(tokens, parents):
    """The path to each node."""
    paths = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return set(paths)
