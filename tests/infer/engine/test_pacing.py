"""When prompts are read and when rows decode, without a device."""

import pytest

from dflash_jax.infer.engine.pacing import STALL, NextVisit, Pacing
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.rows import ActiveRequest

A, B = [object()], [object()]  # whose prompts are to be read, and that decode


def test_reading_and_decoding_take_turns():
    pacing = Pacing(4, 16)
    assert not pacing.reads([], [], ahead=False)
    assert pacing.reads(A, [], ahead=True)
    assert not pacing.reads([], B, ahead=False)
    assert pacing.reads(A, B, ahead=False)
    assert not pacing.reads(A, B, ahead=True)  # the visit in flight comes first
    assert pacing.read(2, None)  # without times, as many programs as there are prompts
    assert not pacing.read(2, None)
    assert pacing.reads(A, [], ahead=False)
    assert not pacing.reads(A, B, ahead=False)
    assert pacing.reads(A, B, ahead=False)  # since rows decoded


def test_rows_wait_for_some_visits_where_all_slots_fill():
    pacing = Pacing(4, 16)
    pacing.visited(10.0, 11.6, 16, timed=True)
    assert pacing.step_seconds == pytest.approx(0.1)
    count = 1
    while pacing.read(4, 0.2):
        count += 1
    assert count == pytest.approx(STALL * 1.6 / 0.2, abs=1)
    pacing.reads([], B, ahead=False)
    assert not pacing.read(1, 1.6 * STALL / 4)  # few slots fill: in proportion


def test_a_visit_takes_no_longer_than_since_the_last_one():
    pacing = Pacing(1, 16)
    assert pacing.visited(0.0, 2.0, 20, timed=True) == 2.0
    assert pacing.visited(1.0, 3.0, 10, timed=True) == 1.0  # it was in flight before the first was collected
    assert pacing.visited(3.0, 100.0, 10, timed=False) == pytest.approx(1.0)  # it was done for who knows how long
    assert pacing.visited(100.0, 101.0, 0, timed=True) == 1.0


def row(left, budget=100, **given):
    return ActiveRequest(0, Request([1], **given), Completion(token_ids=[1] * (budget - left)), budget, [])


def test_the_next_visit():
    stops = {"find_stop": lambda tokens, new: None}
    following = lambda *rows, filling=False, waiting=False, free=False: Pacing(4, 15).next_visit(
        rows, filling=filling, waiting=waiting, free=free
    )
    assert following(row(16)) == NextVisit(15, 0, True)
    assert following(row(15)) == NextVisit(15, 0, False)  # the next one may be its last
    assert following(row(16), row(3), free=True) == NextVisit(8, 0, True)  # a request may come
    assert following(row(16), row(90, **stops)) == NextVisit(8, 0, True)  # a slot may become free unknown to the device
    assert following(row(90, **stops)) == NextVisit(15, 0, False)
    assert following(row(90), row(90), filling=True, free=True) == NextVisit(15, 2, False)
    assert following(row(90), waiting=True) == NextVisit(15, 1, True)
