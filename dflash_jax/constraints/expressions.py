"""Regular expressions over bytes, with intersection and complement, and their derivatives.

The derivative of an expression by a byte matches what may follow that byte. An automaton is the expressions that
derivatives lead to (Owens, Reppy and Turon, "Regular-expression derivatives re-examined", 2009). Equal expressions are
one object, so that derivatives are computed once and states are merged where they are written alike.

Besides bytes there are symbols for special tokens, which have no text: one for each that an expression names, and one
for all others. A set of symbols is an integer with a bit for each.
"""

from collections.abc import Collection, Iterable, Sequence

from dflash_jax.constraints.errors import ConstraintError

OTHER = 256  # after the bytes, any special token that no expression names;
SYMBOLS = 288  # after it, those that are named
EVERY = (1 << SYMBOLS) - 1
Set = int  # of symbols

Key = tuple  # of an expression: its kind, and what it is made of
_NOTHING, _EMPTY, _SET, _THEN, _EITHER, _BOTH, _NOT, _TIMES = range(8)


class Expression:
    """An expression of one `Expressions`; compare by identity.

    Attributes:
        kind, parts: what it is.
        empty: whether it matches the empty text.
        number: order of its making.
    """

    __slots__ = "_classes", "_derivatives", "empty", "kind", "number", "parts"

    def __init__(self, kind: int, parts: tuple, number: int, *, empty: bool):
        self.kind, self.parts, self.empty, self.number = kind, parts, empty, number
        self._derivatives: dict[Set, Expression] = {}
        self._classes: tuple[Set, ...] | None = None


class Expressions:
    """Makes expressions, each once.

    Attributes:
        special: names of the vocabulary's special tokens.
        marks: symbols of those that were asked for.
        nothing: matches no text.
        empty: matches the empty text.
        anything: matches every text.
        plain: whether all other expressions match some text; intersections and complements may match none.
    """

    def __init__(self, special: Collection[str] = ()):
        self.special, self.marks = special, dict[str, int]()
        self._known: dict[Key, Expression] = {}
        self.plain = True
        self.nothing = self._made(_NOTHING, (), empty=False)
        self.empty = self._made(_EMPTY, (), empty=True)
        self.anything = self._made(_NOT, (self.nothing,), empty=True)

    def __len__(self) -> int:
        return len(self._known)

    def _made(self, kind: int, parts: tuple, *, empty: bool) -> Expression:
        key = (kind, *(part.number if isinstance(part, Expression) else ("=", part) for part in parts))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Expression(kind, parts, len(self._known), empty=empty)
        return found

    def one(self, of: Set) -> Expression:
        """One symbol of a set."""
        return self._made(_SET, (of,), empty=False) if of else self.nothing

    def mark(self, name: str) -> Expression:
        """A special token, or its text where the vocabulary has no such token."""
        if name not in self.special:
            return self.text(name.encode())
        symbol = self.marks.setdefault(name, OTHER + 1 + len(self.marks))
        if symbol >= SYMBOLS:
            raise ConstraintError("constraint_too_large", "the constraint names too many special tokens")
        return self.one(1 << symbol)

    def free(self, *without: str) -> Expression:
        """Any text with any special tokens, but without these marks (see `mark`)."""
        allowed, parts = EVERY, list[Expression]()
        for name in without:
            one = self.mark(name)
            if name in self.special:
                allowed &= ~one.parts[0]
            else:
                parts.append(self.without(self.sequence([self.anything, one, self.anything])))
        return self.both([self.times(self.one(allowed), 0, None), *parts])

    def text(self, text: bytes) -> Expression:
        """These bytes."""
        return self.sequence([self.one(1 << byte) for byte in text])

    def texts(self, texts: Iterable[bytes]) -> Expression:
        """One of these texts; beginnings that they share are written once."""
        ordered = sorted(set(texts))

        def following(begin: int, end: int, at: int) -> Expression:
            found = list[Expression]()
            if begin < end and len(ordered[begin]) == at:
                found.append(self.empty)
                begin += 1
            while begin < end:
                byte, last = ordered[begin][at], begin
                while last < end and ordered[last][at] == byte:
                    last += 1
                # What only one text has left is written in a loop: texts may be long.
                rest = self.text(ordered[begin][at + 1 :]) if last == begin + 1 else following(begin, last, at + 1)
                found.append(self.then(self.one(1 << byte), rest))
                begin = last
            return self.either(found)

        return following(0, len(ordered), 0)

    def then(self, first: Expression, second: Expression) -> Expression:
        """The one and then the other."""
        if first is self.nothing or second is self.nothing:
            return self.nothing
        if first is self.empty:
            return second
        if second is self.empty:
            return first
        parts = [first]
        while parts[-1].kind == _THEN:  # a sequence is written from the right
            parts[-1:] = parts[-1].parts
        for part in reversed(parts):
            second = self._made(_THEN, (part, second), empty=part.empty and second.empty)
        return second

    def sequence(self, parts: Sequence[Expression]) -> Expression:
        """All of them, in order."""
        found = self.empty
        for part in reversed(parts):
            found = self.then(part, found)
        return found

    def either(self, parts: Iterable[Expression]) -> Expression:
        """One of them."""
        chosen, sets = dict[int, Expression](), 0
        for part in parts:
            for one in part.parts if part.kind == _EITHER else (part,):
                if one is self.anything:
                    return one
                if one.kind == _SET:
                    sets |= one.parts[0]
                elif one is not self.nothing:
                    chosen[one.number] = one
        if sets:
            one = self.one(sets)
            chosen[one.number] = one
        if any(one.empty for one in chosen.values() if one is not self.empty):
            chosen.pop(self.empty.number, None)
        if len(chosen) < 2:
            return next(iter(chosen.values()), self.nothing)
        ordered = tuple(chosen[number] for number in sorted(chosen))
        return self._made(_EITHER, ordered, empty=any(one.empty for one in ordered))

    def both(self, parts: Iterable[Expression]) -> Expression:
        """What all of them match."""
        chosen, sets = dict[int, Expression](), None
        for part in parts:
            for one in part.parts if part.kind == _BOTH else (part,):
                if one is self.nothing:
                    return one
                if one.kind == _SET:
                    sets = one.parts[0] if sets is None else sets & one.parts[0]
                elif one is not self.anything:
                    chosen[one.number] = one
        if sets is not None:
            one = self.one(sets)
            if one is self.nothing:
                return one
            chosen[one.number] = one
        if self.empty.number in chosen:
            return self.empty if all(one.empty for one in chosen.values()) else self.nothing
        if len(chosen) < 2:
            return next(iter(chosen.values()), self.anything)
        ordered, self.plain = tuple(chosen[number] for number in sorted(chosen)), False
        return self._made(_BOTH, ordered, empty=all(one.empty for one in ordered))

    def without(self, part: Expression) -> Expression:
        """Whatever it does not match."""
        self.plain = False
        return part.parts[0] if part.kind == _NOT else self._made(_NOT, (part,), empty=not part.empty)

    def times(self, part: Expression, least: int, most: int | None) -> Expression:
        """It, repeated; `most` is None for any number of times."""
        if part.empty:
            least = 0
        if most is not None and most < least:
            return self.nothing
        if most == 0 or part is self.empty:
            return self.empty
        if part is self.nothing:
            return self.nothing if least else self.empty
        if (least, most) == (1, 1):
            return part
        return self._made(_TIMES, (part, least, most), empty=least == 0)

    def optional(self, part: Expression) -> Expression:
        """It, or nothing."""
        return self.either([part, self.empty])

    def classes(self, of: Expression) -> tuple[Set, ...]:
        """Sets that together are all symbols; those of one set have the same derivative."""
        if of._classes is None:
            of._classes = self._found_classes(of)
        return of._classes

    def _found_classes(self, of: Expression) -> tuple[Set, ...]:
        if of.kind == _SET:
            return tuple(filter(None, (of.parts[0], EVERY & ~of.parts[0])))
        if of.kind == _THEN:
            first, second = of.parts
            return _common(self.classes(first), self.classes(second)) if first.empty else self.classes(first)
        if of.kind in (_EITHER, _BOTH):
            found: tuple[Set, ...] = (EVERY,)
            for part in of.parts:
                found = _common(found, self.classes(part))
            return found
        return self.classes(of.parts[0]) if of.kind in (_NOT, _TIMES) else (EVERY,)

    def derivative(self, of: Expression, by: Set) -> Expression:
        """What may follow a symbol of this set, one of `classes(of)` or a part of one."""
        if of.kind == _SET:
            return self.empty if of.parts[0] & by else self.nothing
        if of.kind in (_NOTHING, _EMPTY):
            return self.nothing
        found = of._derivatives.get(by)
        if found is None:
            found = of._derivatives[by] = self._found_derivative(of, by)
        return found

    def _found_derivative(self, of: Expression, by: Set) -> Expression:
        if of.kind == _THEN:
            first, second = of.parts
            found = self.then(self.derivative(first, by), second)
            return self.either([found, self.derivative(second, by)]) if first.empty else found
        if of.kind == _EITHER:
            return self.either([self.derivative(part, by) for part in of.parts])
        if of.kind == _BOTH:
            return self.both([self.derivative(part, by) for part in of.parts])
        if of.kind == _NOT:
            return self.without(self.derivative(of.parts[0], by))
        part, least, most = of.parts
        rest = self.times(part, max(0, least - 1), None if most is None else most - 1)
        return self.then(self.derivative(part, by), rest)


def _common(one: tuple[Set, ...], other: tuple[Set, ...]) -> tuple[Set, ...]:
    """The sets that two partitions have in common."""
    if len(one) == 1:
        return other
    if len(other) == 1:
        return one
    return tuple(both for x in one for y in other if (both := x & y))
