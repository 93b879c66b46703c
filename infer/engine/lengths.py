"""How long the slots of a job must be: one long request must not make every slot long."""

from collections.abc import Sequence
from typing import NamedTuple

ROUND = 256  # slots have a multiple of so many tokens
WORTH = 0.75  # of the memory of equal slots: with less gain than that, they stay equal


class Lengths(NamedTuple):
    """Slots of two lengths; see `EngineConfig`."""

    short_length: int
    long_slots: int


def two_lengths(
    requests: Sequence[tuple[int, int]], slots: int, max_length: int, *, least: int = ROUND, parts: int = 1
) -> Lengths | None:
    """The two lengths that need the least memory for these requests, or None if equal slots need not much more.

    There are as many long slots as the long requests have of the tokens to generate: then neither kind waits for the
    other to be done.

    Args:
        requests: tokens of the prompt, and to generate, of each.
        slots: how many there are to be.
        max_length: of the long ones.
        least: of the short ones, at least.
        parts: the number of long slots is a multiple of this.
    """
    best, memory = None, WORTH * slots * max_length
    total = sum(new for _, new in requests)
    for short in sorted({max(least, -(-(prompt + new) // ROUND) * ROUND) for prompt, new in requests}):
        if short >= max_length:
            break
        share = sum(new for prompt, new in requests if prompt + new > short) / total
        long = -(-max(1, round(share * slots)) // parts) * parts
        needed = (slots - long) * short + long * max_length
        if long < slots and needed < memory:
            best, memory = Lengths(short, long), needed
    return best
