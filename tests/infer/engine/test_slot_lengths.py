"""Slots of two lengths: a request stands in a short one as long as it fits, and no answer depends on where."""

import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine.lengths import Lengths, two_lengths
from dflash_jax.infer.engine.slots import Slots
from tests import tiny

SHORT = {"short_length": 24, "long_slots": 1, "prefill_chunk": 8}


def requests():
    """Short ones, one with a long prompt, and some whose answers outgrow a short slot."""
    sizes = [(3, 8), (40, 20), (5, 40), (10, 30), (16, 8), (12, 4), (2, 60), (20, 3), (30, 2), (11, 50)]
    return [
        tiny.ask(
            [(7 * i + 3 * j) % 60 + 1 for j in range(prompt)], new, 0.5 * (i % 3), id=str(i), repetition_penalty=1.2
        )
        for i, (prompt, new) in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def expected(target):
    return [done.token_ids for done in Engine(target, None, max_length=64).generate(requests())]


@pytest.fixture
def moves(monkeypatch):
    seen, move = [], Slots.move
    monkeypatch.setattr(Slots, "move", lambda self, *where: (seen.append(where), move(self, *where)))
    return seen


@pytest.mark.parametrize(
    ("speculative", "settings"),
    [
        (True, {"slots": 5, "steps_per_visit": 3, "prefix_chunks": 4}),
        pytest.param(False, {"slots": 2}, marks=pytest.mark.slow),
        pytest.param(True, {"slots": 4, "long_slots": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lengths_change_no_answer(target, drafter, expected, moves, speculative, settings):
    engine = Engine(target, drafter if speculative else None, max_length=64, **(SHORT | settings))
    done = engine.generate(requests())
    assert [completion.token_ids for completion in done] == expected
    assert {slot: to for slot, to, _ in moves}
    assert all(engine.batch.lengths[slot] == 24 and engine.batch.lengths[to] == 64 for slot, to, _ in moves)
    assert len(moves) <= 4  # of the requests that may begin in a short slot and need more


@pytest.mark.slow
def test_a_windowed_drafter_moves_its_ring(target, tmp_path, expected, moves):
    from dflash_jax import load_drafter

    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    drafter = load_drafter(tiny.write_drafter(tmp_path, tiny.drafter_config(**layers)))
    apart = Engine(target, drafter, max_length=64, slots=1, prefill_chunk=8).generate(requests())
    engine = Engine(target, drafter, max_length=64, slots=3, **SHORT)
    together = engine.generate(requests())
    assert [done.token_ids for done in together] == expected
    assert moves
    for one, other in zip(apart, together, strict=True):
        # What was accepted is the same, but for steps that the end of a short slot cut in two.
        assert len(other.acceptance_lengths) - len(one.acceptance_lengths) in (0, 1)


def test_rows_that_wait_for_a_long_slot(target, drafter, expected, moves):
    """All grow out of their slots at once, and there is one long slot; short requests pass them meanwhile."""
    long = [requests()[i] for i in (2, 3, 6, 9)]
    engine = Engine(target, drafter, max_length=64, slots=5, **SHORT)
    tickets = {engine.submit(request): request.id for request in [*long, requests()[0]]}
    ended = []
    while engine.busy or engine.waiting:
        ended += [(tickets[t], done.token_ids) for t, done in engine.step() if done.finish_reason]
    assert dict(ended) == {name: expected[int(name)] for name in tickets.values()}
    assert ended[0][0] == "0"
    assert len(moves) == 4


@pytest.mark.slow
def test_one_that_waits_for_a_long_slot_can_be_cancelled(target, drafter, expected):
    engine = Engine(target, drafter, max_length=64, slots=3, **SHORT)
    tickets = [engine.submit(requests()[i]) for i in (6, 9)]
    engine.submit(requests()[1])
    while not any(row and row.outgrown for row in engine._admission.rows):
        engine.step()
    engine.cancel(*tickets)
    engine.submit(requests()[0])
    done = {}
    while engine.busy or engine.waiting:
        done |= {completion.prompt_tokens: completion.token_ids for _, completion in engine.step()}
    assert done == {40: expected[1], 3: expected[0]}


def test_lengths_for_a_file_of_requests():
    short, long = [(500, 500)] * 95, [(16000, 500)] * 5
    assert two_lengths(short + long, 64, 16640) == Lengths(1024, 3)
    assert two_lengths(short + long, 64, 16640, parts=4) == Lengths(1024, 4)
    assert two_lengths(short, 64, 1024) is None
    assert two_lengths([(100, 100 + i) for i in range(1000)], 64, 1280) is None  # would save less than a quarter
    assert two_lengths(short + long, 1, 16640) is None
    assert two_lengths([(500, 500), (16000, 64000)], 8, 80128) is None  # nearly all the work is long


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short_length": 64}, "less than max_length, 64; got 64"),
        ({"short_length": 7}, "at least prefill_chunk, 8"),
        ({"long_slots": 0}, "long_slots must be at least 1"),
        ({"long_slots": 3}, "less than slots, 3"),
        ({"deterministic": True}, "deterministic exclude each other"),
    ],
)
def test_impossible_lengths_are_refused(target, settings, message):
    with pytest.raises(ValueError, match=message):
        Engine(target, None, slots=3, max_length=64, **(SHORT | settings))
