"""Which request goes where, without a device."""

from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.rows import ActiveRequest


def row(ticket, prompt=3, budget=5):
    return ActiveRequest(ticket, Request([1] * prompt), Completion(), budget, [])


def placed(admission, ready=lambda row, slot: True):
    return [(row.ticket, slot) for row, slot in admission.place(ready)]


def test_requests_wait_until_a_slot_is_free():
    admission = Admission(2)
    rows = [row(ticket) for ticket in range(4)]
    admission.waiting.extend(rows)
    assert placed(admission) == [(0, 0), (1, 1)]
    assert placed(admission) == []
    assert (admission.busy, len(admission.waiting)) == (2, 2)
    admission.finish(rows[1])
    assert placed(admission) == [(2, 1)]
    assert admission.cancel([0, 3, 99]) == [0]  # one in a slot, one that waits, one that is unknown
    assert (admission.busy, len(admission.waiting)) == (1, 0)


def test_what_is_not_ready_waits_in_its_turn():
    admission = Admission(3)
    admission.waiting.extend(row(ticket) for ticket in range(4))
    odd = lambda row, slot: row.ticket % 2 == 1 and slot > 0  # and some slots are of no use to it
    assert placed(admission, odd) == [(1, 1), (3, 2)]
    assert [waiting.ticket for waiting in admission.waiting] == [0, 2]
    asked = []
    assert admission.place(lambda row, slot: bool(asked.append(row.ticket)), lambda: bool(asked)) == []
    assert asked == [0]  # where there is no room for it, the others are not asked
    assert placed(admission) == [(0, 0)]
    admission.put_back(2)  # what gives its slot back does not wait behind those that came later
    admission.waiting.append(row(4))
    assert [waiting.ticket for waiting in admission.waiting] == [2, 3, 4]


def test_a_row_decodes_once_its_prompt_is_read():
    admission = Admission(2)
    rows = [row(0), row(1)]
    admission.waiting.extend(rows)
    placed(admission)
    rows[1].filled = len(rows[1].prompt)
    assert (list(admission.filling), list(admission.decoding)) == ([0], [1])


def test_the_oldest_and_the_shortest_prompt_take_turns():
    admission = Admission(3)
    admission.waiting.extend([row(0, prompt=30), row(1, prompt=9), row(2, prompt=3)])
    admission.place()
    order = [list(admission.in_turn(admission.filling)) for _ in range(3)]
    assert order == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
