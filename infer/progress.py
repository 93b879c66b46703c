"""What a command shows while it works: a bar on a terminal, lines of figures in a log."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dflash_jax.files import cache_directory, shown_path

if TYPE_CHECKING:
    from tqdm import tqdm

    from dflash_jax.infer.engine.engine import Engine
    from dflash_jax.infer.engine.stats import Stats

log = logging.getLogger("dflash_jax")
COMPILING_PAUSE = 10.0  # seconds between two lines that say how far compiling is, where there is no terminal
DRAWN = 0.5  # the same on a terminal, where a line replaces the one before
LOG_PAUSE = 30.0  # seconds between two lines of progress where there is no terminal


def counted(number: int, noun: str) -> str:
    """A number with its noun, which takes an s unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def warm_up(
    engine: "Engine",
    going: Callable[[], bool] = lambda: True,
    *,
    first: bool = False,
    background: bool = False,
    patience: float = 0.0,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Compiles, and says so.

    Args:
        first, progress: see `Engine.warm_up`.
        background: whether the caller then compiles the rest.
        patience: seconds of compiling before anything is said.

    Raises:
        KeyboardInterrupt: `going` is false, which is looked at between programs.
    """

    def check_interrupt() -> None:
        if not going():
            raise KeyboardInterrupt

    shown = Compiling(engine.programs(first=first), patience)

    def compiled(done: int) -> None:
        shown.update(done)
        progress(done)

    try:
        engine.warm_up(check_interrupt, compiled, first=first)
    finally:
        shown.close()
    rest = engine.left if background else 0
    more = f"; compiling {counted(rest, 'more program')} in the background" if rest else ""
    if not patience or shown.said:
        log.info("ready after %.1f s%s", engine.stats.compile_seconds, more)


class Compiling:
    """Shows how many programs are compiled: one line that changes on a terminal, now and then a line in a log.

    Args:
        programs: how many there are.
        patience: seconds before anything is shown.
    """

    def __init__(self, programs: int, patience: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self._programs, self._clock, self._due = programs, clock, clock() + patience
        self._terminal, self.said = sys.stderr.isatty(), False

    def update(self, done: int) -> None:
        """So many are compiled."""
        if (now := self._clock()) < self._due:
            return
        why = f"first start only, kept in {shown_path(cache_directory())}"
        text = f"compiling {min(done + 1, self._programs)}/{self._programs}"
        if self._terminal:
            print(f"\r{text} ({why}) ...", end="", file=sys.stderr, flush=True)
        else:
            log.info("%s%s ...", text, "" if self.said else f" ({why})")
        self._due, self.said = now + (DRAWN if self._terminal else COMPILING_PAUSE), True

    def close(self) -> None:
        if self._terminal and self.said:
            print(file=sys.stderr)


def progress_bar(total: int, unit: str, *, in_logs: bool = True, done: int = 0, estimate: bool = True) -> "tqdm":
    """A bar on stderr: drawn twice a second on a terminal, twice a minute in a log or not there at all.

    Args:
        done: where it begins.
        estimate: show the speed and the time that is left, from the beginning of the bar on.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    pause = 0.5 if terminal else LOG_PAUSE
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        bar_format=None if estimate else "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        file=sys.stderr,
        disable=not (terminal or in_logs),
        mininterval=pause,
        maxinterval=max(pause, 10.0),
    )


def duration(seconds: float) -> str:
    """Seconds in words, rounded: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def engine_rates(engine: "Engine", stats: "Stats | None" = None) -> str:
    """Tokens per second and tau so far, for a progress bar. `stats`: instead of the engine's own."""
    stats = stats or engine.stats
    if not stats.row_steps or not stats.decode_seconds:  # not counted yet
        return ""
    rate = f"{stats.tokens_per_second:.0f} tok/s"
    return f"{rate} tau {stats.tau:.2f}" if engine.drafter else rate


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
