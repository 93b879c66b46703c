"""Compiling several programs at a time, in a way that can be ended early."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

LOOK = 0.2  # seconds between two calls of `check_interrupt`
COMPILING = "compile"  # how the names of threads begin that compile, which nothing can stop
Progress = Callable[[int], object]  # called again and again with the number of programs that are compiled


def compile_all(
    programs: Iterable[Callable[[], object]],
    check_interrupt: Callable[[], object],
    progress: Progress = lambda done: None,
    at_once: int | None = None,
) -> None:
    """Compiles programs in threads of their own.

    Args:
        programs: what compiles each. They are asked for one after the other, in this thread, while others compile.
        check_interrupt: called again and again meanwhile. What it raises ends the work: no further program is begun,
            and those under way, which nothing can stop, are not waited for.
        at_once: how many, at most.
    """
    pool, begun = ThreadPoolExecutor(at_once, COMPILING), list[Future]()
    try:
        for program in programs:
            check_interrupt()
            progress(sum(one.done() for one in begun))
            begun.append(pool.submit(program))
        compiling = set(begun)
        while compiling:
            check_interrupt()
            progress(sum(one.done() for one in begun))
            done, compiling = wait(compiling, LOOK, FIRST_COMPLETED)
            for one in done:
                one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
