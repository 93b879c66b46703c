"""Compiling several programs at a time, in a way that can be ended early."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

LOOK = 0.2  # seconds between two calls of `check_interrupt`
COMPILING = "compile"  # how the names of threads begin that compile, which nothing can stop
Progress = Callable[[int], object]  # called again and again with the number of programs that are compiled


# Work for any thread, after which a program can be called. What it returns, if anything, is called in the thread that
# asked for it, and gives the work that is left.
Work = Callable[[], "Callable[[], Work] | None"]


def compile_all(
    programs: Iterable[Work],
    check_interrupt: Callable[[], object],
    progress: Progress = lambda done: None,
    at_once: int | None = None,
) -> None:
    """Compiles programs in threads of their own.

    Args:
        programs: the work for each. It is asked for one after the other, in this thread, while others compile.
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
                if (left := one.result()) is not None:
                    begun.remove(one)
                    begun.append(pool.submit(left()))
                    compiling.add(begun[-1])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
