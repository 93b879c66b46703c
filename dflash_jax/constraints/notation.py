"""How values are written: as JSON, or in what some families write in its place."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash_jax.constraints.characters import ALL, PLAIN, Characters, any_in_json, in_json, utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.files import Value

INDENT = 16  # most blanks at the beginning of a line; or
TABS = 4
# What names of properties are made of where they have no quotes.
_NAME = Characters([(ord(first), ord(last)) for first, last in ("az", "AZ", "09", "__", "--", "..", "$$")])


@dataclass(frozen=True)
class Layout:
    """How values are written.

    Attributes:
        compact: without any blanks; else one may follow each colon and comma.
        lines: whether a new line with some blanks may stand in their place, and inside of brackets.
        quote: what stands at both ends of a string. Other ones than JSON's have every character between them as it is,
            and names of properties have none, and come in alphabetical order.
    """

    compact: bool = False
    lines: bool = True
    quote: str = '"'


class Notation:
    """Parts of values as expressions.

    Attributes:
        line, comma, colon: what stands around values, blanks included.
        text: any string; `any_name` is that of a property.
        null: null.
    """

    def __init__(self, made: Expressions, layout: Layout):
        self._made, self._json = made, layout.quote == '"'
        self._quote = made.mark(layout.quote)
        text, optional = made.text, made.optional
        blank, self.line = made.empty if layout.compact else optional(text(b" ")), made.empty
        if layout.lines and not layout.compact:
            indent = made.either([made.times(text(b" "), 0, INDENT), made.times(text(b"\t"), 1, TABS)])
            self.line = optional(made.either([text(b" "), made.then(text(b"\n"), indent)]))
        self.comma = made.then(text(b","), self.line if layout.lines else blank)
        self.colon = made.then(text(b":"), blank)
        # A quote that is no token of its own must not stand inside.
        self._allowed = made.anything
        if layout.quote not in ('"', "", *made.special):
            self._allowed = made.without(made.sequence([made.anything, self._quote, made.anything]))
        self.text = self.quoted(made.times(self.any_character(), 0, None))
        self.any_name = self.text if self._json else made.times(self.in_name(made, ALL), 1, None)
        self.null = made.texts([b"null"] if self._json else [b"null", b"None"])

    def quoted(self, inside: Expression) -> Expression:
        """A string."""
        return self._made.sequence([self._quote, self._made.both([inside, self._allowed]), self._quote])

    def name(self, inside: Expression) -> Expression:
        """The name of a property."""
        return self.quoted(inside) if self._json else inside

    def any_character(self, *, escapes: bool = True) -> Expression:
        """A character of a string in whatever way it may be written; see `any_in_json`."""
        return any_in_json(self._made, escapes=escapes) if self._json else utf8(self._made, ALL)

    def in_text(self, made: Expressions, of: Characters) -> Expression:
        """One character of a set inside of a string."""
        return in_json(made, of) if self._json else utf8(made, of)

    def in_name(self, made: Expressions, of: Characters) -> Expression:
        """One character of a set inside of the name of a property, without escapes."""
        return utf8(made, of & (PLAIN if self._json else _NAME))

    def literals(self, values: Iterable[Value]) -> Expression:
        """One of these numbers, strings, truth values or null."""
        made = self._made
        if self._json:
            return made.texts(map(_literal, values))
        strings, others = [], []
        for value in values:
            (strings if isinstance(value, str) else others).append(value)
        found = [made.texts(map(_literal, (value for value in others if value is not None)))]
        if None in others:
            found.append(self.null)
        if strings:
            found.append(self.quoted(made.texts(value.encode() for value in strings)))
        return made.either(found)

    def property(self, name: str) -> Expression:
        """The name of a property that is known."""
        if self._json:
            return self._made.text(_literal(name))
        if not all(any(low <= ord(letter) <= high for low, high in _NAME.ranges) for letter in name) or not name:
            raise ConstraintError(
                "unsupported_schema", f"this model's tool calls cannot name a property {name!r:.60}; rename it"
            )
        return self._made.text(name.encode())

    def properties(self, names: Iterable[str]) -> Expression:
        """The name of one of these properties."""
        return self._made.either(map(self.property, names))

    def ordered(self, properties: Mapping[str, Value]) -> Sequence[tuple[str, Value]]:
        """Properties in the order in which they are written."""
        pairs = list(properties.items())
        return pairs if self._json else sorted(pairs, key=lambda pair: pair[0].lower())


def _literal(value: Value) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
