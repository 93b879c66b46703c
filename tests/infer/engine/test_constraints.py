"""Constraints of an engine: prepared once, in its tables while they are needed, and never in the way of others."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, RequestError, SamplingParams, load_target
from dflash_jax.constraints.constraint import choice, json_schema, regex
from dflash_jax.infer.engine.constraints import AUTOMATA, Constraints
from tests import tiny
from tests.fakes import vocabulary

END = vocabulary.END


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    tiny.write_target(directory, tiny.target_config(vocab_size=vocabulary.SIZE, eos_token_id=END))
    return load_target(vocabulary.write_tokenizer(directory))


def params(constraint, **given):
    return SamplingParams(20, constraint=constraint, eos_token_ids=(END,), **given)


def walked(constraints, begin, texts):
    """The states of the tables along these tokens, and what each allows."""
    state, automaton, allowed = jnp.asarray([[int(begin.state)]]), jnp.asarray([int(begin.automaton)]), []
    for text in texts:
        allowed.append(np.asarray(constraints.tables.allowed(state, None, vocabulary.SIZE))[0, 0])
        token = vocabulary.vocabulary().numbers[text]
        state = constraints.tables.following(state, automaton, jnp.asarray([[token]]))
    return int(state[0, 0]), allowed


@pytest.mark.slow
def test_tables_fill_and_empty(target):
    """What is placed is right whatever was placed and removed before."""
    constraints, rng, placed = Constraints(target, 256), np.random.default_rng(0), []
    for i in range(90):
        asked = regex(f"[a-c]{{1,{rng.integers(1, 60)}}}{i % 7}?x")
        ready = constraints.check(params(asked))
        begin = constraints.place(ready)
        if begin is None:
            assert placed, "a constraint that fits into the tables alone"
            constraints.release(placed.pop(rng.integers(len(placed)))[0])
            continue
        placed.append((ready, begin))
        for one, at in placed:  # all of them are as they were
            state, allowed = walked(constraints, at, [b"a", b"x"])
            np.testing.assert_array_equal(allowed[0], one.automaton.allows(1))
            assert np.flatnonzero(
                np.asarray(constraints.tables.allowed(jnp.asarray([[state]]), None, vocabulary.SIZE))[0, 0]
            ).tolist() == [END]
        if rng.random() < 0.5:
            constraints.release(placed.pop(rng.integers(len(placed)))[0])
    free = constraints.place(None)
    assert (int(free.state), int(free.automaton)) == (0, 0)
    assert np.asarray(constraints.tables.allowed(jnp.zeros((1, 1), jnp.int32), None, vocabulary.SIZE)).all()


def test_two_constraints_share_masks(target):
    constraints = Constraints(target, 256)
    for text in ("ab{2}c", "ab{2}d"):
        constraints.place(constraints.check(params(regex(text))))
    used = np.asarray(constraints.tables.masks).any(axis=1).sum()
    assert used == 1 + 5  # all; a, b, c, d, and the end


@pytest.mark.slow
def test_a_request_waits_for_room_in_the_tables(target):
    """And others do not; no answer changes."""
    asked = [regex(f"[ab]{{{40 + i}}}") if i % 3 else None for i in range(9)]
    requests = [tiny.ask([5, i], 60, 0.8, id=str(i), constraint=c, eos_token_ids=(END,)) for i, c in enumerate(asked)]
    wide = Engine(target, None, slots=4, max_length=80, constraints=True).generate(requests)
    small = Engine(target, None, slots=4, max_length=80, constraints=True, constraint_states=64)
    assert [done.token_ids for done in small.generate(requests)] == [done.token_ids for done in wide]
    assert small.busy == small.waiting == 0
    assert all(not placed.users for placed in small.constraints._placed.values())


def test_cancelled_requests_give_back_their_room(target):
    engine = Engine(target, None, slots=2, max_length=80, constraints=True, constraint_states=64)
    for i in range(6):
        ticket = engine.submit(tiny.ask([5], 60, constraint=regex(f"[ab]{{{30 + i}}}"), eos_token_ids=(END,)))
        engine.step()
        engine.cancel(ticket)
    (done,) = engine.generate([tiny.ask([5], 60, constraint=regex("b{3}"), eos_token_ids=(END,))])
    assert done.finish_reason == "stop"


def test_more_constraints_than_automata(target):
    engine = Engine(target, None, slots=2, max_length=32, constraints=True, constraint_states=2**12)
    asked = [choice([f"a{i}", f"b{i}"]) for i in range(AUTOMATA + 8)]
    requests = [tiny.ask([5], 8, id=str(i), constraint=c, eos_token_ids=(END,)) for i, c in enumerate(asked)]
    for i, done in enumerate(engine.generate(requests)):
        text = b"".join(vocabulary.vocabulary().tokens[t] for t in done.token_ids[:-1]).decode()
        assert text in (f"a{i}", f"b{i}")


def test_what_cannot_be_served_is_refused_before_it_starts(target):
    engine = Engine(target, None, max_length=32, constraints=True, constraint_states=256)
    refused = [
        (
            {"constraint": regex("a"), "ignore_eos": True},
            "invalid_parameter",
            "cannot be combined",
        ),
        ({"constraint": regex("a")}, "invalid_parameter", "needs eos_token_ids"),
        ({"constraint": json_schema({"not": {}}), "eos_token_ids": (END,)}, "unsupported_schema", "/not"),
        ({"constraint": regex("("), "eos_token_ids": (END,)}, "invalid_regex", "missing"),
        ({"constraint": regex("a{9999}"), "eos_token_ids": (END,)}, "constraint_too_large", "states"),
    ]
    for given, code, why in refused:
        with pytest.raises(RequestError, match=why) as error:
            engine.submit(tiny.ask([5], 9, **given))
        assert (error.value.code, error.value.param) == (code, "constraint")
    with pytest.raises(RequestError, match="constraints=False"):
        Engine(target, None, max_length=32).submit(tiny.ask([5], 9, constraint=regex("a"), eos_token_ids=(END,)))
    assert engine.generate([tiny.ask([5], 4, eos_token_ids=(END,))])[0].token_ids


def test_a_target_without_a_tokenizer_says_so(tmp_path):
    target = load_target(tiny.write_target(tmp_path, tiny.target_config()))
    engine = Engine(target, None, max_length=32, constraints=True)
    with pytest.raises(RequestError, match=r"tokenizer\.json") as error:
        engine.submit(tiny.ask([5], 9, constraint=regex("a"), eos_token_ids=(1,)))
    assert error.value.code == "no_constraints"


def test_they_are_prepared_beside_if_asked(target):
    constraints = Constraints(target, 256)
    constraints.prepare_beside()
    try:
        asked = params(regex("a+b"))
        assert not constraints.knows(asked)
        ready = constraints.check(asked)
        assert constraints.knows(asked)
        assert constraints.check(asked) is ready
        np.testing.assert_array_equal(ready.automaton.next, Constraints(target, 256).check(asked).automaton.next)
    finally:
        constraints.close()
