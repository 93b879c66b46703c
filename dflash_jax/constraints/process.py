"""A process of its own that prepares constraints, so that what decodes beside it is not held up.

It speaks over its standard input and output: a length in 8 bytes, then a pickle.
"""

import contextlib
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from dflash_jax.constraints.constraint import SECONDS, Constraint, prepared
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.vocabulary import TokenAutomaton, Vocabulary

MEMORY = 2**30  # bytes that one may take besides what the process needs itself
PATIENCE, GRACE = 1.0, 60.0  # further seconds after which one that does not answer is ended: the first one, and others


class Process:
    """Prepares constraints in another process, one after the other; any thread may ask.

    The process takes only the time that processors have left, so that it holds up no step. Where they have too little
    left, another one takes its turns with the rest from then on.

    Args:
        vocabulary: of the target.
        states: that an automaton may have.
    """

    def __init__(self, vocabulary: Vocabulary, states: int):
        self._given = vocabulary.tokens, vocabulary.special, states
        self._lock, self._running, self._waits, self._closing = threading.Lock(), None, True, False

    def prepared(self, constraint: Constraint, ends: Sequence[int]) -> TokenAutomaton:
        """The automaton of a constraint; see `constraint.prepared`.

        Raises:
            ConstraintError: it cannot be enforced, or takes too much time or memory.
        """
        with self._lock:
            found = self._asked(constraint, ends)
            if found is None:  # too late, or the process has ended, perhaps for another reason
                found = self._asked(constraint, ends)
        if found is None:
            raise ConstraintError("constraint_too_large", "the constraint takes too much time or memory to prepare")
        if isinstance(found, ConstraintError):
            raise found
        return found

    def _asked(self, constraint: Constraint, ends: Sequence[int]) -> TokenAutomaton | ConstraintError | None:
        """The answer of the process; None if it ends without one, or does not answer in time."""
        if self._running is not None and self._running.poll() is not None:
            self._end()
        if self._closing:
            return ConstraintError("constraint_timeout", "the engine ends")
        late = threading.Event()
        try:
            if self._running is None:
                self._running = self._start()
                self._answer(GRACE, late)  # that it is ready
            assert self._running.stdin is not None
            _write(self._running.stdin, pickle.dumps((constraint, tuple(ends))))
            return self._answer(2 * SECONDS + (PATIENCE if self._waits else GRACE), late)
        except (OSError, EOFError):
            self._waits &= not late.is_set()
            self._end()
            return None

    def _answer(self, seconds: float, late: threading.Event) -> Any:
        """What the process says; it is ended after so many seconds, which sets `late`."""
        process = self._running
        assert process is not None
        assert process.stdout is not None

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            return pickle.loads(_read(process.stdout))
        finally:
            timer.cancel()

    def _start(self) -> "subprocess.Popen[bytes]":
        paths = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        settings = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_jax.constraints.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | settings,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # whoever asks it will notice
            _write(process.stdin, pickle.dumps((*self._given, self._waits)))
        return process

    def close(self) -> None:
        """Ends the process, and what is asked of it; another question starts a new one."""
        self._closing = True
        if (process := self._running) is not None:
            process.kill()
        with self._lock:
            self._end()
            self._closing = False

    def _end(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    head = stream.read(8)
    message = stream.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if len(head) < 8 or len(message) < int.from_bytes(head, "little"):
        raise EOFError("the other process has ended")
    return message


def main() -> None:
    """Answers until its input ends."""
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(OSError):
        os.nice(5)
    tokens, special, states, waits = pickle.loads(_read(given))
    vocabulary = Vocabulary(tokens, special)
    vocabulary.prepare()
    if waits:
        with contextlib.suppress(OSError, AttributeError):  # it is not allowed, or this is no Linux
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _write(answers, pickle.dumps("ready"))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (4 * used + MEMORY, resource.RLIM_INFINITY))
    while True:
        try:
            constraint, ends = pickle.loads(_read(given))
        except EOFError:
            return
        answer: TokenAutomaton | ConstraintError
        try:
            answer = prepared(constraint, vocabulary, ends, states=states)
        except ConstraintError as error:
            answer = error
        except MemoryError:
            answer = ConstraintError("constraint_too_large", "the constraint takes too much memory to prepare")
        except Exception as error:  # whatever one provokes is its own fault
            answer = ConstraintError("invalid_schema", f"the constraint cannot be read: {error!s:.200}")
        _write(answers, pickle.dumps(answer))


if __name__ == "__main__":
    main()
