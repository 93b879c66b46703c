"""Proposals that are copied from the text: against a search in Python, in rows of their own and in shared pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import copying
from dflash_jax.decoding.calibration import MOST_LOGIT, Lessons, init_calibration
from dflash_jax.decoding.penalties import History
from dflash_jax.decoding.proposal import Proposal, make_tree
from tests import tiny

B, S, D, PAGE = 12, 96, 7, 16


@pytest.fixture(params=["rows", "pages"])
def texts(request, monkeypatch):
    """Random texts of few different tokens, of all lengths, and the history that holds them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 + rng.integers(1, 5, (B, 1)), (B, S)).astype(np.int32)
    tokens[10, S // 2 :] = tokens[10, : S // 2]
    tokens[11] = np.arange(S) % 5
    known = np.asarray([1, 2, 3, 16, 17, 40, 60, 77, 80, 95, S, S], np.int32)
    if request.param == "rows":
        return tokens, known, History(jnp.asarray(tokens), jnp.zeros(B, jnp.int32))
    monkeypatch.setattr(copying, "PIECE", 2 * PAGE)  # looked at in three pieces
    of = rng.permutation(B * S // PAGE).reshape(B, -1)
    paged = np.full((B * S // PAGE, PAGE), 9, np.int32)
    paged[of] = tokens.reshape(B, -1, PAGE)
    return tokens, known, History(jnp.asarray(paged), jnp.zeros(B, jnp.int32), jnp.asarray(of, jnp.int32))


def searched(text, count):
    """Beginning and length of the best matches: the longest, of equal ones the latest, each with another token."""
    found, last = [], len(text)
    for place in range(1, last):
        matched = 0
        while matched < min(copying.LONGEST, place) and text[place - 1 - matched] == text[last - 1 - matched]:
            matched += 1
        found.append((matched, place))
    best = []
    for matched, place in sorted(found, reverse=True):
        if matched and text[place] not in [text[other] for _, other in best]:
            best.append((matched, place))
    return best[:count]


@pytest.mark.parametrize("count", [1, 3])
def test_copies_are_the_longest_and_latest_matches(texts, count):
    tokens, known, history = texts
    copied = jax.jit(copying.copies, static_argnums=(2, 3))(history, jnp.asarray(known), D, count)
    lengths = set()
    for row in range(B):
        text = list(tokens[row, : known[row]])
        expected = searched(text, count)
        assert [m for m in copied.matched[row].tolist() if m] == [matched for matched, _ in expected]
        for k, (matched, place) in enumerate(expected):
            goes_on = text + [None] * D
            for i in range(D):  # beyond the end of the text, as the copy goes on itself
                goes_on[len(text) + i] = goes_on[place + i]
            assert copied.tokens[row, k].tolist() == goes_on[len(text) :]
            lengths.add(matched)
    assert {1, copying.LONGEST} <= lengths


def test_how_likely_copies_are():
    copied = copying.Copies(jnp.zeros((1, 4, 3), jnp.int32), jnp.asarray([[0, 1, 8, 16]]))
    odds = np.exp(copied.logits()[0, 1:])
    np.testing.assert_allclose(odds, [[0.5, 1, 1.5], [4, 4.5, 5], [8, 8, 8]], rtol=1e-6)
    assert (copied.logits()[0, 0] == -MOST_LOGIT).all()


def paths_of(proposal, row):
    """The tokens that lead to every node of a tree, with its score."""
    paths = [()]
    for token, parent in zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], proposal.scores[row].tolist(), strict=True))


def test_a_tree_has_the_likeliest_beginnings_of_copies(texts):
    _, known, history = texts
    copied = copying.copies(history, jnp.asarray(known), D, 4)
    proposal = copying.tree(tiny.choice_of(B, D, 9).replace(nodes=9), copied)
    logits = np.asarray(copied.logits(), np.float64)
    likely = 1 / (1 + np.exp(-logits))
    for row in range(B):
        expected = {}
        for k in range(4):
            others = np.prod(1 - likely[row, :k, 0])
            for depth in range(D):
                path = (*copied.tokens[row, k, : depth + 1].tolist(),)
                expected.setdefault(path, np.log(others) + np.log(likely[row, k, : depth + 1]).sum())
        if copied.matched[row, 1] == 0:  # what has no match may be any token, and twice the same
            continue
        best = sorted(expected.values(), reverse=True)[:9]
        found = paths_of(proposal, row)
        np.testing.assert_allclose(sorted(found.values(), reverse=True), best, rtol=1e-4)
        for path, score in found.items():
            np.testing.assert_allclose(score, expected[path], rtol=1e-4)
    assert proposal.max_depth == D


@pytest.mark.parametrize("places", [False, True])
def test_a_copy_joins_a_tree(places):
    """The best nodes of both, those that are the same once, and the lessons where they have gone to."""
    rng, P, rows = np.random.default_rng(1), 8, 40
    parents, scores, tokens = (np.zeros((rows, P), t) for t in (np.int32, np.float32, np.int32))
    for row in range(rows):  # a random tree whose scores fall along its paths, the best node first
        nodes = []
        for i in range(P):
            parent = rng.integers(0, i + 1)
            deep = 1 + (nodes[parent - 1][3] if parent else 0)
            parent, deep = (parent, deep) if deep <= D else (0, 1)
            above = nodes[parent - 1][1] if parent else 0.0
            taken = {token for at, _, token, _ in nodes if at == parent}
            token = next(t for t in rng.permutation(12).tolist() if t not in taken)
            nodes.append((parent, above - rng.uniform(0.01, 1), token, deep))
        order = sorted(range(P), key=lambda i: -nodes[i][1])
        place = {0: 0} | {i + 1: at + 1 for at, i in enumerate(order)}
        for at, i in enumerate(order):
            parents[row, at], scores[row, at], tokens[row, at] = place[nodes[i][0]], nodes[i][1], nodes[i][2]
    lessons = Lessons(None, places=jnp.broadcast_to(jnp.arange(P + 1)[None], (rows, P + 1))) if places else None
    proposal = Proposal(jnp.asarray(tokens), jnp.asarray(parents), D, jnp.asarray(scores), lessons)
    copy = rng.integers(0, 12, (rows, 1, D))
    for row in range(0, rows, 2):  # half of them begin as the tree does
        path = max(paths_of(proposal, row), key=len)
        copy[row, 0, : len(path) - 1] = path[:-1]
    copied = copying.Copies(jnp.asarray(copy, jnp.int32), jnp.asarray(rng.integers(0, 17, (rows, 1))))
    both = copying.joined(proposal, copied)
    assert (both.parents <= jnp.arange(P)[None]).all()
    assert both.max_depth == D
    depth = make_tree(both).depth
    shared = 0
    for row in range(rows):
        own, found = paths_of(proposal, row), paths_of(both, row)
        likely = np.cumsum(np.log(1 / (1 + np.exp(-np.asarray(copied.logits()[row, 0], np.float64)))))
        of_copy = {(*copy[row, 0, : d + 1].tolist(),): likely[d] for d in range(D)}
        union = {path: max(own.get(path, -np.inf), of_copy.get(path, -np.inf)) for path in own | of_copy}
        shared += len(own.keys() & of_copy.keys())
        assert len(found) == P  # none stands there twice
        np.testing.assert_allclose(sorted(found.values()), sorted(union.values())[-P:], rtol=1e-4, atol=1e-5)
        for path, score in found.items():
            np.testing.assert_allclose(score, union[path], rtol=1e-4, atol=1e-5)
        if places:
            before = [None, *paths_of(proposal, row)]
            for node, path in enumerate(found, 1):
                place = int(both.lessons.places[row, node])
                assert (before[place] == path) if path in own else place == -1
                assert len(path) == depth[row, node]
    assert shared > 10


def test_chains_of_either():
    tokens = jnp.asarray([[1, 2], [3, 4], [5, 6]])
    lessons = Lessons(jnp.zeros((3, 2, 5), jnp.int32))
    copied = copying.Copies(jnp.asarray([[[7, 8]]] * 3), jnp.asarray([[9], [2], [0]]))
    take = jnp.asarray([True, False, False])
    found = copying.either(Proposal(tokens, scores=jnp.full((3, 2), -0.5), lessons=lessons), copied, take)
    assert found.tokens.tolist() == [[7, 8], [3, 4], [5, 6]]  # exp(-0.5) + exp(-1) are more than 1 / 2 + 1 / 2 * 3 / 5
    np.testing.assert_allclose(found.scores[0], np.log([9 / 11, 10 / 12]), rtol=1e-6)
    assert (found.scores[1:] == -0.5).all()
    surer = copying.either(Proposal(tokens, scores=jnp.full((3, 2), -0.7)), copied, take)  # 0.743 tokens against 0.8
    assert surer.tokens.tolist() == [[7, 8], [7, 8], [5, 6]]
    assert copying.either(Proposal(tokens), copied, take).tokens.tolist() == [[7, 8], [3, 4], [5, 6]]
    placed = found.lessons.along(None, 2)[1]
    assert placed.tolist() == [[False, False], [True, True], [True, True]]


def test_a_chain_has_what_there_is_to_learn(texts):
    _, known, history = texts
    copied = copying.copies(history, jnp.asarray(known), D)
    found = copying.chain(tiny.choice_of(B, D, 9), copied)
    assert (found.tokens == copied.tokens[:, 0]).all()
    np.testing.assert_allclose(found.scores, jax.nn.log_sigmoid(copied.logits()[:, 0]), rtol=1e-6)
    assert (found.lessons.tokens[..., 0] == found.tokens).all()


def test_what_a_tree_teaches_is_the_best_copy(texts):
    """Its lessons say of a chain what it would have got right, and nothing where there was nothing to copy."""
    _, known, history = texts
    copied = copying.copies(history, jnp.asarray(known), D, 3)
    proposal = copying.tree(tiny.choice_of(B, D, 9).replace(nodes=12), copied)
    looked_at = 0
    for row in range(B):
        paths = [(), *paths_of(proposal, row)]
        best, places = copied.tokens[row, 0].tolist(), proposal.lessons.places[row].tolist()
        if copied.matched[row, 0] == 0:
            assert set(places) == {-1}
        if copied.matched[row, 2] == 0:  # equal paths would stand there more than once
            continue
        looked_at += 1
        assert (proposal.lessons.tokens[row, :, 0] == copied.tokens[row, 0]).all()
        for path, place in zip(paths, places, strict=True):
            assert place == (len(path) if list(path) == best[: len(path)] and len(path) < D else -1)
    assert looked_at > 3


def test_a_guess_without_a_match_teaches_nothing():
    copied = copying.Copies(jnp.ones((2, 1, D), jnp.int32), jnp.asarray([[0], [3]]))
    proposal = copying.chain(tiny.choice_of(2, D, 9), copied)
    before, judged = init_calibration(D), jnp.asarray([[True] * D, [False] * D])
    right, greedy = jnp.ones((2, D), jnp.int32), jnp.zeros(2, bool)
    after = before.learn(proposal.lessons, right, None, judged, greedy)
    np.testing.assert_array_equal(after.weights, before.weights)
    after = before.learn(proposal.lessons, right, None, ~judged, greedy)
    assert (after.weights != before.weights).any()
