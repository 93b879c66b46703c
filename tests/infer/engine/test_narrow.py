"""Few busy rows run narrower programs, and get the answers they would get in wide ones."""

import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine.slots import Slots
from tests import tiny


def requests(count=11):
    return [
        tiny.ask([i + 1, 5, 9], 8 + 6 * i, 0.5 * (i % 3), id=str(i), repetition_penalty=1.2, logprobs=2)
        for i in range(count)
    ]


@pytest.fixture
def widths(monkeypatch):
    seen, decode = [], Slots.decode
    monkeypatch.setattr(Slots, "decode", lambda self, *how: (seen.append(len(how[3])), decode(self, *how))[1])
    return seen


@pytest.mark.parametrize(
    ("speculative", "settings"),
    [
        pytest.param(True, {"cache_tokens": 16 * 128, "prefill_chunk": 32}, marks=pytest.mark.slow),
        pytest.param(True, {"block_size": "auto"}, marks=pytest.mark.exhaustive),
        pytest.param(False, {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_width_changes_no_answer(target, drafter, widths, speculative, settings):
    drafter = drafter if speculative else None
    expected = Engine(target, drafter, slots=1, max_length=96, logprobs=2).generate(requests())
    widths.clear()
    engine = Engine(target, drafter, slots=16, max_length=96, steps_per_visit=3, logprobs=2, **settings)
    engine.warm_up()
    assert set(widths) == {4, 8, 16}
    widths.clear()
    done = engine.generate(requests())
    assert set(widths) == {4, 8, 16}
    assert widths[-1] == 4
    for one, other in zip(expected, done, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_few_slots_have_one_width(target, drafter):
    assert Engine(target, drafter, slots=15, max_length=64).batch.widths == (15,)
    assert Engine(target, drafter, slots=16, max_length=64, deterministic=True).batch.widths == (16,)


def test_rows_of_a_narrow_program_are_of_all_parts(target):
    batch = Engine(target, None, slots=16, max_length=64).batch
    assert batch.some([5, 9]) == [0, 1, 5, 9]
    assert batch.some([]) == [0, 1, 2, 3]
    assert batch.some(range(3, 8)) == list(range(8))
    assert batch.some(range(9)) == list(range(16))
    assert [len(batch.idle(width)) for width in batch.widths] == [4, 8, 16]
    batch.calls.parts = 4
    assert batch.some([5, 9]) == [0, 5, 9, 12]
    assert batch.some([4, 5]) == [0, 1, 4, 5, 8, 9, 12, 13]
    assert batch.some([4, 5, 6]) == list(range(16))


def test_widths_are_of_all_parts(target):
    widths = lambda slots: Engine(target, None, slots=slots, max_length=64).batch.widths
    assert [widths(slots) for slots in (15, 16, 18, 32)] == [(15,), (4, 8, 16), (4, 9, 18), (8, 16, 32)]
