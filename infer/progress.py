"""What a command shows while it works: a bar on a terminal, lines of figures in a log."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tqdm import tqdm

    from dflash_jax.infer.engine.engine import Engine

_log = logging.getLogger("dflash_jax")
COMPILING_PAUSE = 10.0  # seconds between two lines that say how far compiling is
LOG_PAUSE = 30.0  # seconds between two lines of progress where there is no terminal


def warm_up(
    engine: "Engine",
    going: Callable[[], bool] = lambda: True,
    *,
    first: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Compiles, and says so.

    Args:
        first, progress: see `Engine.warm_up`.

    Raises:
        KeyboardInterrupt: `going` is false, which is looked at between programs.
    """

    def check_interrupt() -> None:
        if not going():
            raise KeyboardInterrupt

    log = compiling_log(engine.programs(first=first), 0.0)
    engine.warm_up(check_interrupt, lambda done: (log(done), progress(done)), first=first)
    more = f"; {engine.left} programs that make it faster are compiled meanwhile" if engine.left else ""
    _log.info("ready after %.1f s%s", engine.stats.compile_seconds, more)


def compiling_log(
    programs: int, patience: float, clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], None]:
    """What logs how far compiling is: at first after so many seconds, then from time to time."""
    due, first = clock() + patience, True

    def progress(done: int) -> None:
        nonlocal due, first
        if (now := clock()) < due:
            return
        if first:
            _log.info("compiling %d programs; they are kept, so that it takes this long once ...", programs)
        else:
            _log.info("%d programs are compiled ...", done)
        due, first = now + COMPILING_PAUSE, False

    return progress


def progress_bar(total: int, unit: str, *, in_logs: bool = True) -> "tqdm":
    """A bar on stderr: drawn twice a second on a terminal, twice a minute in a log or not there at all."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    pause = 0.5 if terminal else LOG_PAUSE
    return tqdm(
        total=total,
        unit=unit,
        file=sys.stderr,
        disable=not (terminal or in_logs),
        mininterval=pause,
        maxinterval=max(pause, 10.0),
    )


def engine_rates(engine: "Engine") -> str:
    """Tokens per second and tau so far, for a progress bar."""
    if not engine.stats.steps:
        return ""
    rate = f"{engine.stats.tokens_per_second:.0f} tok/s"
    return f"{rate} tau {engine.stats.tau:.2f}" if engine.drafter else rate


class Working(Protocol):
    """Work that a `Reporter` tells of."""

    def rates(self) -> str:
        """Its speed, in few words."""
        ...

    def state(self) -> str:
        """Its slots, waiting requests and memory, in few words."""
        ...


class Reporter:
    """A bar on a terminal, and a line of figures every so many seconds if that is asked for, or in a log."""

    def __init__(self, what: Working, total: int, interval: float | None):
        self._what, self._last = what, time.perf_counter()
        self._interval = LOG_PAUSE if interval is None and not sys.stderr.isatty() else interval
        self._bar = progress_bar(total, "request", in_logs=False)
        self.finished = 0

    def update(self, finished: bool) -> None:
        self.finished += finished
        self._bar.update(int(finished))
        self._bar.set_postfix_str(self._what.rates(), refresh=False)
        now = time.perf_counter()
        if self._interval and now - self._last >= self._interval:
            self._last = now
            line = f"{self.finished}/{self._bar.total} done   {self._what.rates()}   {self._what.state()}"
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def memory_mib() -> float:
    """Memory in use: on the first device, or of this process where the device does not report it."""
    import jax

    found = jax.devices()[0].memory_stats()
    if found and "bytes_in_use" in found:
        return found["bytes_in_use"] / 2**20
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return float("nan")
