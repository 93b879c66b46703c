"""Requests that limit the block size: steps keep to the least limit among the rows, and no token changes."""

from dataclasses import replace

import pytest

from dflash_jax import Engine, EngineConfig, Request
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.drafts import PLAIN, Drafts
from dflash_jax.infer.engine.requests import RequestError
from tests import tiny

LIMITS = None, 1, 3, 4, 8, 100


def requests():
    return [tiny.ask([i + 1, 5, 9], 24, temperature=0.6 * (i % 2), seed=i, id=str(i)) for i in range(len(LIMITS))]


@pytest.mark.lossless
@pytest.mark.parametrize("tree", [0, 9])
def test_no_limit_changes_a_token(target, drafter, tree):
    expected = [done.token_ids for done in Engine(target, None, max_length=64).generate(requests())]
    engine = Engine(target, drafter, max_length=64, block_size="auto", tree=tree, steps_per_visit=4)
    engine.warm_up()
    for chooser in engine.choosers.values():  # the widest block that may be taken is the fastest
        for draft, candidate in chooser.candidates.items():
            candidate.seconds, candidate.compared = 1 / (draft.block_size + draft.nodes), 10**9
        chooser.observe = lambda *seen: None
    used = []
    for limit in LIMITS:
        asked = [replace(request, max_block_size=limit) for request in requests()]
        answers = engine.generate(asked)
        assert [done.token_ids for done in answers] == expected
        (sizes,) = {done.draft[0].block_size for done in answers}
        used.append(sizes)
        assert limit is None or max(max(done.acceptance_lengths) for done in answers) <= limit
    assert used == [8, 1, 1, 4, 8, 8]


def test_the_least_limit_of_the_rows_holds(target, drafter):
    engine = Engine(target, drafter, slots=2, max_length=64, steps_per_visit=1, plain=True)
    seen, choose = [], engine.drafts.choose

    def watched(rows, width, most):
        chosen = choose(list(rows), width, most)
        seen.append((most, chosen[0].block_size))
        return chosen

    engine.drafts.choose = watched
    asked = [tiny.ask([7, 3, 9], 30), tiny.ask([5], 6), tiny.ask([6], 6), tiny.ask([8], 6)]
    limits = [None, 8, 4, 1]
    engine.generate([replace(request, max_block_size=most) for request, most in zip(asked, limits, strict=True)])
    assert set(seen) == {(None, 8), (8, 8), (4, 0), (1, 0)}
    used = engine.steps_by_block_size
    assert list(used) == ["8", "1"]
    assert min(used.values()) > 0
    assert sum(used.values()) == engine.stats.steps


def test_a_limit_holds_from_a_requests_first_token_on(target, drafter):
    """Also where its prompt is read beside the steps of others."""
    engine = Engine(
        target, drafter, slots=2, max_length=64, prefill_chunk=16, prefill_budget=8, steps_per_visit=1, plain=True
    )
    decode, seen = engine.batch.decode, []

    def watched(draft, steps, leave_below, slots, beside):
        reads = [(plan, read) for plan in beside.plans for read in plan.reads] if beside else []
        ended = [beside.prompts[read.slot] for plan, read in reads if plan.batch.last[read.place]]
        seen.extend(draft for row in ended if row.request.max_block_size == 1)
        return decode(draft, steps, leave_below, slots, beside)

    engine.batch.decode = watched
    engine.generate([tiny.ask([7, 3, 9], 40), replace(tiny.ask([5] * 30, 6), max_block_size=1)])
    assert seen == [PLAIN]


def test_what_is_chosen_within_a_limit(drafter):
    drafts = Drafts(drafter, EngineConfig(block_size="auto", tree=9))
    chosen = lambda most: drafts.choose([0], 1, most)[0]
    assert [chosen(most) for most in (None, 8, 7, 1)] == [Draft(8), Draft(8), PLAIN, PLAIN]  # before times are known
    seconds = {Draft(8, 9): 0.1, Draft(8): 0.2, Draft(4): 0.3, PLAIN: 9.0}
    drafts.measured({(draft, 1): time for draft, time in seconds.items()})
    assert [chosen(most) for most in (None, 8, 7, 4)] == [Draft(8, 9), Draft(8, 9), Draft(4), Draft(4)]
    assert [chosen(most) for most in (3, 1)] == [Draft(1), Draft(1)]
    _, chooser = drafts.choose([0], 1, 4)
    assert chooser is drafts.choose([0], 1, 5)[1]  # it goes on with what it knows
    chooser.observe(Draft(4), 16, 16 * 0.3, {})
    assert drafts.used(0)["4"] == 16
    assert drafts.block_sizes == (1, 4, 8)


def test_a_limit_that_is_not_served(target, drafter):
    ask = lambda engine, most: engine.check(Request([1], max_block_size=most))
    for settings in ({}, {"deterministic": True}):
        fixed = Engine(target, drafter, max_length=64, **settings)
        ask(fixed, 8)
        for most in (1, 7):
            with pytest.raises(RequestError, match=f"cannot be limited to blocks of {most} here"):
                ask(fixed, most)
    ask(Engine(target, drafter, max_length=64, block_size="auto"), 1)
    ask(Engine(target, None, max_length=64), 1)
    with pytest.raises(RequestError, match="max_block_size must be an integer of at least 1, got 0"):
        ask(Engine(target, drafter, max_length=64, plain=True), 0)
