"""The choice of the block size: it finds what pays, notices changes, and is never far from not speculating."""

import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine.chooser import (
    Acceptance,
    Budgets,
    Candidate,
    Chains,
    Chooser,
    Draft,
    Estimates,
    Outcome,
    Trees,
    block_sizes,
    budgets,
    expected_tokens,
    small_trees,
    tree_sizes,
)
from tests import tiny

COSTS = {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.5}
LIFE = 12  # visits of a request


def proposed(size):
    return size - 1


def candidates(seconds):
    return {size: Candidate(proposed(size), time) for size, time in seconds.items()}


def simulate(rate_of, visits, seed=0, costs=COSTS, rows=1, pace=lambda visit: 1.0, believed=COSTS):
    """Tokens per second of `visits` visits with acceptance rate `rate_of(visit)`, steps taking `pace(visit)` times
    their costs, which were measured as `believed` at first; and the sizes chosen."""
    rng, chooser = np.random.default_rng(seed), Chooser(candidates(believed))
    tokens = seconds = 0.0
    sizes = []
    for visit in range(visits):
        requests = [(slot, (visit + slot) // LIFE) for slot in range(rows)]
        size = chooser.choose(requests)
        sizes.append(size)
        seen, steps = {}, chooser.try_steps if chooser.trying else 16
        for row in requests:
            right = rng.random((steps, proposed(size))) < rate_of(visit)
            seen[row] = (1 + np.cumprod(right, axis=1).sum(axis=1)).astype(int).tolist()
            tokens += sum(seen[row])
        took = steps * costs[size] * pace(visit) * rng.uniform(0.97, 1.03)
        seconds += took
        chooser.observe(size, steps, took, {row: Outcome(counts) for row, counts in seen.items()})
    return tokens / rows / seconds, sizes


def test_expected_tokens():
    assert expected_tokens([0.5, 0.5, 1.0], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert expected_tokens([0.5, 0.5], 0) == 1
    seen = Acceptance(3)
    for committed in (1, 1, 2, 4):
        seen.observe(3, committed)
    assert seen.rates([0.0] * 3, 1e-9) == pytest.approx([0.5, 0.5, 1.0], abs=0.01)
    # What few steps reach says little of the rest: 12 steps of a prior, all of them right, and 12 own ones, all wrong.
    seen = Acceptance(3, memory=1e9)
    for _ in range(12):
        seen.observe(3, 1)
    assert expected_tokens(seen.rates([1.0] * 3, 12.0), 3) == pytest.approx(1 + 3 * 0.5)
    for _ in range(12):
        seen.observe(3, 4)
    assert expected_tokens(seen.rates([0.0] * 3, 12.0), 3) == pytest.approx(1 + 3 / 3)
    assert block_sizes(16) == (1, 4, 8, 16)
    assert block_sizes(10) == (1, 4, 8, 10)
    assert block_sizes(3) == (1, 3)
    assert tree_sizes(15, wide=False) == (15, 31)
    assert tree_sizes(7, wide=True) == (7, 15, 31)


def test_trees_are_known_by_what_was_seen_of_one():
    trees = Trees()
    ratio = lambda nodes: trees.tokens(nodes, Chains(4.0, 4.0)) / 4.0
    assert ratio(31) > ratio(15) > 1.1  # untried ones promise enough to be tried
    for _ in range(30):
        trees.observe(31, 16 * 5.2, Chains(16 * 4.0, 16 * 4.0), 16, {15: 3.2, 31: 4.2})
    assert ratio(31) == pytest.approx(1.3)
    assert ratio(15) == pytest.approx(1.3 * 4.2 / 5.2)  # as its best nodes promised
    for _ in range(30):  # and now another one runs, and gains nothing
        trees.observe(15, 16 * 4.0, Chains(16 * 4.0, 16 * 4.0), 16, {7: 2.0, 15: 3.2})
    assert ratio(15) == pytest.approx(1.0, abs=0.02)
    assert ratio(31) < 1.1


def test_trees_of_shorter_blocks_are_parts_of_the_larger_ones():
    trees, chains = Trees(), Chains(2.0, 2.5)  # of a short block, and of the longest
    for _ in range(30):
        trees.observe(15, 16 * 3.0, Chains(16 * 2.5, 16 * 2.5), 16, {3: 1.1, 5: 1.4, 7: 1.6, 15: 2.0})
    assert trees.tokens(7, chains) == pytest.approx(3.0 * 2.6 / 3.0)
    assert trees.tokens(5, chains) == pytest.approx(3.0 * 2.4 / 3.0)
    for _ in range(30):  # of the short block's own tree: what is known of it, and what follows for the larger one
        trees.observe(5, 16 * 2.2, Chains(16 * 2.0, 16 * 2.5), 16, {3: 1.1, 5: 1.4})
    assert trees.tokens(5, chains) == pytest.approx(2.2, abs=0.01)
    assert trees.tokens(3, chains) == pytest.approx(2.2 * 2.1 / 2.4, abs=0.01)
    assert trees.tokens(15, Chains(2.5, 2.5)) == pytest.approx(2.2 / 2.0 * 2.5, rel=0.1)
    assert small_trees(16) == (Draft(8, 7), Draft(8, 5), Draft(4, 3))
    assert small_trees(8) == (Draft(4, 3),)


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.15, 1.3])
def test_a_tree_is_chosen_where_it_pays(gain):
    """Trees of 15 and 31 nodes beside chains; a tree of 31 commits once more as much again."""
    rng, rate = np.random.default_rng(0), 0.8
    drafts = {Draft(size): cost for size, cost in COSTS.items()} | {Draft(16, 15): 2.55, Draft(16, 31): 3.4}
    chooser = Chooser({draft: Candidate(draft.block_size - 1, cost, draft.nodes) for draft, cost in drafts.items()})
    tokens = seconds = 0.0
    for visit in range(300):
        draft = chooser.choose([visit // LIFE])
        right = rng.random((16, draft.block_size - 1)) < rate
        chain = np.cumprod(right, axis=1).sum(axis=1)
        more = {0: 1.0, 15: gain, 31: gain**1.5}[draft.nodes]
        committed = np.floor((1 + chain) * more + rng.random(16)).astype(int)
        committed = np.maximum(committed, 1)
        mean = committed.mean() - 1
        expected = {15: mean, 31: mean * gain**0.5} if draft.nodes == 31 else {15: mean}
        seen = Outcome(committed.tolist(), np.minimum(chain, committed).tolist() if draft.nodes else None)
        took = 16 * drafts[draft] * rng.uniform(0.97, 1.03)
        chooser.observe(draft, 16, took, {visit // LIFE: seen}, expected if draft.nodes else None)
        if visit >= 60:
            tokens, seconds = tokens + committed.sum(), seconds + took
    each = lambda draft: (
        expected_tokens([rate] * 15, draft.block_size - 1) * {0: 1.0, 15: gain, 31: gain**1.5}[draft.nodes]
    )
    best = max(each(draft) / cost for draft, cost in drafts.items())
    assert tokens / seconds > 0.9 * best


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("rows", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 32))])
def test_it_is_near_the_best_fixed_size(rate, rows):
    best = max(expected_tokens([rate] * 15, proposed(size)) / cost for size, cost in COSTS.items())
    speed, _ = simulate(lambda visit: rate, 600, rows=rows)
    assert speed > 0.95 * best


def test_it_follows_a_change():
    _, sizes = simulate(lambda visit: 0.0 if visit < 200 else 0.95, 600)
    assert set(sizes[100:190]) <= {1, 4}
    assert sizes[100:190].count(4) < 5
    assert sizes[400:].count(16) > 190  # and a try now and then
    _, sizes = simulate(lambda visit: 0.95 if visit < 200 else 0.0, 600)
    assert sizes[150:200].count(16) > 47
    assert sizes[300:350].count(1) > 40  # a new request is expected to be like the last
    assert sizes[450:].count(1) > 145


def test_it_is_nearly_as_fast_as_plain_decoding_where_speculation_never_pays():
    speed, sizes = simulate(lambda visit: 0.1, 1000)
    assert set(sizes[100:]) <= {1, 4}
    assert 2 <= sizes[100:].count(4) <= 20
    assert speed > 0.98


def test_tries_are_short_where_many_rows_take_part():
    """What a try costs is a step of the batch, and what it tells is a step of every row."""
    chooser = Chooser(candidates(COSTS))
    for rows, steps in ((1, 4), (8, 4), (16, 2), (32, 1), (256, 1)):
        chooser.choose(range(rows))
        assert chooser.try_steps == steps
    costs = {1: 1.0, 4: 3.5, 8: 7.0, 16: 14.0}  # of a processor, with 32 rows
    speed, sizes = simulate(lambda visit: 0.1, 180, rows=32, costs=costs, believed=costs)
    assert sizes.count(4) >= 3
    assert speed > 0.99


def test_the_pace_of_the_machine_changes_no_choice():
    """What is measured while other work slows the machine is not held against the size in use."""
    pace = lambda visit: 3.0 if visit // 20 % 2 else 1.0
    _, sizes = simulate(lambda visit: 0.1, 400, pace=pace)
    assert sizes[20:].count(1) > 0.95 * len(sizes[20:])
    _, sizes = simulate(lambda visit: 0.95, 400, pace=pace)
    assert sizes[20:].count(16) > 0.95 * len(sizes[20:])


@pytest.mark.parametrize("believed", [COSTS | {4: 1.1}, COSTS | {8: 1.3, 16: 1.6}, COSTS | {1: 1.5}])
def test_wrong_first_measurements_are_mended(believed):
    """Speculation that seems to pay, and does not."""
    speed, sizes = simulate(lambda visit: 0.35, 300, believed=believed)
    assert sum(size > 1 for size in sizes[150:]) < 25
    assert speed > 0.95


@pytest.mark.slow
def test_a_hiccup_changes_no_choice():
    """One visit that takes thirty times as long, whichever it is."""
    for at in range(0, 60, 3):
        _, sizes = simulate(lambda visit: 0.9, 120, pace=lambda visit, at=at: 30.0 if visit == at else 1.0)
        assert sum(size != 16 for size in sizes) < 20


def test_a_slow_step_is_noticed():
    chooser = Chooser(candidates(COSTS))
    for _ in range(60):
        size = chooser.choose([0])
        chooser.observe(size, 16, 16 * (9.0 if size == 16 else COSTS[size]), {0: Outcome([size] * 16)})
    assert size == 8
    assert sum(chooser.used.values()) == 60 * 16


def test_a_visit_of_unknown_duration_counts_for_acceptance_alone():
    chooser = Chooser(candidates(COSTS))
    for _ in range(20):
        size = chooser.choose([0])
        chooser.observe(size, 16, None, {0: Outcome([size] * 16)})
    assert size == 16
    assert sum(chooser.used.values()) == 20 * 16
    assert {name: candidate.seconds for name, candidate in chooser.candidates.items()} == COSTS


@pytest.mark.slow
def test_the_choice_never_changes_the_answers(target, drafter):
    requests = [tiny.ask([i + 1, 5, 9], 40, temperature=0.4 * (i % 2), id=str(i)) for i in range(5)]
    expected = [done.token_ids for done in Engine(target, None, max_length=64).generate(requests)]
    engine = Engine(target, drafter, slots=2, max_length=64, block_size="auto", tree=0, steps_per_visit=2)
    assert [done.token_ids for done in engine.generate(requests)] == expected
    chooser = engine.choosers[2]
    assert set(chooser.used) == {Draft(1), Draft(4), Draft(8)}
    rng = np.random.default_rng(0)
    for sizes in ((1,), (4,), (8,), (1, 4, 8)):  # each of them and any order, whatever pays
        chooser.choose = lambda rows, sizes=sizes: list(rows) and Draft(int(rng.choice(sizes)))
        assert [done.token_ids for done in engine.generate(requests)] == expected
    assert min(chooser.used.values()) > 0


@pytest.mark.slow
def test_speculation_goes_on_where_it_was_left_out(target, drafter):
    """Steps without speculation keep the draft cache alive: what follows is accepted as if it had never paused."""
    request = tiny.ask([7, 3, 9], 40)
    plain = Engine(target, drafter, max_length=64, block_size=8).generate([request])[0]
    engine = Engine(target, drafter, max_length=64, block_size="auto", steps_per_visit=1)
    engine.warm_up()
    turn = iter([1] * 6)
    engine.choosers[1].choose = lambda rows: list(rows) and Draft(next(turn, 8))
    mixed = engine.generate([request])[0]
    assert mixed.token_ids == plain.token_ids
    assert mixed.acceptance_lengths[:6] == [1] * 6
    at, begins = 1, {}
    for n in plain.acceptance_lengths:
        begins[at] = n
        at += n
    at, compared = 7, 0
    for n in mixed.acceptance_lengths[6:]:
        if at in begins:
            assert n == begins[at]
            compared += 1
        at += n
    assert compared > 0


def test_a_budget_goes_to_the_likeliest_positions():
    easy, hard = [0.9] * 7, [0.3] * 7
    candidate = Candidate(7, 1.0, positions=3 * 4)
    reached = sorted([0.9**k for k in range(1, 8)] * 2 + [0.3**k for k in range(1, 8)] * 2, reverse=True)
    assert Budgets.by_rates(candidate, [easy, hard] * 2) == pytest.approx(4 + sum(reached[:8]))
    estimates = Estimates(7)
    expected = 1.1 * Budgets.by_rates(candidate, [easy, hard] * 2)  # before any was seen
    assert estimates.gain(candidate, [easy, hard] * 2) == pytest.approx(expected)
    for _ in range(4000):
        estimates.budgets.observe(12.0, 8.0, 4)
    assert estimates.gain(candidate, [easy, hard] * 2) == pytest.approx(1.5 / 1.1 * expected, rel=0.01)
    assert budgets(16) == (Draft(8, 0, 3), Draft(8, 0, 4), Draft(16, 0, 6))
    assert budgets(8) == (Draft(8, 0, 3), Draft(8, 0, 4), Draft(8, 0, 6))
    assert budgets(4) == (Draft(4, 0, 3),)
    assert Draft(16, 0, 6).label == "16, budget 6"


def test_what_a_budget_left_out_is_no_success():
    """A row of rate 0.5 verifies its next token only where the drafter is sure of it."""
    rng, seen = np.random.default_rng(0), Acceptance(4)
    for _ in range(4000):
        likely = rng.choice([0.9, 0.1])
        verified = int(likely > 0.5)
        right = rng.random() < likely
        seen.observe(verified, 1 + int(verified and right), float(likely))
    assert seen.right[0] / seen.tried[0] == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(("cost", "pays"), [(1.05, True), (1.45, False)])
def test_a_budget_is_chosen_where_it_pays(cost, pays):
    """The drafter is sure of half of its proposals, and knows of which."""
    rng, rows = np.random.default_rng(0), range(32)
    drafts = {Draft(4): 1.0, Draft(8): 1.6, Draft(8, 0, 4): cost}
    chooser = Chooser(
        {draft: Candidate(draft.block_size - 1, time, positions=32 * draft.budget) for draft, time in drafts.items()}
    )
    taken = dict.fromkeys(drafts, 0)
    for _ in range(300):
        draft = chooser.choose(rows)
        taken[draft] += 1
        seen = {row: Outcome([], None, [], []) if draft.budget else Outcome([]) for row in rows}
        for _ in range(16):
            likely = rng.choice([0.98, 0.1], (32, draft.block_size - 1))
            right, verified = rng.random(likely.shape) < likely, np.full(32, draft.block_size - 1)
            if draft.budget:
                least = np.sort(np.cumprod(likely, axis=1), axis=None)[-32 * (draft.budget - 1)]
                verified = np.sum(np.cumprod(likely, axis=1) >= least, axis=1)
            count = 1 + np.cumprod(right & (np.arange(right.shape[1]) < verified[:, None]), axis=1).sum(axis=1)
            for row, outcome in seen.items():
                outcome.committed.append(int(count[row]))
                if draft.budget:
                    outcome.verified.append(int(verified[row]))
                    outcome.following.append(float(likely[row, min(verified[row], draft.block_size - 2)]))
        chooser.observe(draft, 16, 16 * drafts[draft], seen)
    best = max(taken, key=lambda draft: taken[draft])
    assert bool(best.budget) == pays
    assert taken[best] > 250


def test_budgets_that_leave_nothing_out_are_no_budgets(target, drafter):
    drafts = lambda **settings: Engine(target, drafter, max_length=64, **settings).drafts
    assert drafts(block_size=4, verify_budget=20).choices == (Draft(4),)
    assert drafts(block_size=4, verify_budget=3).choices == (Draft(4, 0, 3),)
    assert drafts(block_size=4, tree=9, verify_budget=9).choices == (Draft(4, 9, 9),)
    assert not any(draft.budget for draft in drafts(block_size="auto", verify_budget=99).choices)
    assert Draft(8, 0, 3) in drafts(block_size="auto", verify_budget=3).choices
