"""Compiling several programs at a time, in a way that can be ended early."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

LOOK = 0.2  # seconds between two calls of `check_interrupt`


def compile_all(calls: Iterable[tuple[Any, tuple]], check_interrupt: Callable[[], object]) -> None:
    """Compiles jitted functions for these arguments; later calls with such arguments find the programs.

    Args:
        check_interrupt: called again and again meanwhile. What it raises ends the work: no further program is begun,
            and those under way, which nothing can stop, are not waited for.
    """
    pool, compiling = ThreadPoolExecutor(), set[Future]()
    try:
        for program, arguments in calls:
            check_interrupt()
            compiling.add(pool.submit(program.lower(*arguments).compile))
        while compiling:
            check_interrupt()
            done, compiling = wait(compiling, LOOK, FIRST_COMPLETED)
            for program in done:
                program.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
