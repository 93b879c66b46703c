"""Stopping work in good order: the first signal asks, the second insists."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects interrupt and termination signals in a list, to be looked at where there is something whole to keep; a
    second one raises KeyboardInterrupt at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # signals reach the main thread only
        return

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, catch) for name in names]
    try:
        yield caught
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
