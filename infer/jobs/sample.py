"""A sample of many things: the first of them, and the largest of the others."""

from collections.abc import Iterator
from heapq import heappush, heappushpop
from typing import Generic, TypeVar

T = TypeVar("T")
FIRST = 1024
LARGEST = 64


class Sample(Generic[T]):
    """What came first, and of the rest what is largest; in the order in which it came."""

    def __init__(self) -> None:
        self._first, self._largest, self._seen = list[T](), list[tuple[int, int, T]](), 0

    def add(self, size: int, thing: T) -> None:
        one = size, self._seen, thing
        if self._seen < FIRST:
            self._first.append(thing)
        elif len(self._largest) < LARGEST:
            heappush(self._largest, one)
        elif size > self._largest[0][0]:
            heappushpop(self._largest, one)
        self._seen += 1

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from (thing for _, _, thing in sorted(self._largest, key=lambda one: one[1]))
