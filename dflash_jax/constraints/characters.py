"""Sets of characters, and how they are written: as UTF-8, or inside a string of JSON."""

from collections.abc import Iterable
from functools import lru_cache

from dflash_jax.constraints.expressions import Expression, Expressions

Range = tuple[int, int]  # of code points, the last one included
LAST = 0x10FFFF
_SHORT = {0x22: b'"', 0x5C: b"\\", 0x2F: b"/", 8: b"b", 12: b"f", 10: b"n", 13: b"r", 9: b"t"}  # after a backslash


class Characters:
    """A set of characters.

    Attributes:
        ranges: ascending, with gaps between them, none of them surrogates.
    """

    def __init__(self, ranges: Iterable[Range]):
        merged = list[Range]()
        for begin, end in sorted(ranges):
            for low, high in ((begin, min(end, 0xD7FF)), (max(begin, 0xE000), end)):
                if low > high:
                    continue
                if merged and low <= merged[-1][1] + 1:
                    merged[-1] = merged[-1][0], max(high, merged[-1][1])
                else:
                    merged.append((low, high))
        self.ranges = tuple(merged)

    def __or__(self, other: "Characters") -> "Characters":
        return Characters([*self.ranges, *other.ranges])

    def __and__(self, other: "Characters") -> "Characters":
        pairs = ((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges)
        return Characters([(low, high) for low, high in pairs if low <= high])

    def others(self) -> "Characters":
        """All characters that are not in it."""
        found, begin = list[Range](), 0
        for low, high in self.ranges:
            if begin < low:
                found.append((begin, low - 1))
            begin = high + 1
        return Characters([*found, (begin, LAST)] if begin <= LAST else found)


ALL = Characters([(0, LAST)])
PLAIN = Characters([(0x20, LAST)]) & Characters([(0x22, 0x22), (0x5C, 0x5C)]).others()  # of a string, as they are


def utf8(made: Expressions, of: Characters) -> Expression:
    """One character of a set, as its bytes."""
    return made.either([made.sequence([made.one(_bytes(*part)) for part in parts]) for parts in _parts(of.ranges)])


def in_json(made: Expressions, of: Characters) -> Expression:
    """One character of a set inside a string of JSON: as it is, or behind a backslash if it must be."""
    written = [utf8(made, of & PLAIN)]
    for low, high in (of & PLAIN.others()).ranges:
        for code in range(low, high + 1):
            after = _SHORT.get(code, b"u%04x" % code)
            written.append(made.text(b"\\" + after))
    return made.either(written)


def any_in_json(made: Expressions, *, escapes: bool = True) -> Expression:
    """One character inside a string of JSON, in whatever way it may be written.

    Args:
        escapes: whether those behind `\\u` are among them; surrogates come in pairs.
    """
    written = [utf8(made, PLAIN), made.sequence([made.text(b"\\"), made.one(_set(b'"\\/bfnrt'))])]
    if escapes:
        digit, text = made.one(_set(b"0123456789abcdefABCDEF")), made.text
        one = lambda digits: made.one(_set(digits))
        plain = made.either(
            [made.sequence([one(b"0123456789abcefABCEF"), digit]), made.sequence([one(b"dD"), one(b"01234567")])]
        )
        high = made.sequence([one(b"dD"), one(b"89abAB"), digit, digit, text(b"\\u"), one(b"dD"), one(b"cdefCDEF")])
        written.append(made.sequence([text(b"\\u"), made.either([plain, high]), digit, digit]))
    return made.either(written)


def _set(of: bytes) -> int:
    return sum(1 << byte for byte in of)


def _bytes(low: int, high: int) -> int:
    return (1 << (high + 1)) - (1 << low)


@lru_cache(1024)
def _parts(ranges: tuple[Range, ...]) -> tuple[tuple[Range, ...], ...]:
    """Sequences of byte ranges that together are the UTF-8 of these characters."""
    found = list[tuple[Range, ...]]()
    for low, high in ranges:
        for begin, end, size in ((0, 0x7F, 1), (0x80, 0x7FF, 2), (0x800, 0xFFFF, 3), (0x10000, LAST, 4)):
            if (first := max(low, begin)) <= (last := min(high, end)):
                found += _aligned(first, last, size)
    return tuple(found)


def _aligned(low: int, high: int, size: int) -> list[tuple[Range, ...]]:
    """The same for characters of so many bytes: split until only the last bytes range over all their values."""
    for rest in range(1, size):
        mask = (1 << (6 * rest)) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                return [*_aligned(low, low | mask, size), *_aligned((low | mask) + 1, high, size)]
            if high & mask != mask:
                return [*_aligned(low, (high & ~mask) - 1, size), *_aligned(high & ~mask, high, size)]
    pairs = zip(chr(low).encode(), chr(high).encode(), strict=True)
    return [tuple(pairs)]
