"""Which request goes where, without a device."""

from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.rows import ActiveRequest


def row(ticket, prompt=3, budget=5):
    return ActiveRequest(ticket, Request([1] * prompt), Completion(), budget, [])


def placed(admission, admit=True):
    made = admission.place(admit)
    return [(row.ticket, slot, left, row.room - len(row.completion.token_ids)) for row, slot, left in made]


def test_requests_wait_until_a_slot_is_free():
    admission = Admission([64, 64], 64)
    rows = [row(ticket) for ticket in range(4)]
    admission.waiting.extend(rows)
    assert placed(admission, admit=False) == []
    assert placed(admission) == [(0, 0, None, 5), (1, 1, None, 5)]
    assert placed(admission) == []
    assert (admission.busy, len(admission.waiting)) == (2, 2)
    admission.finish(rows[1])
    assert placed(admission) == [(2, 1, None, 5)]
    assert admission.cancel([0, 3, 99]) == [0]  # one in a slot, one that waits, one that is unknown
    assert (admission.busy, len(admission.waiting)) == (1, 0)


def test_what_fits_begins_in_a_short_slot():
    admission = Admission([16, 16, 64], 64)
    assert admission.place(True) == []
    long, answer, likely = row(0, prompt=20), row(1, prompt=3, budget=13), row(2, prompt=8, budget=50)
    admission.waiting.extend([long, answer, likely])
    assert placed(admission) == [(0, 2, None, 5), (1, 0, None, 13), (2, 1, None, 8)]  # `likely` has half a short slot
    assert (likely.room, likely.budget) == (8, 50)


def test_a_short_slot_is_passed_by_what_needs_a_long_one():
    admission = Admission([16, 64], 64)
    admission.waiting.extend([row(0, prompt=20), row(1, prompt=30), row(2)])
    assert placed(admission) == [(0, 1, None, 5), (2, 0, None, 5)]
    assert [waiting.ticket for waiting in admission.waiting] == [1]
    # Nor does what fits into a short slot take the long one, for which the other one waits.
    admission = Admission([16, 64], 64)
    admission.waiting.extend([row(0), row(1)])
    assert placed(admission) == [(0, 0, None, 5), (1, 1, None, 5)]


def test_outgrown_rows_move_before_others_begin():
    admission = Admission([16, 16, 64], 64)
    rows = [row(ticket, prompt=8, budget=40) for ticket in range(3)]
    admission.waiting.extend(rows)
    assert placed(admission) == [(0, 0, None, 8), (1, 1, None, 8), (2, 2, None, 40)]
    for grown in rows[:2]:
        grown.filled = 8
        grown.completion.token_ids = [1] * 8
    admission.waiting.append(row(3))
    assert not admission.decoding  # two have outgrown their slots, and the prompt of the third is not read
    assert list(admission.filling) == [2]
    admission.finish(rows[2])
    assert placed(admission) == [(0, 2, 0, 32)]  # the slot it leaves is free from the next call on
    assert rows[0].room == rows[0].budget
    assert placed(admission) == [(3, 0, None, 5)]
    assert list(admission.decoding) == [2]


def test_the_oldest_and_the_shortest_prompt_take_turns():
    admission = Admission([64] * 3, 64)
    admission.waiting.extend([row(0, prompt=30), row(1, prompt=9), row(2, prompt=3)])
    admission.place(True)
    order = [list(admission.in_turn(admission.filling)) for _ in range(3)]
    assert order == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
