"""Regular expressions as text, read into `expressions`.

Python's syntax with ASCII classes: alternation, classes, groups, quantifiers, `.`, anchors at the beginning and the
end, and look-ahead outside groups. What no automaton of bounded size can do, or what engines understand differently, is
refused by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dflash_jax.constraints.characters import ALL, LAST, Characters
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions

LONGEST = 2**14  # characters of an expression
MOST_LEVELS = 100  # of groups
MOST_TIMES = 2**14  # in a quantifier

_DIGITS = Characters([(0x30, 0x39)])
_WORD = Characters([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = Characters([(9, 13), (0x20, 0x20)])
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): of.others() for name, of in _CLASSES.items()}
_BLANKS = Characters([(0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)])
_BLANKS |= Characters([(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
_DOT = Characters([(10, 10)]).others()
_CONTROL = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7, "0": 0}
_BEGIN, _END = "^", "$"

Encode = Callable[[Expressions, Characters], Expression]  # one character of a set


@dataclass(frozen=True)
class _Times:
    part: "_Part"
    least: int
    most: int | None


@dataclass(frozen=True)
class _Group:
    """Sequences, one of which is taken."""

    branches: "tuple[tuple[_Part, ...], ...]"


@dataclass(frozen=True)
class _Ahead:
    """What must follow, or must not."""

    group: _Group
    negative: bool


_Part = Characters | _Times | _Group | _Ahead | str  # a string is an anchor


def regex(made: Expressions, text: str, encode: Encode, *, search: bool = False) -> Expression:
    """What a regular expression matches as a whole.

    Args:
        encode: how a character is written.
        search: whether it may match anywhere, as a schema's `pattern` does.

    Raises:
        ConstraintError: it is none, or has what is not served.
    """
    if len(text) > LONGEST:
        raise ConstraintError(
            "constraint_too_large", f"a regular expression may have at most {LONGEST} characters, got {len(text)}"
        )
    group = _Reader(text, search=search).read()
    around = made.times(encode(made, ALL), 0, None) if search else made.empty

    def written(part: _Part) -> Expression:
        if isinstance(part, Characters):
            return encode(made, part)
        if isinstance(part, _Times):
            return made.times(written(part.part), part.least, part.most)
        if isinstance(part, _Group):
            return made.either([made.sequence([written(p) for p in branch]) for branch in part.branches])
        where = "outside groups" if isinstance(part, _Ahead) else "at the beginning and the end of the whole expression"
        what = "look-ahead" if isinstance(part, _Ahead) else part
        raise ConstraintError("invalid_regex", f"{what} is supported {where} only: {text!r:.80}")

    def following(parts: Sequence[_Part], after: Expression, *, begins: bool) -> Expression:
        """A sequence up to the end of the text; `begins` says whether it stands at the beginning."""
        at = next((i for i, part in enumerate(parts) if isinstance(part, _Ahead)), None)
        if at is None:
            return made.sequence([*map(written, parts), after])
        ahead, begins = parts[at], begins and at == 0
        assert isinstance(ahead, _Ahead)
        # Python's $ also matches before a last new line, that of schemas does not: what is excluded counts it.
        end = made.optional(encode(made, _single(10))) if ahead.negative else made.empty
        seen = made.either([looked_at(list(branch), end, begins=begins) for branch in ahead.group.branches])
        rest = following(parts[at + 1 :], after, begins=begins)
        both = made.both([made.without(seen) if ahead.negative else seen, rest])
        return made.sequence([*map(written, parts[:at]), both])

    def looked_at(parts: list[_Part], end: Expression, *, begins: bool) -> Expression:
        """What look-ahead matches, and anything after it."""
        while begins and parts and parts[0] == _BEGIN:
            parts.pop(0)
        ends = bool(parts) and parts[-1] == _END
        return made.sequence([*map(written, parts[:-1] if ends else parts), end if ends else made.anything])

    def whole(group: _Group) -> Expression:
        found = list[Expression]()
        for branch in group.branches:
            parts, before, after = list(branch), around, around
            if len(parts) == 1 and isinstance(parts[0], _Group):  # in parentheses that hold everything
                found.append(whole(parts[0]))
                continue
            while parts and parts[0] == _BEGIN:
                before = made.empty
                parts.pop(0)
            while parts and parts[-1] == _END:
                after = made.empty
                parts.pop()
            if len(parts) == 1 and isinstance(parts[0], _Group) and not search:
                found.append(whole(parts[0]))
                continue
            found.append(made.then(before, following(parts, after, begins=before is made.empty)))
        return made.either(found)

    return whole(group)


class _Reader:
    def __init__(self, text: str, *, search: bool):
        self._text, self._at, self._level, self._search = text, 0, 0, search
        self._excluded = False  # whether what is read says what must not be there

    def read(self) -> _Group:
        group = self._group()
        if self._at < len(self._text):
            self._refuse("an unmatched )")
        return group

    def _refuse(self, what: str) -> NoReturn:
        raise ConstraintError(
            "invalid_regex", f"{what} at character {self._at} of the regular expression {self._text!r:.120}"
        )

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _group(self) -> _Group:
        self._level += 1
        if self._level > MOST_LEVELS:
            self._refuse(f"groups may be nested {MOST_LEVELS} levels deep, this is one more")
        branches, parts = list[tuple[_Part, ...]](), list[_Part]()
        while self._next() and self._next() != ")":
            if self._take("|"):
                branches.append(tuple(parts))
                parts = []
            else:
                parts.append(self._times())
        self._level -= 1
        return _Group((*branches, tuple(parts)))

    def _times(self) -> _Part:
        part = self._part()
        while True:
            begin = self._at
            if self._take("*"):
                least, most = 0, None
            elif self._take("+"):
                least, most = 1, None
            elif self._take("?"):
                least, most = 0, 1
            elif (counts := self._counts()) is not None:
                least, most = counts
            else:
                return part
            if isinstance(part, str | _Ahead) or (
                isinstance(part, _Times) and self._at > begin and part is not self._whole
            ):
                self._at = begin
                self._refuse("nothing to repeat")
            if self._next() == "+":
                self._refuse("possessive quantifiers are not supported")
            self._take("?")  # a lazy one matches the same texts
            part = self._whole = _Times(part, least, most)
            if self._next() in ("*", "+", "?") or self._counts(peek=True) is not None:
                self._refuse("multiple repeat")

    _whole: _Part | None = None

    def _counts(self, *, peek: bool = False) -> tuple[int, int | None] | None:
        """A quantifier in braces; braces of another kind are characters."""
        begin = self._at
        end = self._text.find("}", begin)
        inside = self._text[begin + 1 : end].split(",") if self._next() == "{" and end > 0 else []
        plain = all((part.isascii() and part.isdigit() and len(part) < 10) or not part for part in inside)
        if not plain or len(inside) not in (1, 2) or inside == [""]:
            return None
        if peek:
            return 0, 0
        least = int(inside[0] or 0)
        most = least if len(inside) == 1 else int(inside[1]) if inside[1] else None
        if most is not None and most < least:
            self._refuse("the most times are fewer than the least")
        if max(least, most or 0) > MOST_TIMES:
            raise ConstraintError(
                "constraint_too_large", f"a quantifier may ask for at most {MOST_TIMES} times, got {inside}"
            )
        self._at = end + 1
        return least, most

    def _part(self) -> _Part:
        if self._take("("):
            return self._parentheses()
        if self._take("["):
            return self._set()
        if self._take("."):
            return _DOT
        if self._next() in ("^", "$"):
            self._at += 1
            return self._text[self._at - 1]
        if self._next() in ("*", "+", "?"):
            self._refuse("nothing to repeat")
        if self._take("\\"):
            return self._escaped()
        self._at += 1
        return _single(ord(self._text[self._at - 1]))

    def _parentheses(self) -> _Group | _Ahead:
        negative = self._take("?!")
        if negative or self._take("?="):
            self._excluded ^= negative
            ahead = _Ahead(self._inside(), negative)
            self._excluded ^= negative
            return ahead
        if self._take("?"):
            if self._take("P<") or (self._text[self._at : self._at + 2] not in ("<=", "<!") and self._take("<")):
                name, closed, _ = self._text[self._at :].partition(">")
                if not closed or not name.isidentifier():
                    self._refuse("the name of a group must be an identifier")
                self._at += len(name) + 1
            elif not self._take(":"):
                self._refuse("look-behind, flags and back-references are not supported")
        return self._inside()

    def _inside(self) -> _Group:
        """A group, and the parenthesis after it."""
        group = self._group()
        if not self._take(")"):
            self._refuse("a missing )")
        return group

    def _escaped(self, *, in_set: bool = False) -> Characters:
        letter = self._next()
        if not letter:
            self._refuse("a backslash with nothing after it")
        self._at += 1
        if letter in _CLASSES:
            found = _CLASSES[letter]
            if self._search and letter in "sS":
                # Validators of schemas take all blanks of Unicode for blanks: they are neither, or both if excluded.
                found = found | _BLANKS if self._excluded else found & _BLANKS.others()
            return found
        if letter == "b" and in_set:
            return _single(8)
        if letter in ("x", "u", "U"):
            digits = self._text[self._at : self._at + {"x": 2, "u": 4, "U": 8}[letter]]
            if len(digits) < {"x": 2, "u": 4, "U": 8}[letter] or not all(d in "0123456789abcdefABCDEF" for d in digits):
                self._refuse(f"\\{letter} needs its hexadecimal digits")
            self._at += len(digits)
            code = int(digits, 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                self._refuse("no character has this code")
            return _single(code)
        if letter in _CONTROL and not (letter == "0" and self._next().isdigit()):
            return _single(_CONTROL[letter])
        if letter.isalnum() and letter.isascii():
            self._at -= 1
            self._refuse(f"\\{letter} is not supported")
        return _single(ord(letter))

    def _set(self) -> Characters:
        begin, inverted, found, first = self._at, self._take("^"), Characters(()), True
        self._excluded ^= inverted
        while first or self._next() != "]":
            if not self._next():
                self._at = begin
                self._refuse("a missing ]")
            low, first = self._member(), False
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                ends = [
                    of.ranges[0] for of in (low, high) if len(of.ranges) == 1 and of.ranges[0][0] == of.ranges[0][1]
                ]
                if len(ends) < 2 or ends[0] > ends[1]:
                    self._refuse("a bad range of characters")
                low = Characters([(ends[0][0], ends[1][0])])
            found |= low
        self._at += 1
        self._excluded ^= inverted
        return found.others() if inverted else found

    def _member(self) -> Characters:
        if self._take("\\"):
            return self._escaped(in_set=True)
        self._at += 1
        return _single(ord(self._text[self._at - 1]))


def _single(code: int) -> Characters:
    if 0xD800 <= code <= 0xDFFF:
        raise ConstraintError("invalid_regex", "a regular expression may have no lone surrogate")
    return Characters([(code, code)])
