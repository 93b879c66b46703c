"""Prompts read together: which program, and that nothing else changes."""

import jax
import numpy as np
import pytest

from dflash_jax import Engine
from dflash_jax.infer.engine.prompts import PrefillCost as Cost
from dflash_jax.infer.engine.prompts import Prefills, modelled
from dflash_jax.infer.engine.prompts import PrefillShape as Shape
from tests.tiny import ask

LONG = [(7 * i + i // 9) % 60 for i in range(230)]


def test_programs_have_bounds():
    assert Prefills(256, 8).shapes == (Shape(1, 32), Shape(8, 32), Shape(1, 128), Shape(2, 128), Shape(1, 256))
    assert Prefills(256, 1).shapes == (Shape(1, 32), Shape(1, 128), Shape(1, 256))
    assert Prefills(64, 8).shapes == (Shape(1, 64), Shape(4, 64))
    assert Prefills(8, 4).shapes == (Shape(1, 8), Shape(4, 8))
    for chunk in (1, 7, 64, 100, 256, 1000, 4096):
        of_chunk = Prefills(chunk, 16).shapes
        assert len(of_chunk) <= 10
        assert max(shape.tokens for shape in of_chunk) == chunk
        assert all(shape.rows * shape.tokens <= max(256, chunk) for shape in of_chunk)


def test_the_cheapest_program_per_token():
    programs = Prefills(256, 8)
    best = lambda *left, start=0: programs.choose([[(start, n) for n in left]])[0]
    assert best(20) == Shape(1, 32)
    assert best(100) == Shape(1, 128)  # one read of the weights, not four
    assert best(100, 120, 9) == Shape(2, 128)
    assert best(*[20] * 5) == Shape(8, 32)
    assert best(256, 10) == Shape(1, 256)
    programs.costs.update({shape: modelled(shape) for shape in programs.shapes})
    programs.costs[Shape(8, 32)] = Cost(100.0, 10.0)
    assert best(*[20] * 5) == Shape(8, 32)
    assert best(*[20] * 5, start=500) == Shape(1, 32)  # its rows are long
    assert programs.choose([[(0, 20)] * 8, [(30, 9)]]) == (Shape(8, 32), 400.0)
    programs.costs.update({shape: Cost(shape.rows * shape.tokens**2) for shape in programs.shapes})
    assert best(256) == Shape(1, 32)
    single = lambda n: Prefills(256, 8, fixed=True).choose([[(0, n)]])[0]
    assert [single(100), single(1000)] == [Shape(1, 128), Shape(1, 256)]


def test_rows_of_a_part_stay_in_it():
    got = Prefills(4, 8, 2).batch(Shape(2, 4), [[(1, [5, 6, 7, 8, 9])], [(6, [1]), (4, [2, 3]), (7, [4])]])
    assert got.counts.tolist() == [4, 0, 1, 2]
    assert got.rows.tolist()[0] == 1
    assert got.rows.tolist()[1] in (0, 2, 3)  # idle in this program, and no other's
    assert got.rows.tolist()[2:] == [6, 4]
    assert got.tokens.tolist() == [[5, 6, 7, 8], [0] * 4, [1, 0, 0, 0], [2, 3, 0, 0]]


def requests():
    prompts = [LONG[i : i + n] for i, n in enumerate((3, 100, 40, 200, 1, 64, 128, 17, 129))]
    settings = [{"temperature": 0.8, "repetition_penalty": 1.3}, {"logprobs": 2}, {}]
    return [ask(prompt, 12, id=f"r{i}", **settings[i % 3]) for i, prompt in enumerate(prompts)]


def outcome(completions):
    return [(c.token_ids, c.finish_reason) for c in completions]


@pytest.mark.parametrize(
    "more",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"prefix_chunks": 4}, {"steps_per_visit": 1}, {"warm_up": True})
        ),
    ],
)
def test_prompts_read_together_get_the_same_answers(target, drafter, more):
    alone = Engine(target, drafter, max_length=256, prefill_chunk=16, logprobs=2)
    warm_up = more.pop("warm_up", False) if (more := dict(more)) else False
    engine = Engine(target, drafter, slots=4, max_length=256, prefill_chunk=64, logprobs=2, **more)
    if warm_up:  # by measured costs
        engine.warm_up()
    assert outcome(engine.generate(requests())) == outcome(alone.generate(requests()))
    assert engine.stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests())


def test_rows_beside_the_prompts_stay_as_they_are(target, drafter):
    """What a program reads nothing of is not written: rows that decode, and such as wait for their next chunk."""
    engine = Engine(target, drafter, slots=4, max_length=256, prefill_chunk=64, block_size=2, steps_per_visit=1)
    engine.submit(ask(LONG[:3], 200))
    engine.step()
    before = jax.device_get(engine.batch.state)
    for n in (40, 30):
        engine.submit(ask(LONG[:n], 5))
    engine._pacing.reading_left = 1.0
    programs = engine.stats.prompt_programs
    while engine.stats.prompt_programs < programs + 2:
        engine.step()
    after = jax.device_get(engine.batch.state)
    first = lambda state: [np.asarray(x)[0] for x in jax.tree.leaves((state.target_cache, state.draft, state.history))]
    for x, y in zip(first(before), first(after), strict=True):
        np.testing.assert_array_equal(x, y)
    assert before.anchor[0] == after.anchor[0]
    assert before.remaining[0] == after.remaining[0]


@pytest.mark.slow
def test_a_prompt_of_a_hundred_tokens_reads_the_weights_once(target, drafter):
    engine = Engine(target, drafter, slots=2, max_length=256)
    engine.generate([ask(LONG[:100], 2)])
    assert engine.stats.prompt_programs == 1
    deterministic = Engine(target, drafter, slots=2, max_length=256, deterministic=True)
    deterministic.generate([ask(LONG[:100], 2)])
    assert deterministic.stats.prompt_programs == 1


@pytest.mark.slow
def test_short_prompts_pass_a_long_one(target, drafter):
    engine = Engine(target, drafter, slots=4, max_length=256, prefill_chunk=32)
    long, *short = (engine.submit(ask(prompt, 2)) for prompt in (LONG, LONG[:9], LONG[:5], LONG[:7]))
    order = []
    while engine.busy or engine.waiting:
        order += [ticket for ticket, completion in engine.step() if completion.finish_reason]
    assert order[-1] == long
    assert sorted(order[:-1]) == short
