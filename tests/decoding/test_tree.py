"""Trees of proposals: which nodes they have, and that they change nothing but the speed."""

import heapq
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import (
    Engine,
    begin_decoding,
    load_drafter,
    load_target,
    spec_generate,
    speculative_step,
    step_functions,
)
from dflash_jax.decoding.calibration import MOST_LOGIT, SHARPNESS, Lessons, init_calibration
from dflash_jax.decoding.proposal import Proposal, accept, make_block
from dflash_jax.decoding.proposing import Options, grow, propose
from dflash_jax.decoding.selection import pick, rank
from dflash_jax.decoding.tree import Ranked, best_nodes, levels_of, pruned
from dflash_jax.infer.engine.chooser import Chains
from tests import tiny

B = 40  # cases at once
best_of = jax.jit(best_nodes, static_argnums=1)

KINDS = tiny.kinds()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trees")
    tiny.write_target(directory / "target", tiny.target_config())
    for name, raw in KINDS.items():
        tiny.write_drafter(directory / name, raw)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def ranked_cases(depth, ranks, seed=0, ties=False):
    """Random log-probabilities of every depth, the best first; with `ties`, many of them equal."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((B, depth, 3 * ranks)) * rng.uniform(0.2, 4, (B, 1, 1))
    scores = np.log(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))
    scores = np.round(scores) if ties else scores
    scores = -np.sort(-scores, axis=-1)[..., :ranks].astype(np.float32)
    tokens = rng.permuted(np.tile(np.arange(99), (B, depth, 1)), axis=-1)[..., :ranks]
    return Ranked(jnp.asarray(scores), jnp.asarray(tokens))


def by_heap(scores, nodes):
    """Rank paths of the best nodes, by a heap (method 9.1), with their scores in float32 like those of the tree."""
    depth, ranks = scores.shape
    total = lambda path: np.sum([scores[d, r] for d, r in enumerate(path)], dtype=np.float32)
    frontier, found = [(-total((0,)), 1, (0,))], []
    while frontier and len(found) < nodes:
        score, _, path = heapq.heappop(frontier)
        found.append((path, -score))
        for other in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if other[-1] < ranks and len(other) <= depth:
                heapq.heappush(frontier, (-total(other), len(other), other))
    return found


def paths_of(best, row):
    """The tokens that lead to each node, itself included."""
    tokens, parents = best.tokens[row].tolist(), best.parents[row].tolist()
    paths = [()]
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(paths)  # a parent stands before its children
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("nodes", [1, 7, 15, 16, 31, 32, 63, 64])
@pytest.mark.parametrize("depth", [1, 7, 15])
def test_selection_equals_a_heap(nodes, depth):
    ranked = ranked_cases(depth, nodes, seed=nodes)
    best = best_of(ranked, nodes)
    tokens, scores = np.asarray(ranked.tokens), np.asarray(ranked.scores)
    for row in range(B):
        expected = by_heap(scores[row], nodes)
        np.testing.assert_allclose(best.scores[row], [score for _, score in expected], rtol=1e-5)
        paths = {tuple(tokens[row, d, r] for d, r in enumerate(path)) for path, _ in expected}
        assert set(paths_of(best, row)) == paths
        # The best path of every depth that the tree reaches is in it.
        deepest = max(map(len, paths))
        assert all(tuple(tokens[row, :d, 0]) in paths for d in range(1, deepest + 1))


@pytest.mark.parametrize("nodes", [1, 5, 16, 32])
@pytest.mark.parametrize("ties", [False, True])
def test_level_by_level_finds_the_same_nodes(nodes, ties):
    ranked = ranked_cases(6, nodes, ties=ties)
    by_levels = jax.jit(lambda ranked: pruned(levels_of(ranked, nodes), nodes))
    one, other = best_of(ranked, nodes), by_levels(ranked)
    np.testing.assert_array_equal(one.scores, other.scores)
    for row in range(B):
        paths_of(one, row)
        paths_of(other, row)
        if not ties:
            assert paths_of(one, row) == paths_of(other, row)


def test_ranks_of_one_are_the_chain():
    ranked = ranked_cases(7, 7)
    best = best_of(Ranked(ranked.scores[..., :1], ranked.tokens[..., :1]), 7)
    np.testing.assert_array_equal(best.tokens, ranked.tokens[..., 0])
    np.testing.assert_array_equal(best.parents, np.tile(np.arange(7), (B, 1)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [1, pytest.param(7, marks=pytest.mark.slow), 40])
def test_growth_finds_the_best_paths_where_tokens_depend_on_those_before(nodes, temperature):
    rows, depth, V = 5, 4, 12
    table = jax.random.normal(jax.random.key(1), (rows, depth, V, V)) * 2
    choice = tiny.choice_of(rows, depth, V, temperature).replace(nodes=nodes)

    def expand(d, tips, carried):
        # What is carried must be that of the parents: the sum of the tokens so far.
        carried = jnp.take_along_axis(carried, tips.parents, axis=1) + tips.tokens
        return Options(jax.vmap(lambda of, tokens: of[tokens])(table[:, d], carried % V)), carried

    anchor = jnp.arange(rows)
    grown = jax.jit(lambda choice: grow(choice, anchor, depth, expand, jnp.zeros((rows, 1), jnp.int32)))(choice)
    noise = np.asarray(choice.noise)
    for row in range(rows):
        frontier, found = [(0.0, (), row)], []
        while len(found) <= nodes and frontier:
            cost, path, total = heapq.heappop(frontier)
            found.append((path, -cost))
            if len(path) < depth:
                scores = np.asarray(table[row, len(path), total % V])
                scores = scores / temperature + noise[row, len(path)] if temperature else scores
                scores = scores - np.logaddexp.reduce(scores)
                for token in range(V):
                    heapq.heappush(frontier, (cost - scores[token], (*path, token), total + token))
        expected = dict(found[1 : nodes + 1])
        assert set(paths_of(grown, row)) == set(expected)
        for path, score in zip(paths_of(grown, row), grown.scores[row].tolist(), strict=True):
            assert score == pytest.approx(expected[path], abs=1e-4)


def test_a_chain_is_grown_from_the_same_options():
    rows, depth, V = 3, 5, 12
    table = jax.random.normal(jax.random.key(1), (rows, depth, V, V))

    def expand(d, tips, carried):
        return Options(jax.vmap(lambda of, tokens: of[tokens])(table[:, d], tips.tokens)), carried

    choice = tiny.choice_of(rows, depth, V, 1.0)
    chain = jax.jit(lambda choice: grow(choice, jnp.zeros(rows, jnp.int32), depth, expand, None))(choice)
    assert chain.parents is None
    token = np.zeros(rows, int)
    for d in range(depth):
        token = np.argmax(table[np.arange(rows), d, token] + choice.noise[:, d], axis=1)
        np.testing.assert_array_equal(chain.tokens[:, d], token)


def test_acceptance_equals_a_walk():
    rng, nodes, rows = np.random.default_rng(0), 20, 300
    parents = np.stack([[rng.integers(max(0, i - 3), i + 1) for i in range(nodes)] for _ in range(rows)])
    tokens = rng.integers(0, 3, (rows, nodes))
    for i in range(nodes):  # children of one parent differ
        for row in range(rows):
            taken = {tokens[row, j] for j in range(i) if parents[row, j] == parents[row, i]}
            tokens[row, i] = next(t for t in (tokens[row, i] + np.arange(40)) if t not in taken)
    chosen = rng.integers(0, 3, (rows, nodes + 1))
    proposal = Proposal(jnp.asarray(tokens), jnp.asarray(parents, jnp.int32), nodes)
    stops = jnp.full((rows, 1), -1)
    accepted, _ = accept(
        jnp.asarray(chosen), make_block(jnp.zeros(rows, jnp.int32), proposal), jnp.full(rows, 99), stops
    )
    for row in range(rows):
        at, walked = 0, [0]
        while True:
            child = [i + 1 for i in range(nodes) if parents[row, i] == at and tokens[row, i] == chosen[row, at]]
            if not child:
                break
            (at,) = child
            walked.append(at)
        assert accepted.count[row] == len(walked)
        assert accepted.path[row, : len(walked)].tolist() == walked
        assert accepted.tokens[row, : len(walked)].tolist() == chosen[row, walked].tolist()
    assert max(accepted.count) > 4


@pytest.mark.parametrize("weights", [None, ((0.0, 1.0), (0.0, 1.0)), ((-0.5, 0.8), (-1.0, 0.4))])
def test_scores_are_the_drafters_probabilities_as_far_as_they_are_reliable(weights):
    """Those of a sharpness of 1, with the noise that draft and target share, whatever sharpness orders the tokens."""
    rows, depth, V = 4, 3, 16
    logits = jax.random.normal(jax.random.key(2), (rows, depth, V)) * 2
    reliability = None if weights is None else jnp.tile(jnp.asarray(weights)[:, None], (1, depth, 1))
    for temperature in (0.0, 0.7):
        choice = tiny.choice_of(rows, depth, V, temperature).replace(nodes=V, reliability=reliability)
        scored = jax.jit(lambda own: (rank(own, logits, slice(depth))[0], pick(own, logits)))
        a, b = (weights or ((0, 1), (0, 1)))[temperature > 0]
        for best, c in enumerate(SHARPNESS):
            own = choice.replace(sharpness=jnp.full(depth, best))
            ranked, picks = scored(own)
            noise = own.noise[:, :depth] if temperature else 0
            keys = logits / (temperature or 1)
            order = np.argsort(-(c * keys + noise if np.isfinite(c) else keys), axis=-1)
            p = np.take_along_axis(np.asarray(jax.nn.softmax(keys + noise)), order, axis=-1)
            p = np.minimum.accumulate(p, axis=-1)  # none is likelier than one before it
            p = np.clip(p, *(1 / (1 + np.exp([MOST_LOGIT, -MOST_LOGIT]))))
            expected = 1 / (1 + np.exp(-a) * (1 / p - 1) ** b)
            np.testing.assert_array_equal(ranked.tokens, order)
            np.testing.assert_allclose(np.exp(ranked.scores), expected, rtol=2e-4, atol=1e-5)
            np.testing.assert_array_equal(ranked.tokens[..., 0], picks.tokens)


def test_a_place_has_sixteen_ranks_at_most():
    """XLA sorts the whole vocabulary on GPUs for more."""
    logits = jax.random.normal(jax.random.key(2), (2, 3, 50))
    ranked, _ = rank(tiny.choice_of(2, 3, 50).replace(nodes=40), logits, slice(3))
    assert ranked.tokens.shape == (2, 3, 16)
    best = best_nodes(ranked, 40)
    assert best.tokens.shape == (2, 40)
    assert np.all(np.diff(best.scores) <= 0)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 40), (2, 200), (3, 400)])
def test_a_shallow_tree_has_as_many_nodes_as_it_should(depth, nodes):
    """With few depths, sixteen ranks would not do."""
    choice = tiny.choice_of(2, depth, 500).replace(nodes=nodes)
    tree = propose(choice, jax.random.normal(jax.random.key(2), (2, depth, 500)))
    assert tree.tokens.shape == tree.scores.shape == (2, nodes)


@pytest.mark.parametrize("sampled", [False, True])
def test_how_reliable_a_drafter_is_is_learnt_by_logistic_regression(sampled):
    """Tokens are right with probability sigmoid(a + b logit(p)); and of other depths and rows nothing is learned."""
    rng, rows, depth, ranks, rounds = np.random.default_rng(0), 300, 2, 4, 60
    a, b, logits, outcomes = -0.7, 0.6, [], []
    calibration = init_calibration(depth)
    for _ in range(rounds):
        z = np.sort(rng.normal(0, 2, (rows, depth, ranks)))[..., ::-1].astype(np.float32)
        right = rng.random(z.shape) < 1 / (1 + np.exp(-a - b * z))
        right[..., 1:] &= ~np.logical_or.accumulate(right, axis=-1)[..., :-1]  # one of them, at most
        tokens = np.broadcast_to(np.arange(ranks, dtype=np.int32), z.shape)
        chosen = np.where(right.any(-1), right.argmax(-1), -1).astype(np.int32)
        judged = jnp.ones((rows, depth), bool).at[:, 1].set(False)
        lessons = Lessons(None, jnp.asarray(tokens), jnp.asarray(z))
        calibration = calibration.learn(lessons, jnp.asarray(chosen), None, judged, jnp.full(rows, sampled))
        logits.append(z[:, 0])
        outcomes.append(tokens[:, 0] == chosen[:, :1])
    # The best a and b of all that was seen, by many Newton steps.
    x = np.stack([np.ones(rows * rounds * ranks), np.concatenate(logits).reshape(-1)])
    y, best = np.concatenate(outcomes).reshape(-1), np.array([0.0, 1.0])
    for _ in range(30):
        p = 1 / (1 + np.exp(-best @ x))
        best = best + np.linalg.solve((x * p * (1 - p)) @ x.T, x @ (y - p))
    learnt = np.asarray(calibration.weights)
    np.testing.assert_allclose(learnt[int(sampled), 0], best, atol=0.05)
    assert abs(best - [0, 1]).max() > 0.3
    np.testing.assert_array_equal(learnt[1 - int(sampled), 0], [0, 1])
    np.testing.assert_array_equal(learnt[:, 1], [[0, 1], [0, 1]])


# ------------------------------------------------------------------------------------------------
# In an engine

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [7, 7, 30, 31, 2, 19, 50]]
SETTINGS = {"max_new_tokens": 20, "seed": 3, "stop_token_ids": []}
ASKED = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "sampled": {"temperature": 3.0},
    "filtered": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.2},
}


@pytest.fixture(scope="module")
def plain(target):
    return {name: spec_generate(target, None, PROMPTS, **SETTINGS, **asked).tokens for name, asked in ASKED.items()}


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        *(("dflash", asked) for asked in ("greedy", "sampled")),
        *(
            pytest.param(kind, "filtered", marks=pytest.mark.slow)
            for kind in ("dflash2", "dspark", "eagle3", "lilicorr", "treeflash")
        ),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in itertools.product(KINDS, ASKED)),
    ],
)
def test_the_output_never_depends_on_the_tree(kind, asked, directory, target, plain):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    for proposals in ("calibrated", "argmax") if asked == "sampled" else ("calibrated",):
        given = SETTINGS | ASKED[asked] | {"tree": 12, "proposals": proposals}
        got = spec_generate(target, drafter, PROMPTS, **given)
        assert got.tokens == plain[asked]
        accepted = [length for row in got.acceptance_lengths for length in row]
        assert max(accepted) > 1 or asked != "sampled"  # the noise that both share decides most of these tokens


MORE = [pytest.param(n, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for n in (15, 16, 32, 64)]


@pytest.mark.lossless
@pytest.mark.parametrize("asked", ["filtered", pytest.param("greedy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("nodes", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 31, 63)), *MORE])
def test_nor_on_its_size(nodes, asked, directory, target, plain):
    drafter = load_drafter(directory / "dflash")
    got = spec_generate(target, drafter, PROMPTS, tree=nodes, **SETTINGS, **ASKED[asked])
    assert got.tokens == plain[asked]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        k if k in ("dflash2", "dspark", "eagle3", "lilicorr") else pytest.param(k, marks=pytest.mark.exhaustive)
        for k in KINDS
    ],
)
def test_no_vocabulary_is_sorted(kind, tmp_path):
    """On CPU the few largest are found without."""
    size = 512
    tiny.write_target(tmp_path / "target", tiny.target_config(vocab_size=size))
    tiny.write_drafter(tmp_path / kind, KINDS[kind] | {"vocab_size": size})
    target = load_target(tmp_path / "target")
    drafter = load_drafter(tmp_path / kind, num_target_layers=4)
    state, _ = begin_decoding(target, drafter, [[1, 2, 3]])
    for nodes in (0, 9):
        step = partial(speculative_step, step_functions(target, drafter, drafter.config.block_size, nodes=nodes))
        program = jax.jit(step).lower(state).compile().as_text()
        assert not re.findall(rf"f32\[[\d,]*{size}\]\S* sort\(|\(f32\[[\d,]*{size}\].* sort\(", program)


@pytest.mark.slow
def test_rows_that_share_a_program_have_trees_of_their_own(directory, target):
    """Slots that are used again, prompts that begin alike, log-probabilities and several samples."""
    drafter = load_drafter(directory / "dflash2")
    head = [i % 50 + 1 for i in range(16)]
    settings = {"slots": 3, "max_length": 64, "prefill_chunk": 8, "logprobs": 2}
    requests = [
        tiny.ask([*head, i], 14, 1.5 * (i % 2), sample=i % 3, id=str(i // 3), logprobs=2, repetition_penalty=1.1)
        for i in range(9)
    ]
    outcome = lambda done: [(one.token_ids, one.finish_reason) for one in done]
    expected = Engine(target, None, **settings).generate(requests)
    got = Engine(target, drafter, tree=9, prefix_chunks=4, **settings).generate(requests)
    assert outcome(got) == outcome(expected)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_choice_among_chains_and_trees(directory, target):
    drafter = load_drafter(directory / "dflash")
    requests = [tiny.ask([i + 1, 5, 9], 30, 2.0 * (i % 2), id=str(i)) for i in range(5)]
    expected = [done.token_ids for done in Engine(target, None, max_length=64).generate(requests)]
    engine = Engine(target, drafter, slots=2, max_length=64, block_size="auto", tree="auto", steps_per_visit=2)
    assert [done.token_ids for done in engine.generate(requests)] == expected
    assert list(engine.steps_by_block_size) == ["1", "4", "5", "5, tree 4", "5, tree 9"]
    chooser, rng = engine.choosers[2], np.random.default_rng(0)
    chooser.choose = lambda rows: list(rows) and list(chooser.candidates)[rng.integers(len(chooser.candidates))]
    assert [done.token_ids for done in engine.generate(requests)] == expected
    assert min(engine.steps_by_block_size.values()) > 0
    assert chooser.estimates.trees.tokens(9, Chains(2.0, 2.0)) > 0


def test_settings_that_do_not_go_together(directory, target):
    drafter = load_drafter(directory / "dflash")
    with pytest.raises(ValueError, match="tree must lie in 0..1024 nodes, got -1"):
        Engine(target, drafter, tree=-1)
    with pytest.raises(ValueError, match='"auto" goes together with block_size "auto"'):
        Engine(target, drafter, tree="auto")
