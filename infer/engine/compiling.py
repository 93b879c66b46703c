"""Compiling several programs at a time, in a way that can be ended early."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

LOOK = 0.2  # seconds between two calls of `check_interrupt`
COMPILING = "compile"  # how the names of threads begin that compile, which nothing can stop
Progress = Callable[[int], object]  # called again and again with the number of programs that are compiled


def compile_all(
    calls: Iterable[tuple[Any, tuple]],
    check_interrupt: Callable[[], object],
    progress: Progress = lambda done: None,
    at_once: int | None = None,
) -> None:
    """Compiles jitted functions for these arguments; later calls with such arguments find the programs.

    Args:
        check_interrupt: called again and again meanwhile. What it raises ends the work: no further program is begun,
            and those under way, which nothing can stop, are not waited for.
        at_once: how many, at most.
    """
    pool, begun = ThreadPoolExecutor(at_once, COMPILING), list[Future]()
    try:
        for program, arguments in calls:
            check_interrupt()
            progress(sum(one.done() for one in begun))
            begun.append(pool.submit(program.lower(*arguments).compile))
        compiling = set(begun)
        while compiling:
            check_interrupt()
            progress(sum(one.done() for one in begun))
            done, compiling = wait(compiling, LOOK, FIRST_COMPLETED)
            for program in done:
                program.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
