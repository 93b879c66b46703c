"""Programs that advance some of the rows only: how many, and which."""

from collections.abc import Sequence
from itertools import islice

NARROWER = (4, 2)  # few busy rows run programs of a fourth or half of the rows,
MANY = 16  # where there are so many: fewer are not worth compiling several times as many programs


def narrower(slots: int, parts: int) -> tuple[int, ...]:
    """How many rows there are programs for, of so many in the parts of a mesh, the fewest first."""
    fewer = [slots // n // parts * parts for n in NARROWER if slots >= MANY]
    return tuple(sorted({slots, *filter(None, fewer)}))


def filled(slots: int, busy_of: Sequence[Sequence[int]], width: int) -> list[int]:
    """The busy rows of each part, and others, so that there are `width` rows, as many of each part."""
    parts, chosen = len(busy_of), list[int]()
    of_part = slots // parts
    for part, taken in enumerate(busy_of):
        others = (slot for slot in range(part * of_part, (part + 1) * of_part) if slot not in taken)
        chosen += sorted([*taken, *islice(others, width // parts - len(taken))])
    return chosen
