"""What is read of several prompts, without a device: copies, sharing, the program, packing, what is kept."""

import numpy as np

from dflash_jax.infer.engine.prefixes import PrefixIndex
from dflash_jax.infer.engine.prompts import BesideShape, PrefillCost, Prefills
from dflash_jax.infer.engine.reads import plan_reads, plan_steps
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.rows import ActiveRequest

HEAD = list(range(24))


def unread(prompt, index, start=0):
    return ActiveRequest(0, Request(prompt), Completion(), 9, index.keys(prompt), filled=start)


def carried_out(plan, index, prompts):
    """What is kept once the rows were read."""
    read = [one for one in plan.reads if one.place is not None]
    return [index.keep(one.slot, one.filled, prompts[one.slot].keys, awaited=one.awaited) for one in read]


def ways(plan):
    return [(read.slot, read.filled, read.copied, read.place) for read in plan.reads]


def test_a_chunk_that_several_begin_with_is_read_once_and_copied_then():
    index, programs = PrefixIndex(8, 0, 8), Prefills(8, 4)
    prompts = {slot: unread([*HEAD[:16], 30 + slot], index) for slot in (2, 0)} | {1: unread([50] * 7, index)}
    plan = plan_reads(prompts, programs, index)
    assert plan.copies == []
    assert sorted(ways(plan)) == [(0, 0, 0, None), (1, 7, 0, 1), (2, 8, 0, 0)]
    assert plan.batch.rows.tolist()[:2] == [2, 1]
    assert sorted(plan.batch.rows.tolist()) == [0, 1, 2, 3]  # others fill its shape
    assert plan.batch.counts.tolist() == [8, 7, 0, 0]
    assert plan.batch.tokens[:2].tolist() == [HEAD[:8], [50] * 7 + [0]]
    assert plan.batch.last.tolist() == [False, True, False, False]
    assert plan_reads(prompts, programs, index).copies == []  # a plan that is not carried out keeps nothing
    kept = carried_out(plan, index, prompts)
    assert [(one.row, one.end, one.entry is None) for one in kept] == [(2, 8, False), (1, 7, True)]
    assert plan.seconds is None
    # When it is there, the second one copies it, and reads what the first one now goes on with as well.
    prompts = {2: unread(prompts[2].prompt, index, 8), 0: prompts[0]}
    plan = plan_reads(prompts, programs, index)
    (copy,) = plan.copies
    assert (copy.row, copy.end, copy.state) == (0, 8, None)
    assert ways(plan) == [(2, 16, 0, 0), (0, 8, 8, None)]
    carried_out(plan, index, prompts)
    # Then there is no chunk that both go on with: the last tokens are of each alone.
    plan = plan_reads({2: unread(prompts[2].prompt, index, 16), 0: prompts[0]}, programs, index)
    assert len(plan.copies) == 2
    assert ways(plan) == [(2, 17, 0, 0), (0, 17, 16, 1)]
    assert plan.batch.last.tolist()[:2] == [True, True]


def test_the_last_token_of_a_prompt_is_always_read():
    index, programs = PrefixIndex(8, 0, 8), Prefills(8, 1)
    for start in (0, 8):
        prompts = {0: unread(HEAD[:16], index, start)}
        carried_out(plan_reads(prompts, programs, index), index, prompts)
    plan = plan_reads({0: unread(HEAD[:16], index)}, programs, index)
    assert len(plan.copies) == 1
    assert ways(plan) == [(0, 16, 8, 0)]


def test_states_are_kept_where_others_go_on_and_copied_once():
    index, programs = PrefixIndex(8, 8, 8), Prefills(8, 4)
    waits = unread([*HEAD, 1], index)
    for start in (0, 8, 16):
        prompts = {0: unread([*HEAD, 0], index, start), 1: waits}
        plan = plan_reads(prompts, programs, index)
        assert [kept.state is not None for kept in carried_out(plan, index, prompts)] == [True]
    plan = plan_reads({1: waits}, programs, index)
    assert [copy.state is not None for copy in plan.copies] == [False, False, True]  # of the last one alone
    assert ways(plan) == [(1, 25, 24, 0)]


def test_the_program_is_the_cheapest_where_its_costs_are_known():
    index = PrefixIndex(0, 0, 64)
    programs, prompts = Prefills(64, 4), {slot: unread(HEAD[: 20 - slot], index) for slot in range(4)}
    assert len(plan_reads(prompts, programs, index).batch.rows) == 4
    programs.costs.update({shape: PrefillCost(0.1 * shape.rows**2) for shape in programs.shapes})
    plan = plan_reads(prompts, programs, index)
    assert (plan.batch.rows.tolist(), plan.seconds) == ([0], 0.1)
    assert [read.place for read in plan.reads] == [0, None, None, None]


def test_a_fixed_program_reads_the_first_prompt_alone():
    index, programs = PrefixIndex(0, 0, 128), Prefills(128, 4, fixed=True)
    prompts = {slot: unread(HEAD, index) for slot in (3, 1)}
    plan = plan_reads(prompts, programs, index)
    assert ways(plan) == [(3, 24, 0, 0)]
    assert plan.batch.tokens.shape == (1, 32)


def test_each_part_of_the_mesh_reads_its_own_rows():
    index, programs = PrefixIndex(0, 0, 8), Prefills(8, 8, parts=2)
    programs.costs.update({shape: PrefillCost(1.0) for shape in programs.shapes})
    plan = plan_reads({slot: unread(HEAD[:4], index) for slot in (5, 6, 1)}, programs, index)
    rows = np.asarray(plan.batch.rows)
    assert {slot: place for slot, _, _, place in ways(plan)} == {5: len(rows) // 2, 6: len(rows) // 2 + 1, 1: 0}
    assert all((rows[: len(rows) // 2] < 4) & (rows[len(rows) // 2 :] >= 4))


def steps_of(plans):
    return [[(read.slot, read.filled) for read in plan.reads] for plan in plans]


def test_steps_that_read_prompts_go_on_until_a_row_must_end_with_its_chunk():
    index, programs = PrefixIndex(8, 0, 8), Prefills(8, 4)
    shape = BesideShape.of(6, 4, 1, 8)
    assert shape == (4, 4, 4)
    shape = BesideShape(2, 6, 6)
    prompts = {0: unread(HEAD[:18], index), 3: unread([50] * 3, index)}
    plans = plan_steps(prompts, programs, shape, 9, at_ends=False)
    assert steps_of(plans) == [[(0, 6)], [(0, 8), (3, 3)], [(0, 14)], [(0, 16)], [(0, 18)]]
    assert [plan.batch.last.tolist() for plan in plans] == [
        [False] * 2,
        [False, True],
        *[[False] * 2] * 2,
        [True, False],
    ]
    assert max(sum(plan.batch.counts) for plan in plans) == 6
    assert steps_of(plan_steps(prompts, programs, shape, 9, at_ends=True)) == steps_of(plans)[:2]
    assert steps_of(plan_steps(prompts, programs, shape, 1, at_ends=False)) == steps_of(plans)[:1]
    assert plan_steps({}, programs, shape, 9, at_ends=False) == []


def test_a_chunk_that_a_row_is_in_is_copied_after_the_visit():
    index, programs, shape = PrefixIndex(8, 0, 8), Prefills(8, 4), BesideShape(2, 6, 6)
    prompts = {slot: unread([*HEAD[:16], 30 + slot], index) for slot in (0, 2)}
    plans = plan_steps(prompts, programs, shape, 3, at_ends=False)
    assert steps_of(plans) == [[(0, 6)], [(0, 8)], [(0, 14)]]  # row 2 waits for what row 0 has read
    assert [read.awaited for plan in plans for read in plan.reads] == [True, True, False]
    plan = plan_reads({2: prompts[2], 0: unread(prompts[0].prompt, index, 6)}, programs, index)
    assert ways(plan) == [(0, 8, 0, 0), (2, 0, 0, None)]


def test_each_part_of_a_mesh_has_a_share_of_what_a_step_reads():
    index, programs = PrefixIndex(0, 0, 8), Prefills(8, 4, 2)
    prompts = {slot: unread([slot + 1] * 9, index) for slot in range(4)}
    plans = plan_steps(prompts, programs, BesideShape.of(8, 4, 2, 8), 2, at_ends=True)
    assert steps_of(plans) == [[(0, 4), (2, 4)], [(0, 8), (2, 8)]]
