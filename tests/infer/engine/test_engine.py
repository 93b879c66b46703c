"""Slots, admission, prompts in chunks, stop strings: the result of a request depends on nothing else."""

import random
import time
from dataclasses import replace

import jax
import pytest

from dflash_jax import Engine, generate, replay, spec_generate
from dflash_jax.infer.engine.requests import RequestError
from tests import tiny

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [7, 7, 30, 31, 2], [9] * 20]


def requests():
    return [
        tiny.ask(prompt, 6 + 5 * i, temperature=0.4 * i, top_k=3 * i, id=f"r{i}") for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.slow
def test_neighbours_order_and_allocation_do_not_matter(target, drafter):
    alone = {}
    engine = Engine(target, None, slots=1, max_length=64)
    for request in requests():
        alone[request.id] = engine.generate([request])[0].token_ids
    for seed, (slots, max_length, steps) in enumerate([(3, 64, 4), (2, 200, 1)]):
        engine = Engine(target, drafter, slots=slots, max_length=max_length, steps_per_visit=steps)
        for _ in range(2):  # slots are reused
            shuffled = requests()
            random.Random(seed).shuffle(shuffled)
            for request, done in zip(shuffled, engine.generate(shuffled), strict=True):
                assert done.token_ids == alone[request.id]
                assert done.finish_reason == "length"


@pytest.mark.parametrize("chunk", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64)), 7])
def test_chunks_of_the_prompt_do_not_matter(target, drafter, chunk):
    prompt = [(7 * i + 3) % 60 for i in range(41)]
    expected = generate(target, prompt, max_new_tokens=20, max_length=64)
    ours = spec_generate(target, drafter, prompt, max_new_tokens=20, max_length=64, prefill_chunk=chunk)
    assert ours.tokens == expected.tokens
    whole = spec_generate(target, drafter, prompt, max_new_tokens=20, max_length=64)
    assert ours.acceptance_lengths == whole.acceptance_lengths  # the draft cache is the same, too


@pytest.mark.slow
def test_windowed_drafter_wraps_its_ring(target, tmp_path):
    from dflash_jax import load_drafter

    raw = tiny.drafter_config(
        layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True
    )
    drafter = load_drafter(tiny.write_drafter(tmp_path, raw))
    expected = generate(target, PROMPTS, max_new_tokens=30)
    ours = [spec_generate(target, drafter, PROMPTS, max_new_tokens=30, prefill_chunk=c) for c in (4, 32)]
    assert ours[0].tokens == ours[1].tokens == expected.tokens
    assert ours[0].acceptance_lengths == ours[1].acceptance_lengths


@pytest.mark.parametrize("block_size", [None, pytest.param("auto", marks=pytest.mark.slow)])
def test_requests_without_speculation_between_others(target, drafter, block_size):
    """Whoever runs beside them gets the same answer, in the same steps as alone once they are gone."""
    one = Engine(target, None, slots=1, max_length=64)
    alone = {r.id: one.generate([r])[0].token_ids for r in requests()}
    engine = Engine(target, drafter, slots=2, max_length=64, block_size=block_size, steps_per_visit=1, plain=True)
    asked = [replace(request, max_block_size=1 if i % 3 == 1 else None) for i, request in enumerate(requests())]
    for request, done in zip(asked, engine.generate(asked), strict=True):
        assert done.token_ids == alone[request.id]
        assert not request.max_block_size or set(done.acceptance_lengths) == {1}
    with pytest.raises(RequestError, match="plain=False"):
        Engine(target, drafter, slots=1, max_length=64).submit(asked[1])
    with pytest.raises(ValueError, match="cannot be combined"):
        Engine(target, drafter, plain=True, deterministic=True)


def test_host_side_stop_cuts_tokens_and_acceptance(target, drafter):
    free = generate(target, PROMPTS[0], max_new_tokens=20, stop_token_ids=[], max_length=64).tokens[0]
    request = tiny.ask(PROMPTS[0], 20, find_stop=lambda tokens, new: 7 if len(tokens) >= 7 else None)
    engine = Engine(target, drafter, max_length=64)
    for _ in range(2):
        done = engine.generate([request])[0]
        assert done.token_ids == free[:7]
        assert done.finish_reason == "stop"
        assert 1 + sum(done.acceptance_lengths) == 7


@pytest.mark.slow
def test_stop_strings_of_some_rows_leave_the_others_their_overlap(target, drafter, monkeypatch):
    """The next visit goes on without waiting for the tokens of the last one, and no answer changes."""
    stops = {0: 7, 2: 5, 5: 9}  # tokens after which a request ends on the host
    ends = lambda at: lambda tokens, new: at if len(tokens) >= at else None
    asked = [
        tiny.ask([i + 1, 5, 9], 40, 0.5 * (i % 3), id=str(i), find_stop=ends(stops[i]) if i in stops else None)
        for i in range(7)
    ]
    alone = Engine(target, None, slots=1, max_length=64)
    expected = [alone.generate([request])[0] for request in asked]
    engine = Engine(target, drafter, slots=3, max_length=64, steps_per_visit=4)
    seen, collect = [], engine._decoding._collect

    def watched(visit):
        seen.append(
            (any(row and row.request.find_stop for row in engine._admission.rows), engine._decoding.ahead is not None)
        )
        return collect(visit)

    monkeypatch.setattr(engine._decoding, "_collect", watched)
    for one, other in zip(expected, engine.generate(asked), strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    assert (True, True) in seen
    seen.clear()
    engine.generate([asked[0], asked[2]])  # none of whose ends the device finds
    assert set(seen) == {(True, False)}


def test_stream_reports_progress_and_can_be_left(target, drafter):
    engine = Engine(target, drafter, max_length=64, steps_per_visit=1, block_size=2)
    seen = []
    for _, completion in engine.stream([tiny.ask(PROMPTS[1], 20)]):
        seen.append(len(completion.token_ids))
        if len(seen) == 3:
            break
    assert seen == sorted(set(seen))
    assert seen[0] == 1
    assert (
        engine.generate([tiny.ask(PROMPTS[0], 9)])[0].token_ids
        == generate(target, PROMPTS[0], max_new_tokens=9, stop_token_ids=[], max_length=64).tokens[0]
    )


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (tiny.ask([]), "empty_prompt"),
        (tiny.ask([64]), "invalid_token"),
        (tiny.ask([-1]), "invalid_token"),
        (tiny.ask([1] * 32), "prompt_too_long"),
        (tiny.ask([1], 0), "invalid_parameter"),
        (tiny.ask([1], temperature=-1), "invalid_parameter"),
        (tiny.ask([1], top_p=0), "invalid_parameter"),
        (tiny.ask([1], seed=-1), "invalid_parameter"),
        (tiny.ask([1], stop_token_ids=tuple(range(17))), "invalid_parameter"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(target, drafter, request_, code):
    engine = Engine(target, drafter, max_length=32)
    with pytest.raises(RequestError) as error:
        engine.generate([tiny.ask([1], 2), request_])
    assert error.value.code == code
    assert engine.stats.steps == 0


def test_impossible_engines_are_refused(target, drafter):
    for arguments in ({"slots": 0}, {"max_length": 0}, {"block_size": 9}, {"block_size": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Engine(target, drafter, **arguments)


def test_replay_tells_the_targets_choices_from_others(target, drafter):
    for settings in ({}, {"temperature": 0.8, "top_k": 12, "top_p": 0.9}):
        made = spec_generate(target, drafter, PROMPTS, max_new_tokens=20, seed=3, stop_token_ids=[], **settings)
        for row, prompt in enumerate(PROMPTS):
            clean = replay(target, prompt, made.tokens[row], seed=3, request_id=str(row), chunk=16, **settings)
            assert clean.worst_gap < 1e-4
            assert clean.mismatches == clean.near_ties
        wrong = [*made.tokens[0][:5], (made.tokens[0][5] + 1) % 60, *made.tokens[0][6:]]
        found = replay(target, PROMPTS[0], wrong, seed=3, request_id="0", chunk=16, **settings)
        assert found.worst_gap > 1e-2
        assert found.mismatches > found.near_ties
    with pytest.raises(ValueError, match="empty"):
        replay(target, [1], [])


def test_a_long_prompt_is_read_between_the_steps_of_others(target, drafter):
    long = [(11 * i + 5) % 60 for i in range(60)]
    one = Engine(target, None, slots=1, max_length=128)
    alone = [done.token_ids for done in one.generate([tiny.ask(p, 25, stop_token_ids=()) for p in (PROMPTS[0], long)])]
    engine = Engine(target, drafter, slots=2, max_length=128, block_size=2, prefill_chunk=8, steps_per_visit=1)
    first = engine.submit(tiny.ask(PROMPTS[0], 25))
    engine.step()
    second = engine.submit(tiny.ask(long, 25))
    done, turns = {}, []
    while engine.busy or engine.waiting:
        turns.append(engine.step())
        done |= dict(turns[-1])
    assert [done[first].token_ids, done[second].token_ids] == alone
    reading = turns[: next(i for i, events in enumerate(turns) if any(ticket == second for ticket, _ in events))]
    assert len(reading) >= 2 * (60 // 8) - 1
    assert sum(bool(events) for events in reading) >= len(reading) // 2  # every other turn decodes the first row


def test_programs_are_compiled_on_idle_slots_only(target, drafter):
    engine = Engine(target, drafter, max_length=64, steps_per_visit=1)
    ticket = engine.submit(tiny.ask(PROMPTS[0], 12, stop_token_ids=()))
    engine.step()
    with pytest.raises(ValueError, match="but 1 are busy"):
        engine.warm_up()
    while engine.busy:
        done = dict(engine.step())
    assert len(done[ticket].token_ids) == 12


def test_requests_come_and_go(target, drafter):
    one = Engine(target, None, slots=1, max_length=64)
    expected = [done.token_ids for done in one.generate([tiny.ask(p, 12, stop_token_ids=()) for p in PROMPTS])]
    engine = Engine(target, drafter, slots=2, max_length=64, steps_per_visit=1)
    tickets = {engine.submit(tiny.ask(PROMPTS[i], 12)): i for i in range(3)}
    done = dict(engine.step())
    engine.cancel(next(iter(tickets)))  # in a slot
    engine.cancel(12345)
    tickets |= {engine.submit(tiny.ask(PROMPTS[i], 12)): i for i in (3, 4)}
    engine.cancel(max(tickets))  # waiting
    while engine.busy:
        done |= dict(engine.step(admit=False))
    assert engine.waiting == 2
    assert engine.step(admit=False) == []
    while engine.busy or engine.waiting:
        done |= dict(engine.step())
    finished = {tickets[ticket]: c.token_ids for ticket, c in done.items() if c.finish_reason}
    assert finished == {i: expected[i] for i in (1, 2, 3)}
    for completion in (c for c in done.values() if c.finish_reason):
        assert completion.submitted <= completion.started <= completion.first_token <= completion.finished


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_time_between_steps_is_not_decoding(target, drafter, waits, monkeypatch):
    """Nor does it weigh on the choice of the block size: the next visit is under way while the caller does other
    things, like the turn of another engine in a benchmark."""
    engine = Engine(target, drafter, slots=1, max_length=256, block_size="auto", tree=0, steps_per_visit=2)
    engine.warm_up()
    timed = []
    for chooser in engine.choosers.values():
        observe = chooser.observe
        chooser.observe = lambda draft, steps, seconds, *seen, observe=observe: (
            timed.append(seconds),
            observe(draft, steps, seconds, *seen),
        )
    clock, away = time.perf_counter, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + away)
    asked = []  # no visit is done at once; when it is looked at, it is, unless somebody waits for it

    def is_ready(trace):
        asked.append(trace)
        return not waits and any(trace is before for before in asked[:-1])

    monkeypatch.setattr("dflash_jax.infer.engine.decoding.is_ready", is_ready)
    engine.submit(tiny.ask([1, 2, 3], 60, stop_token_ids=()))
    while engine.busy or engine.waiting:
        engine.step()
        if waits:
            engine.wait()
        elif engine._decoding.ahead:
            jax.block_until_ready(engine._decoding.ahead.trace)  # done, though the engine has not looked
        away += 100.0
    assert len(timed) > 5
    assert waits == all(timed) == any(timed)
    assert max((seconds for seconds in timed if seconds), default=0.0) < 100
    assert engine.stats.decode_seconds < away / 4


def test_time_between_requests_is_not_decoding(target, drafter, monkeypatch):
    engine = Engine(target, drafter, slots=2, max_length=128, steps_per_visit=2)
    (whole,) = engine.generate([tiny.ask([1, 2, 3], 100, 1.0, stop_token_ids=())])
    early = next(token for i, token in enumerate(whole.token_ids) if i > 8 and token not in whole.token_ids[:i])
    stopped = [tiny.ask([1, 2, 3], 100, 1.0, stop_token_ids=(early,))]  # with the next visit under way
    engine.generate(stopped)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1e6)
    engine.stats.reset()
    begin = time.perf_counter()
    engine.generate(stopped)
    assert engine.stats.decode_seconds + engine.stats.prefill_seconds <= time.perf_counter() - begin
