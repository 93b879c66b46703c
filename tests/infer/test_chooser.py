"""The choice of the block size: it finds what pays, notices changes, and is never far from not speculating."""

import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.infer.chooser import TRY, Acceptance, BlockChooser, candidates, expected_tokens
from tests import tiny

COSTS = {0: 0.95, 1: 1.0, 4: 1.7, 8: 2.0, 16: 2.5}
LIFE = 12  # visits of a request


def proposed(size):
    return max(size - 1, 0)


def simulate(rate_of, visits, seed=0, costs=COSTS, rows=1, pace=lambda visit: 1.0, believed=COSTS):
    """Tokens per second of `visits` visits with acceptance rate `rate_of(visit)`, steps taking `pace(visit)` times
    their costs, which were measured as `believed` at first; and the sizes chosen. Requests that were not wanted are
    never accepted anything of."""
    rng, chooser = np.random.default_rng(seed), BlockChooser(believed, proposed)
    tokens = seconds = 0.0
    sizes, lapsed, known = [], set(), set()
    for visit in range(visits):
        requests = [(slot, (visit + slot) // LIFE) for slot in range(rows)]
        for row in set(requests) - known:
            if not chooser.wanted:
                chooser.lapse(row)
                lapsed.add(row)
        known = set(requests)
        size = chooser.choose(requests)
        sizes.append(size)
        lapsed |= set(requests) if size == 0 else set()
        seen, steps = {}, TRY if chooser.trying else 16
        for row in requests:
            right = rng.random((steps, proposed(size))) < (0 if row in lapsed else rate_of(visit))
            seen[row] = (1 + np.cumprod(right, axis=1).sum(axis=1)).astype(int).tolist()
            tokens += sum(seen[row])
        took = steps * costs[size] * pace(visit) * rng.uniform(0.97, 1.03)
        seconds += took
        chooser.observe(size, steps, took, seen)
    return tokens / rows / seconds, sizes


def test_expected_tokens():
    assert expected_tokens([0.5, 0.5, 1.0], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert expected_tokens([0.5, 0.5], 0) == 1
    seen = Acceptance(3)
    for committed in (1, 1, 2, 4):
        seen.observe(3, committed)
    assert seen.rates([0.0] * 3, 1e-9) == pytest.approx([0.5, 0.5, 1.0], abs=0.01)
    assert candidates(16) == (1, 4, 8, 16)
    assert candidates(10) == (1, 4, 8, 10)
    assert candidates(3) == (1, 3)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("rows", [1, 4])
def test_it_is_near_the_best_fixed_size(rate, rows):
    best = max(expected_tokens([rate] * 15, proposed(size)) / cost for size, cost in COSTS.items())
    speed, _ = simulate(lambda visit: rate, 600, rows=rows)
    assert speed > 0.95 * best


def test_requests_are_wanted_where_speculation_pays():
    chooser = BlockChooser(COSTS, proposed)
    for visit in range(600):
        size = chooser.choose([visit // LIFE])
        chooser.observe(size, 16, 16 * COSTS[size], {visit // LIFE: [size] * 16})
        assert chooser.wanted
    assert size == 16


def test_it_follows_a_change():
    _, sizes = simulate(lambda visit: 0.0 if visit < 200 else 0.95, 600)
    assert set(sizes[100:190]) <= {0, 4}
    assert sizes[400:].count(16) > 190  # and a try now and then
    _, sizes = simulate(lambda visit: 0.95 if visit < 200 else 0.0, 600)
    assert sizes[150:200].count(16) > 47
    assert sizes[300:350].count(0) + sizes[300:350].count(1) > 40  # a new request is expected to be like the last
    assert sizes[450:].count(0) > 145


def test_the_draft_cache_is_given_up_where_it_never_pays():
    speed, sizes = simulate(lambda visit: 0.1, 1000)
    assert set(sizes[100:]) <= {0, 4}
    assert 2 <= sizes[100:].count(4) <= 20
    assert speed > 0.98 / COSTS[0]
    chooser = BlockChooser(COSTS, proposed)  # a single request is not tried again once it has lapsed
    for _ in range(500):
        size = chooser.choose([0])
        chooser.observe(size, 16, 16 * COSTS[size], {0: [1] * 16})
        if size == 0:
            break
    assert size == 0
    for _ in range(500):
        chooser.observe(0, 16, 16 * COSTS[0], {0: [1] * 16})
        assert chooser.choose([0]) == 0
    assert chooser.wanted
    assert chooser.choose([1]) == 4
    chooser.observe(4, TRY, TRY * COSTS[4], {1: [1] * TRY})
    assert not chooser.wanted  # nor need its prompt be read into the draft cache, until the next try is due
    chooser.lapse(2)
    while not chooser.wanted:
        chooser.observe(0, 16, 16 * COSTS[0], {2: [1] * 16})
        assert chooser.choose([2]) == 0
    assert chooser.choose([2, 3]) == 4


def test_the_pace_of_the_machine_changes_no_choice():
    """What is measured while other work slows the machine is not held against the size in use."""
    pace = lambda visit: 3.0 if visit // 20 % 2 else 1.0
    _, sizes = simulate(lambda visit: 0.1, 400, pace=pace)
    assert sizes[20:].count(0) + sizes[20:].count(1) > 0.95 * len(sizes[20:])
    _, sizes = simulate(lambda visit: 0.95, 400, pace=pace)
    assert sizes[20:].count(16) > 0.95 * len(sizes[20:])


@pytest.mark.parametrize("believed", [COSTS | {4: 1.1}, COSTS | {8: 1.3, 16: 1.6}, COSTS | {0: 1.5, 1: 1.5}])
def test_wrong_first_measurements_are_mended(believed):
    """Speculation that seems to pay, and does not."""
    speed, sizes = simulate(lambda visit: 0.35, 300, believed=believed)
    assert sum(size > 1 for size in sizes[150:]) < 25
    assert speed > 0.95


def test_a_hiccup_changes_no_choice():
    """One visit that takes thirty times as long, whichever it is."""
    for at in range(0, 60, 3):
        _, sizes = simulate(lambda visit: 0.9, 120, pace=lambda visit, at=at: 30.0 if visit == at else 1.0)
        assert sum(size != 16 for size in sizes) < 20


def test_a_slow_step_is_noticed():
    chooser = BlockChooser(COSTS, proposed)
    for _ in range(60):
        size = chooser.choose([0])
        chooser.observe(size, 16, 16 * (9.0 if size == 16 else COSTS[size]), {0: [size] * 16})
    assert size == 8
    assert sum(chooser.used.values()) == 60 * 16


def test_the_choice_never_changes_the_answers(target, drafter, monkeypatch):
    requests = [tiny.ask([i + 1, 5, 9], 40, temperature=0.4 * (i % 2), id=str(i)) for i in range(5)]
    expected = [done.token_ids for done in Engine(target, None, max_length=64).generate(requests)]
    engine = Engine(target, drafter, slots=2, max_length=64, block_size="auto", steps_per_visit=2)
    assert [done.token_ids for done in engine.generate(requests)] == expected
    assert engine.chooser is not None
    assert set(engine.chooser.used) == {0, 1, 4, 8}
    rng = np.random.default_rng(0)
    monkeypatch.setattr(BlockChooser, "wanted", property(lambda chooser: bool(rng.integers(2))))
    for sizes in ((0,), (1,), (4,), (8,), (0, 1, 4, 8)):  # each of them and any order, whatever pays
        engine.chooser.choose = lambda rows, sizes=sizes: list(rows) and int(rng.choice(sizes))
        assert [done.token_ids for done in engine.generate(requests)] == expected
    assert min(engine.chooser.used.values()) > 0


@pytest.mark.slow
def test_speculation_goes_on_where_it_was_left_out(target, drafter):
    """Steps without speculation keep the draft cache alive: what follows is accepted as if it had never paused."""
    request = tiny.ask([7, 3, 9], 40)
    plain = Engine(target, drafter, max_length=64, block_size=8).generate([request])[0]
    engine = Engine(target, drafter, max_length=64, block_size="auto", steps_per_visit=1)
    engine.warm_up()
    turn = iter([1] * 6)
    engine.chooser.choose = lambda rows: list(rows) and next(turn, 8)
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
