"""Programs are compiled together, and left alone when that is no longer asked for."""

import re
import sys
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import Engine
from dflash_jax.infer import progress
from dflash_jax.infer.engine.compiling import compile_all
from tests import tiny


class Slow:
    """A program whose compilation takes long."""

    def __init__(self):
        self.begun, self.go_on = [], threading.Event()

    def compile(self, number):
        self.begun.append(number)
        self.go_on.wait(600)


def compiling(program, size):
    """The work for an argument of this size."""
    lowered = program.lower(jnp.ones(size))

    def work():
        lowered.compile()

    return work


def test_what_is_left_is_asked_for_in_this_thread():
    """And done in another, after what was found out there."""
    where = []

    def work():
        where.append(threading.current_thread())
        return more

    def more():
        where.append(threading.current_thread())
        return lambda: where.append(threading.current_thread())

    compile_all([work, lambda: None], lambda: None)
    assert [thread is threading.current_thread() for thread in where] == [False, True, False]


def test_what_was_compiled_is_found(monkeypatch):
    program = jax.jit(lambda x: jnp.sin(x) + 3)
    compile_all([compiling(program, n) for n in (3, 5)], lambda: None)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
    assert program(jnp.ones(5)).shape == (5,)


def test_it_says_how_far_it_is(monkeypatch):
    """At first after a while, then from time to time."""
    now, seen, lines = [0.0], [], []
    monkeypatch.setattr(progress.log, "info", lambda text, *given: lines.append(text % given))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    shown = progress.Compiling(3, 4.0, lambda: now[0])

    def told(done):
        seen.append(done)
        now[0] += 3.0
        shown.update(done)

    program = jax.jit(lambda x: jnp.cos(x) + 3)
    compile_all([compiling(program, n) for n in (3, 5, 7)], lambda: None, told)
    for _ in range(4):
        told(3)
    assert seen == sorted(seen)
    first, second, *_ = lines
    assert re.fullmatch(r"compiling [123]/3 \(first start only, kept in /somewhere/dflash_jax\) \.\.\.", first)
    assert second == "compiling 3/3 ..."


def test_it_says_so_in_one_line_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = progress.Compiling(2, clock=iter([0.0, 1.0, 1.1, 2.0]).__next__)
    for done in (0, 0, 1):
        shown.update(done)
    shown.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert [part.split(" (")[0] for part in said.split("\r")] == ["", "compiling 1/2", "compiling 2/2"]


def test_an_error_of_the_compiler_is_raised():
    with pytest.raises(ZeroDivisionError):
        compile_all([lambda: 1 / 0], lambda: None)


def test_nothing_is_waited_for_once_it_is_to_end():
    slow = Slow()

    def check_interrupt():
        if slow.begun:
            raise KeyboardInterrupt

    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compile_all([partial(slow.compile, n) for n in range(1000)], check_interrupt)
    assert time.perf_counter() - begin < 300
    slow.go_on.set()
    time.sleep(0.2)
    assert len(slow.begun) < 100  # those under way, of which there are few


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_an_engine_stops_between_programs(target, calls):
    engine = Engine(target, None, slots=2, max_length=64, prefill_chunk=8)
    asked = []

    def check_interrupt():
        asked.append(1)
        if len(asked) == calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.warm_up(check_interrupt)
    assert len(asked) == calls
    assert engine.generate([tiny.ask([1, 2, 3], 4)])[0].token_ids  # it compiles then


def test_the_first_programs_answer_while_others_are_compiled(target, drafter):
    """Requests in progress do not mind, and afterwards nothing is compiled."""
    given = {"slots": 2, "max_length": 64, "prefill_chunk": 16, "block_size": "auto", "prefix_chunks": 4}
    requests = [tiny.ask(list(range(1, 8 + 2 * i)), 12, temperature=0.5 * (i % 2), id=str(i)) for i in range(4)]
    tokens = lambda engine: [done.token_ids for done in engine.generate(requests)]
    plain = tokens(Engine(target, None, slots=2, max_length=64))
    engine = Engine(target, drafter, plain=True, **given)
    engine.warm_up(first=True)
    assert len(engine.batch.used) == 3  # a chunk of a prompt, the drafter's own block, and autoregressive decoding
    assert engine.left == len(engine.batch.calls.names) - 3 > 2
    assert engine.steps_by_block_size.keys() == {"1", "8"}
    thread = threading.Thread(target=engine.compile_rest)
    thread.start()
    while thread.is_alive():
        assert tokens(engine) == plain
    steps = dict(engine.steps_by_block_size)
    assert len(engine.batch.used) == 3
    engine.warm_up()
    assert not engine.left
    assert engine.steps_by_block_size.items() >= steps.items()  # they are not counted anew
    compiled = []
    listen = lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    assert tokens(engine) == plain
    assert not compiled


def test_a_deterministic_engine_is_ready_when_all_is_compiled(target, drafter):
    engine = Engine(target, drafter, slots=2, max_length=64, deterministic=True)
    assert engine.batch.calls.first == engine.batch.calls.names
