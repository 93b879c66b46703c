"""JSON Schema as an expression: what a schema allows, written with its properties in their order.

All that is matched satisfies the schema. Not all that satisfies it is matched: properties come in the order of the
schema, recursion ends at a depth, and an object has no properties that its schema does not name unless it says so
(`additionalProperties`). A keyword that cannot be enforced is refused, with a pointer to where it stands.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, NoReturn

from dflash_jax.constraints.automaton import Budget, automaton
from dflash_jax.constraints.characters import ALL, PLAIN, Characters, any_in_json, in_json, utf8
from dflash_jax.constraints.conjunction import NESTED, conjunction
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.formats import FORMATS
from dflash_jax.constraints.numbers import Numbers
from dflash_jax.constraints.regex import regex
from dflash_jax.files import Fields

DEPTH = 5  # of recursion, and of values of which nothing is said
MOST_LEVELS = 64  # of a schema
ESCAPES = 64  # most characters of a bounded string that may be written as \\uXXXX; longer ones take too many states
INDENT = 16  # most blanks at the beginning of a line; or
TABS = 4

_SAYS_NOTHING = frozenset(
    """
    title description default examples example $schema $id id $comment $defs definitions deprecated readOnly writeOnly
    $anchor discriminator contentEncoding contentMediaType
    """.split()
)
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties".split()
    ),
    "array": "items prefixItems minItems maxItems uniqueItems".split(),
    "string": "minLength maxLength pattern format".split(),
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split(),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_KNOWN = {*_SAYS_NOTHING, *NESTED, "type", "enum", "const", *(name for names in _OF_TYPE.values() for name in names)}
_REFUSED = frozenset(
    """
    not if then else contains minContains maxContains unevaluatedProperties unevaluatedItems dependentRequired
    dependentSchemas dependencies nullable $dynamicRef $dynamicAnchor $recursiveRef additionalItems contentSchema
    """.split()
)


@dataclass(frozen=True)
class Layout:
    """How JSON is written.

    Attributes:
        compact: without any blanks; else one may follow each colon and comma, or a new line with some blanks.
    """

    compact: bool = False


def json_schema(made: Expressions, schema: Any, layout: Layout | None = None, budget: Budget | None = None) -> Expression:
    """The texts of JSON that a schema allows.

    Raises:
        ConstraintError: it is no schema, or has what cannot be enforced.
    """
    return _Compiler(made, schema, layout or Layout(), budget or Budget()).schema(schema, "", ())


def json_object(made: Expressions, layout: Layout | None = None) -> Expression:
    """Any object."""
    return json_schema(made, {"type": "object", "additionalProperties": True}, layout)


def literal(value: Any) -> bytes:
    """A number, a string, a truth value or null as it is written."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


class _Compiler:
    def __init__(self, made: Expressions, root: Any, layout: Layout, budget: Budget):
        self._made, self._root, self._budget = made, root, budget
        self._numbers = Numbers(made)
        self._done: dict[tuple, Expression] = {}
        text, optional = made.text, made.optional
        self._blank = self._line = made.empty
        if not layout.compact:
            indent = made.either([made.times(text(b" "), 0, INDENT), made.times(text(b"\t"), 1, TABS)])
            self._blank = optional(text(b" "))
            self._line = optional(made.either([text(b" "), made.then(text(b"\n"), indent)]))
        self._comma = made.then(text(b","), self._line)
        self._colon = made.then(text(b":"), self._blank)
        self._text = self._quoted(made.times(any_in_json(made), 0, None))

    def schema(self, schema: Any, at: str, inside: tuple[str, ...]) -> Expression:
        """What a schema allows.

        Args:
            at: JSON pointer to it.
            inside: the references that led to it.
        """
        self._budget.check()
        if schema is True or schema == {}:
            return self._any(DEPTH - 1 if at else DEPTH)
        if schema is False:
            return self._made.nothing
        if not isinstance(schema, Mapping):
            self._invalid(at, f"a schema must be an object or a truth value, got {schema!r:.60}")
        if at.count("/") > 4 * MOST_LEVELS:
            raise ConstraintError("constraint_too_large", f"a schema may be nested {MOST_LEVELS} levels deep: {at:.200}")
        key = json.dumps(schema), frozenset(Counter(inside).items())
        if key not in self._done:
            self._done[key] = self._schema(schema, at, inside)
        return self._done[key]

    def _schema(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        self._check(schema, at)
        nested = next((name for name in NESTED if name in schema), None)
        if nested is not None:
            return self._nested(nested, schema, at, inside)
        made, parts = self._made, list[Expression]()
        for name in ("enum", "const"):
            if name in schema:
                parts.append(self._values(schema[name] if name == "enum" else [schema[name]], f"{at}/{name}"))
        said = any(name in schema for names in _OF_TYPE.values() for name in names)
        if "type" in schema or said or not parts:
            kinds = schema.get("type", [name for name, words in _OF_TYPE.items() if any(w in schema for w in words)])
            kinds = [kinds] if isinstance(kinds, str) else kinds
            if not said and parts:  # of an enumeration
                parts[:] = [self._values([v for v in self._listed(schema) if _is_one_of(v, kinds)], at)]
            elif kinds:
                parts.append(made.either([getattr(self, f"_{kind}")(schema, at, inside) for kind in kinds]))
            elif "type" in schema:  # types that exclude each other
                return made.nothing
            else:
                parts.append(self._any(DEPTH - 1))
        return made.both(parts)

    def _listed(self, schema: Fields) -> list[Any]:
        if "const" in schema:
            return [schema["const"]] if schema["const"] in schema.get("enum", [schema["const"]]) else []
        return schema["enum"]

    def _nested(self, name: str, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        """A schema with alternatives, parts or a reference, each of which holds together with its neighbours."""
        rest = {key: value for key, value in schema.items() if key != name and key not in _SAYS_NOTHING}
        place, value = f"{at}/{name}", schema[name]
        if name == "$ref":
            target, inside = self._resolved(value, place), (*inside, value)
            if len(inside) - len(set(inside)) > DEPTH:
                return self._made.nothing
            return self.schema(conjunction([target, rest]), f"{place}", inside)
        if name == "allOf":
            resolved = [self._inlined(part, f"{place}/{i}") for i, part in enumerate(value)]
            whole = conjunction([rest, *resolved])
            left = whole.pop("allOf", []) if isinstance(whole, dict) else []
            parts = [self.schema(whole, at, inside)]
            if isinstance(whole, dict) and not whole and left:
                parts = []
            return self._made.both([*parts, *(self.schema(part, f"{place}/{i}", inside) for i, part in enumerate(left))])
        if name == "oneOf":
            self._check_disjoint([self._inlined(part, f"{place}/{i}") for i, part in enumerate(value)], place)
        found = [self.schema(conjunction([rest, part]), f"{place}/{i}", inside) for i, part in enumerate(value)]
        return self._made.either(found)

    def _inlined(self, part: Any, at: str) -> Any:
        """A part without a reference at its top."""
        for _ in range(MOST_LEVELS):
            if not isinstance(part, Mapping) or "$ref" not in part:
                return part
            rest = {key: value for key, value in part.items() if key != "$ref"}
            part = conjunction([self._resolved(part["$ref"], f"{at}/$ref"), rest])
        self._invalid(at, "references lead to each other")

    def _resolved(self, reference: Any, at: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            self._unsupported(at, f"a reference must point into the schema itself (#/...), got {reference!r:.80}")
        found = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                self._invalid(at, f"{reference:.80} points to nothing")
        return found

    def _check_disjoint(self, parts: Sequence[Any], at: str) -> None:
        """Raises ConstraintError where two alternatives of a `oneOf` may hold together."""
        for i, one in enumerate(parts):
            for other in parts[:i]:
                if not _disjoint(one, other):
                    self._unsupported(
                        at, "the alternatives must exclude each other, by their types or by a required property with "
                        "different constants; say anyOf if several may hold"
                    )

    # ----------------------------------------------------------------------------------------------
    # Values of each type

    def _any(self, depth: int) -> Expression:
        """Any value, of objects and lists nested so many levels deep."""
        key = "any", depth
        if key not in self._done:
            made, text = self._made, self._made.text
            words = made.texts([b"true", b"false", b"null"])
            found = [words, self._numbers.number(), self._text]
            if depth:
                value = self._any(depth - 1)
                pair = made.sequence([self._text, self._colon, value])
                for begin, one, end in ((b"[", value, b"]"), (b"{", pair, b"}")):
                    found.append(made.sequence([text(begin), self._several(one, 0, None), text(end)]))
            self._done[key] = made.either(found)
        return self._done[key]

    def _several(self, one: Expression, least: int, most: int | None) -> Expression:
        """So many values with commas between them, and blanks around."""
        made = self._made
        more = made.times(made.then(self._comma, one), max(0, least - 1), None if most is None else most - 1)
        some = made.sequence([self._line, one, more, self._line])
        if most == 0:
            return made.empty
        return some if least else made.optional(some)

    def _boolean(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._made.texts([b"true", b"false"])

    def _null(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._made.text(b"null")

    def _values(self, values: Sequence[Any], at: str) -> Expression:
        """One of these values."""
        plain = [value for value in values if not isinstance(value, list | Mapping)]
        found = [self._made.texts(map(literal, plain))]
        for i, value in enumerate(values):
            if isinstance(value, list | Mapping):
                found.append(self.schema(_constant(value), f"{at}/{i}", ()))
        return self._made.either(found)

    def _integer(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        least, most, above, below = _bounds(schema)
        if least is not None:
            least = int(least.to_integral_value("ROUND_CEILING")) if least % 1 else int(least) + above
        if most is not None:
            most = int(most.to_integral_value("ROUND_FLOOR")) if most % 1 else int(most) - below
        found, step = self._numbers.integer(least, most), schema.get("multipleOf")
        if step is None:
            return found
        if Decimal(str(step)) % 1 == 0 and (last := _last_digits(int(step))) is not None:
            made, sign = self._made, self._made.optional(self._made.text(b"-"))
            digit = made.one(sum(1 << b for b in b"0123456789"))
            size = len(last[0])
            ending = made.then(made.times(digit, 0, None), made.texts(x.encode() for x in last))
            short = made.texts(str(int(x)).encode() for x in last if len(str(int(x))) < size)
            return made.both([found, made.then(sign, made.either([ending, short]))])
        if 1 % Decimal(str(step)) == 0:
            return found
        self._unsupported(f"{at}/multipleOf", f"{step} is served for steps that divide a power of ten")

    def _number(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        least, most, above, below = _bounds(schema)
        step, places = schema.get("multipleOf"), None
        if step is not None:
            if Decimal(str(step)) % 1 == 0:
                return self._integer(schema, at, inside)
            exponent = Decimal(str(step)).normalize().as_tuple()
            if exponent.digits != (1,):
                self._unsupported(f"{at}/multipleOf", f"{step} is served for integers, and for 0.1, 0.01 and so on")
            places = -int(exponent.exponent)
        if least is None and most is None and places is None:
            return self._numbers.number()
        return self._numbers.decimal(least, most, above=above, below=below, places=places)

    def _string(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._string_of(schema, at)

    def _string_of(self, schema: Fields, at: str, *, key: bool = False) -> Expression:
        """Strings of a schema, or names of properties, which are written without escapes."""
        made, encode = self._made, _unescaped if key else in_json
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        parts = list[Expression]()
        if "pattern" in schema:
            parts.append(regex(made, schema["pattern"], encode, search=True))
        if "format" in schema:
            if schema["format"] not in FORMATS:
                known = ", ".join(sorted(FORMATS))
                self._unsupported(f"{at}/format", f"{schema['format']!r:.60} is not among {known}; leave it out, or give a pattern")
            parts.append(regex(made, FORMATS[schema["format"]], encode))
        if least or most is not None or not parts:
            free = not parts and (most or least) <= ESCAPES
            one = _unescaped(made, ALL) if key else in_json(made, ALL) if parts else any_in_json(made, escapes=free)
            parts.append(made.times(one, least, most))
        return self._quoted(made.both(parts))

    def _quoted(self, inside: Expression) -> Expression:
        quote = self._made.text(b'"')
        return self._made.sequence([quote, inside, quote])

    def _array(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        made, first = self._made, schema.get("prefixItems", [])
        items, items_at = schema.get("items", True), f"{at}/items"
        if isinstance(items, list):  # before 2020-12
            first, items, items_at = items, True, items_at
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("uniqueItems") and (most is None or most > 1):
            self._unsupported(f"{at}/uniqueItems", "that all are different cannot be enforced; leave it out")
        if most is not None and least > most:
            return made.nothing
        closed = items is False or (most is not None and most <= len(first))
        value = made.nothing if closed else self.schema(items, items_at, inside)
        if not first:
            if value is made.nothing and not least:
                most = 0
            return made.sequence([made.text(b"["), self._several(value, least, most), made.text(b"]")])
        rest = made.nothing if value is made.nothing else made.then(self._comma, value)
        tail = made.times(rest, max(0, least - len(first)), None if most is None else max(0, most - len(first)))
        for i, part in reversed(list(enumerate(first))):
            if most is not None and i >= most:
                continue
            one = self.schema(part, f"{at}/prefixItems/{i}", inside)
            tail = made.sequence([self._comma if i else made.empty, one, tail])
            if i >= least:
                tail = made.optional(tail)
        some = made.sequence([self._line, tail, self._line])
        if tail.empty:
            some = made.optional(some)
        return made.sequence([made.text(b"["), some, made.text(b"]")])

    def _object(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        made, properties = self._made, dict(schema.get("properties", {}))
        required, more = schema.get("required", []), schema.get("additionalProperties")
        patterns, names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        if more is None:  # the schema of an object without any properties is about others
            more = not properties and not patterns and not required
        for name in required:
            matching = [value for pattern, value in patterns.items() if _found(pattern, name)]
            properties.setdefault(name, conjunction(matching) if matching else True if more is False else more)
        if names is not True and (not isinstance(names, Mapping) or set(names) - {"type", *_OF_TYPE["string"], *_SAYS_NOTHING}):
            self._unsupported(f"{at}/propertyNames", "only pattern, format and lengths are served")
        fewest, most = schema.get("minProperties", 0), schema.get("maxProperties")
        open = more is not False or bool(patterns)
        if properties and (most is not None or fewest > len(required)) or (not properties and fewest > 1 and open):
            which = "minProperties" if most is None else "maxProperties"
            self._unsupported(f"{at}/{which}", "it is served for objects whose properties have no names of their own")
        extra = self._extra(properties, patterns, more, names, at, inside) if open else made.nothing
        if not properties:
            if extra is made.nothing or most == 0:
                return made.nothing if fewest else made.text(b"{}")
            return made.sequence([made.text(b"{"), self._several(extra, fewest, most), made.text(b"}")])
        # What may follow, the last one first: at the beginning of the object, and after another property.
        end = made.times(made.then(self._comma, extra), 0, None)
        after, begin = end, self._several_inside(extra)
        for name, value in reversed(properties.items()):
            value = self.schema(value, f"{at}/properties/{_pointer(name)}", inside)
            pair = made.sequence([made.text(literal(name)), self._colon, value])
            first, next = made.then(pair, after), made.sequence([self._comma, pair, after])
            after, begin = (next, first) if name in required else (made.either([next, after]), made.either([first, begin]))
        if begin is made.empty:
            return made.text(b"{}")
        some = made.sequence([self._line, begin, self._line])
        return made.sequence([made.text(b"{"), made.optional(some) if begin.empty else some, made.text(b"}")])

    def _several_inside(self, one: Expression) -> Expression:
        made = self._made
        return made.optional(made.then(one, made.times(made.then(self._comma, one), 0, None)))

    def _extra(
        self, properties: Fields, patterns: Fields, more: Any, names: Any, at: str, inside: tuple[str, ...]
    ) -> Expression:
        """A property that the schema does not name; its name is written without escapes."""
        made = self._made
        known = made.texts([literal(name) for name in properties])
        allowed = [self._string_of(names if isinstance(names, Mapping) else {}, at, key=True), made.without(known)]
        found, other = list[Expression](), list[Expression]()
        matching = {pattern: self._string_of({"pattern": pattern}, at, key=True) for pattern in patterns}
        for pattern, value in patterns.items():
            elsewhere = [made.without(of) for name, of in matching.items() if name != pattern]
            name = made.both([*allowed, matching[pattern], *elsewhere])  # one that two patterns match is not offered
            value = self.schema(value, f"{at}/patternProperties/{_pointer(pattern)}", inside)
            found.append(made.sequence([name, self._colon, value]))
            other.append(made.without(matching[pattern]))
        if more is not False:
            value = self.schema(more, f"{at}/additionalProperties", inside)
            found.append(made.sequence([made.both([*allowed, *other]), self._colon, value]))
        return made.either(found)

    # ----------------------------------------------------------------------------------------------
    # What is wrong

    def _invalid(self, at: str, why: str) -> NoReturn:
        raise ConstraintError("invalid_schema", f"schema at {at or '/'}: {why}")

    def _unsupported(self, at: str, why: str) -> NoReturn:
        raise ConstraintError("unsupported_schema", f"schema at {at or '/'}: {why}")

    def _check(self, schema: Fields, at: str) -> None:
        """Raises ConstraintError for a keyword that is unknown, refused, or has a value of another kind."""
        for name, value in schema.items():
            if name in _REFUSED:
                self._unsupported(f"{at}/{_pointer(name)}", "the keyword cannot be enforced; leave it out")
            if name not in _KNOWN and not name.startswith("x-"):
                near = get_close_matches(name, _KNOWN, 1)
                hint = f"the nearest is {near[0]}" if near else "it is not ignored, since it might be meant to restrict"
                self._unsupported(f"{at}/{_pointer(name)}", f"unknown keyword; {hint}")
            if (wrong := _VALUES.get(name, lambda value: None)(value)) is not None:
                self._invalid(f"{at}/{_pointer(name)}", f"{wrong}, got {value!r:.60}")


def _unescaped(made: Expressions, of: Characters) -> Expression:
    return utf8(made, of & PLAIN)


def _pointer(name: str) -> str:
    """A part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _constant(value: Any) -> Any:
    """A schema that allows this value alone."""
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [*map(_constant, value)], "items": False, "minItems": len(value)}
    if isinstance(value, Mapping):
        properties = {name: _constant(one) for name, one in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    return {"const": value}


def _bounds(schema: Fields) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """The least and the most number, and whether each is excluded itself."""

    def tighter(names: tuple[str, str], pick: Callable) -> tuple[Decimal | None, bool]:
        given = [(Decimal(str(schema[name])), name == names[1]) for name in names if name in schema]
        if not given:
            return None, False
        value = pick(value for value, _ in given)
        return value, any(excluded for one, excluded in given if one == value)

    least, above = tighter(("minimum", "exclusiveMinimum"), max)
    most, below = tighter(("maximum", "exclusiveMaximum"), min)
    return least, most, above, below


def _last_digits(step: int) -> list[str] | None:
    """How multiples of a step end; None where that does not decide."""
    for size in (1, 2, 3):
        if 10**size % step == 0:
            return [f"{value:0{size}}" for value in range(0, 10**size, step)]
    return None


def _is_one_of(value: Any, kinds: Sequence[str]) -> bool:
    """Whether a value is of one of these types."""
    return any(kind in kinds for kind in _kinds(value))


def _kinds(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return "integer", "number"
    if isinstance(value, float):
        return ("integer", "number") if value.is_integer() else ("number",)
    if value is None:
        return ("null",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)


def _constants(schema: Any) -> list[Any] | None:
    """The values of an enumeration; None where a schema is none."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _disjoint(one: Any, other: Any) -> bool:
    """Whether it is plain that no value satisfies both schemas."""
    if False in (one, other):
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values = _constants(one), _constants(other)
    if None not in values:
        return not any(_same(x, y) for x in values[0] or () for y in values[1] or ())
    kinds = []
    for schema, constants in zip((one, other), values, strict=True):
        found = schema.get("type", None if constants is None else [k for value in constants for k in _kinds(value)])
        found = {found} if isinstance(found, str) else set(_TYPES) if found is None else set(found)
        kinds.append(found | ({"integer"} if "number" in found else set()))
    if not kinds[0] & kinds[1]:
        return True
    if kinds[0] | kinds[1] != {"object"}:
        return False
    required = set(one.get("required", ())) & set(other.get("required", ()))
    pairs = ([schema.get("properties", {}).get(name, True) for schema in (one, other)] for name in required)
    return any(None not in [_constants(x) for x in pair] and _disjoint(*pair) for pair in pairs)


def _same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 1 is 1.0, and neither is true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _found(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern."""
    made = Expressions()
    try:
        return automaton(made, regex(made, pattern, utf8, search=True)).matches(name.encode())
    except UnicodeEncodeError:
        return False


def _list_of(value: Any, one: Callable[[Any], bool], least: int = 0) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(one, value))


def _check_of(test: Callable[[Any], bool], what: str) -> Callable[[Any], str | None]:
    return lambda value: None if test(value) else f"it must be {what}"


_is_text = lambda value: isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
_is_size = lambda value: type(value) is int and 0 <= value < 2**31
_is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
_is_schema = lambda value: isinstance(value, Mapping | bool)
_of_schemas = lambda value: isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(_is_schema, value.values()))
_VALUES: dict[str, Callable[[Any], str | None]] = {
    "type": _check_of(
        lambda value: value in _TYPES if isinstance(value, str) else _list_of(value, lambda x: x in _TYPES, 0),
        f"among {', '.join(_TYPES)}, or a list of these",
    ),
    "enum": _check_of(lambda value: _list_of(value, _is_value, 0), "a list of values"),
    "const": _check_of(lambda value: _is_value(value), "a value"),
    "required": _check_of(lambda value: _list_of(value, _is_text), "a list of names"),
    "pattern": _check_of(_is_text, "a string"),
    "format": _check_of(_is_text, "a string"),
    "uniqueItems": _check_of(lambda value: isinstance(value, bool), "true or false"),
    "multipleOf": _check_of(lambda value: _is_number(value) and value > 0, "a number above 0"),
    "items": _check_of(lambda value: _is_schema(value) or _list_of(value, _is_schema), "a schema"),
}
_VALUES |= dict.fromkeys(("properties", "patternProperties"), _check_of(_of_schemas, "an object of schemas"))
_VALUES |= dict.fromkeys(("additionalProperties", "propertyNames"), _check_of(_is_schema, "a schema"))
_VALUES |= dict.fromkeys(("allOf", "anyOf", "oneOf"), _check_of(lambda v: _list_of(v, _is_schema, 1), "a list of schemas"))
_VALUES |= {"prefixItems": _check_of(lambda value: _list_of(value, _is_schema), "a list of schemas")}
_LENGTHS = "minLength maxLength minItems maxItems minProperties maxProperties".split()
_VALUES |= dict.fromkeys(_LENGTHS, _check_of(_is_size, "a number of things, 0 or more"))
_BOUNDS = "minimum maximum exclusiveMinimum exclusiveMaximum".split()
_VALUES |= dict.fromkeys(_BOUNDS, _check_of(_is_number, "a number"))


def _is_value(value: Any) -> bool:
    """Whether it is a value of JSON that can be written."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError):
        return False
    return True
