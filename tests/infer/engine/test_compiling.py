"""Programs are compiled together, and left alone when that is no longer asked for."""

import threading
import time

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

    def lower(self, number):
        return type("Lowered", (), {"compile": lambda _: self.begun.append(number) or self.go_on.wait(600)})()


def test_what_was_compiled_is_found(monkeypatch):
    program = jax.jit(lambda x: jnp.sin(x) + 3)
    compile_all([(program, (jnp.ones(n),)) for n in (3, 5)], lambda: None)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
    assert program(jnp.ones(5)).shape == (5,)


def test_it_says_how_far_it_is(monkeypatch):
    """At first after a while, then from time to time."""
    now, seen, lines = [0.0], [], []
    monkeypatch.setattr(progress._log, "info", lambda text, *given: lines.append(text % given))
    log = progress.compiling_log(3, 4.0, lambda: now[0])

    def told(done):
        seen.append(done)
        now[0] += 3.0
        log(done)

    program = jax.jit(lambda x: jnp.cos(x) + 3)
    compile_all([(program, (jnp.ones(n),)) for n in (3, 5, 7)], lambda: None, told)
    for _ in range(4):
        told(3)
    assert seen == sorted(seen)
    first, second, *_ = lines
    assert first == "compiling 3 programs; they are kept, so that it takes this long once ..."
    assert second.endswith("programs are compiled ...")


def test_an_error_of_the_compiler_is_raised():
    class Broken:
        def lower(self):
            return type("Lowered", (), {"compile": lambda _: 1 / 0})()

    with pytest.raises(ZeroDivisionError):
        compile_all([(Broken(), ())], lambda: None)


def test_nothing_is_waited_for_once_it_is_to_end():
    slow = Slow()

    def check_interrupt():
        if slow.begun:
            raise KeyboardInterrupt

    begin = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compile_all([(slow, (n,)) for n in range(1000)], check_interrupt)
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
