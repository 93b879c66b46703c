"""JSON Schema as an expression: what a schema allows, written with its properties in their order.

All that is matched satisfies the schema. Not all that satisfies it is matched: properties come in the order of the
schema, recursion ends at a depth, and an object has no properties that its schema does not name unless it says so
(`additionalProperties`). A keyword that cannot be enforced is refused, with a pointer to where it stands.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dflash_jax.constraints.alternatives import disjoint, is_one_of, same
from dflash_jax.constraints.automaton import Automaton, Budget, automaton
from dflash_jax.constraints.characters import ALL, utf8
from dflash_jax.constraints.conjunction import NESTED, conjunction
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.formats import ANY, FORMATS
from dflash_jax.constraints.keywords import OF_TYPE, SAYS_NOTHING, check, pointer
from dflash_jax.constraints.notation import Layout, Notation
from dflash_jax.constraints.numbers import Numbers
from dflash_jax.constraints.patterns import regex
from dflash_jax.files import Fields, Value

DEPTH = 5  # of recursion, and of a value of which nothing is said;
INNER = 3  # of such a value inside of others
MOST_LEVELS = 64  # of a schema
ESCAPES = 8  # most characters of a bounded string that may be written as \\uXXXX; longer ones take too many states


def json_schema(
    made: Expressions, schema: Value, layout: Layout | None = None, budget: Budget | None = None
) -> Expression:
    """The texts of JSON that a schema allows.

    Raises:
        ConstraintError: it is no schema, or has what cannot be enforced.
    """
    return _Compiler(made, schema, layout or Layout(), budget or Budget()).schema(schema, "", ())


class _Compiler:
    def __init__(self, made: Expressions, root: Value, layout: Layout, budget: Budget):
        self._made, self._root, self._budget = made, root, budget
        self._numbers, self._patterns = Numbers(made), dict[str, Automaton]()
        self._done: dict[tuple, Expression] = {}
        self._notation = notation = Notation(made, layout)
        self._line, self._comma, self._colon, self._text = notation.line, notation.comma, notation.colon, notation.text

    def schema(self, schema: Value, at: str, inside: tuple[str, ...]) -> Expression:
        """What a schema allows.

        Args:
            at: JSON pointer to it.
            inside: the references that led to it.
        """
        self._budget.check()
        if schema is True or schema == {}:
            return self._any(INNER if at else DEPTH)
        if schema is False:
            return self._made.nothing
        if not isinstance(schema, Mapping):
            self._invalid(at, f"a schema must be an object or a truth value, got {schema!r:.60}")
        if at.count("/") > 4 * MOST_LEVELS:
            raise ConstraintError(
                "constraint_too_large", f"a schema may be nested at most {MOST_LEVELS} levels deep: {at:.200}"
            )
        key = json.dumps(schema), frozenset(Counter(inside).items())
        if key not in self._done:
            self._done[key] = self._schema(schema, at, inside)
        return self._done[key]

    def _schema(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        check(schema, at)
        nested = next((name for name in NESTED if name in schema), None)
        if nested is not None:
            return self._nested(nested, schema, at, inside)
        made, parts = self._made, list[Expression]()
        for name in ("enum", "const"):
            if name in schema:
                parts.append(self._values(schema[name] if name == "enum" else [schema[name]], f"{at}/{name}"))
        said = any(name in schema for names in OF_TYPE.values() for name in names)
        if "type" in schema or said or not parts:
            kinds = schema.get("type", [name for name, words in OF_TYPE.items() if any(w in schema for w in words)])
            kinds = [kinds] if isinstance(kinds, str) else kinds
            if not said and parts:  # of an enumeration
                parts[:] = [self._values([v for v in self._listed(schema) if is_one_of(v, kinds)], at)]
            elif kinds:
                parts.append(made.either([getattr(self, f"_{kind}")(schema, at, inside) for kind in kinds]))
            elif "type" in schema:  # types that exclude each other
                return made.nothing
            else:
                parts.append(self._any(INNER if at else DEPTH))
        return made.both(parts)

    def _listed(self, schema: Fields) -> list[Value]:
        if "const" in schema:
            known = schema.get("enum", [schema["const"]])
            return [schema["const"]] if any(same(schema["const"], value) for value in known) else []
        return schema["enum"]

    def _nested(self, name: str, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        """A schema with alternatives, parts or a reference, each of which holds together with its neighbors."""
        rest = {key: value for key, value in schema.items() if key != name and key not in SAYS_NOTHING}
        place, value = f"{at}/{name}", schema[name]
        if name == "$ref":
            target, inside = self._resolved(value, place), (*inside, value)
            if len(inside) - len(set(inside)) > DEPTH:
                return self._made.nothing
            return self.schema(conjunction([target, rest]), f"{place}", inside)
        if name == "allOf":
            for part in value:  # references count, wherever they are resolved
                if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                    inside = (*inside, part["$ref"])
            if len(inside) - len(set(inside)) > DEPTH:
                return self._made.nothing
            resolved = [self._inlined(part, f"{place}/{i}") for i, part in enumerate(value)]
            whole = conjunction([rest, *resolved])
            left = whole.pop("allOf", []) if isinstance(whole, dict) else []
            parts = [self.schema(whole, at, inside)]
            if isinstance(whole, dict) and not whole and left:
                parts = []
            return self._made.both(
                [*parts, *(self.schema(part, f"{place}/{i}", inside) for i, part in enumerate(left))]
            )
        if name == "oneOf":
            self._check_disjoint([self._inlined(part, f"{place}/{i}") for i, part in enumerate(value)], place)
        found = [self.schema(conjunction([rest, part]), f"{place}/{i}", inside) for i, part in enumerate(value)]
        return self._made.either(found)

    def _inlined(self, part: Value, at: str) -> Value:
        """A part without a reference at its top."""
        for _ in range(MOST_LEVELS):
            if not isinstance(part, Mapping) or "$ref" not in part:
                return part
            rest = {key: value for key, value in part.items() if key != "$ref"}
            part = conjunction([self._resolved(part["$ref"], f"{at}/$ref"), rest])
        return self._invalid(at, "references lead to each other")

    def _resolved(self, reference: Value, at: str) -> Value:
        if not isinstance(reference, str) or not reference.startswith("#"):
            self._unsupported(at, f"a reference must point into the schema itself (#/...), got {reference!r:.80}")
        found = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and name.isascii() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                self._invalid(at, f"{reference:.80} points to nothing")
        return found

    def _check_disjoint(self, parts: Sequence[Value], at: str) -> None:
        """Raises ConstraintError where two alternatives of a `oneOf` may hold together."""
        for i, one in enumerate(parts):
            for other in parts[:i]:
                if not disjoint(one, other):
                    self._unsupported(
                        at,
                        "the alternatives must exclude each other, by their types or by a required property with "
                        "different constants; say anyOf if several may hold",
                    )

    # ----------------------------------------------------------------------------------------------
    # Values of each type

    def _any(self, depth: int) -> Expression:
        """Any value, of objects and lists nested so many levels deep."""
        key = "any", depth
        if key not in self._done:
            made, text = self._made, self._made.text
            words = made.texts([b"true", b"false"])
            found = [words, self._notation.null, self._numbers.number(), self._text]
            if depth:
                value = self._any(depth - 1)
                pair = made.sequence([self._notation.any_name, self._colon, value])
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
        return self._notation.null

    def _values(self, values: Sequence[Value], at: str) -> Expression:
        """One of these values."""
        plain = [value for value in values if not isinstance(value, list | Mapping)]
        found = [self._notation.literals(plain)]
        for i, value in enumerate(values):
            if isinstance(value, list | Mapping):
                found.append(self.schema(_constant(value), f"{at}/{i}", ()))
        return self._made.either(found)

    def _integer(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._numbers.of_schema(schema, at, whole=True)

    def _number(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._numbers.of_schema(schema, at, whole=False)

    def _string(self, schema: Fields, at: str, inside: tuple[str, ...]) -> Expression:
        return self._string_of(schema, at)

    def _string_of(self, schema: Fields, at: str, *, key: bool = False) -> Expression:
        """Strings of a schema, or names of properties, which are written without escapes."""
        made, notation = self._made, self._notation
        encode = notation.in_name if key else notation.in_text
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        parts = list[Expression]()
        if "pattern" in schema:
            parts.append(regex(made, schema["pattern"], encode, search=True))
        if "format" in schema and schema["format"] not in ANY:
            if schema["format"] not in FORMATS:
                known = ", ".join(sorted({*FORMATS, *ANY}))
                self._unsupported(
                    f"{at}/format", f"{schema['format']!r:.60} is not among {known}; leave it out, or give a pattern"
                )
            parts.append(regex(made, FORMATS[schema["format"]], encode))
        if least or most is not None or not parts:
            free = not parts and (most or least) <= ESCAPES
            one = encode(made, ALL) if key or parts else notation.any_character(escapes=free)
            parts.append(made.times(one, least, most))
        return (notation.name if key else notation.quoted)(made.both(parts))

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
        named = [*properties, *schema.get("required", [])]
        required, more = list(dict.fromkeys(schema.get("required", []))), schema.get("additionalProperties")
        unnamed = True if more is None else more
        patterns, names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        if more is None:  # the schema of an object without any properties is about others
            more = not properties and not patterns and not required
        for name in required:
            matching = [value for pattern, value in patterns.items() if self._found(pattern, name)]
            properties.setdefault(name, conjunction(matching) if matching else unnamed)
        if names is not True and named:
            self._unsupported(f"{at}/propertyNames", "it is supported for objects without named properties only")
        for name in schema.get("properties", {}):
            if any(self._found(pattern, name) for pattern in patterns):
                self._unsupported(f"{at}/patternProperties", f"a pattern matches the property {name!r:.40}, too")
        if isinstance(names, Mapping):
            check(names, f"{at}/propertyNames")
            if names.get("type", "string") != "string":
                self._unsupported(f"{at}/propertyNames", "names are strings")
        if names is not True and (
            not isinstance(names, Mapping) or set(names) - {"type", *OF_TYPE["string"], *SAYS_NOTHING}
        ):
            self._unsupported(f"{at}/propertyNames", "only pattern, format and lengths are served")
        fewest, most = schema.get("minProperties", 0), schema.get("maxProperties")
        open = more is not False or bool(patterns)
        if (properties and (most is not None or fewest > len(required))) or (not properties and fewest > 1 and open):
            which = "minProperties" if most is None else "maxProperties"
            self._unsupported(f"{at}/{which}", "it is supported for objects without named properties only")
        extra = self._extra(properties, patterns, more, names, at, inside) if open else made.nothing
        if not properties:
            if extra is made.nothing or most == 0:
                return made.nothing if fewest else made.text(b"{}")
            return made.sequence([made.text(b"{"), self._several(extra, fewest, most), made.text(b"}")])
        # What may follow, the last one first: at the beginning of the object, and after another property.
        end = made.times(made.then(self._comma, extra), 0, None)
        after, begin = end, self._several_inside(extra)
        for name, value in reversed(self._notation.ordered(properties)):
            value = self.schema(value, f"{at}/properties/{pointer(name)}", inside)
            pair = made.sequence([self._notation.property(name), self._colon, value])
            first, next = made.then(pair, after), made.sequence([self._comma, pair, after])
            after, begin = (
                (next, first) if name in required else (made.either([next, after]), made.either([first, begin]))
            )
        if begin is made.empty:
            return made.text(b"{}")
        some = made.sequence([self._line, begin, self._line])
        return made.sequence([made.text(b"{"), made.optional(some) if begin.empty else some, made.text(b"}")])

    def _several_inside(self, one: Expression) -> Expression:
        made = self._made
        return made.optional(made.then(one, made.times(made.then(self._comma, one), 0, None)))

    def _extra(
        self, properties: Fields, patterns: Fields, more: Value, names: Value, at: str, inside: tuple[str, ...]
    ) -> Expression:
        """A property that the schema does not name; its name is written without escapes."""
        made = self._made
        known = self._notation.properties(properties)
        allowed = [self._string_of(names if isinstance(names, Mapping) else {}, at, key=True), made.without(known)]
        found, other = list[Expression](), list[Expression]()
        matching = {pattern: self._string_of({"pattern": pattern}, at, key=True) for pattern in patterns}
        for pattern, value in patterns.items():
            elsewhere = [made.without(of) for name, of in matching.items() if name != pattern]
            name = made.both([*allowed, matching[pattern], *elsewhere])  # one that two patterns match is not offered
            value = self.schema(value, f"{at}/patternProperties/{pointer(pattern)}", inside)
            found.append(made.sequence([name, self._colon, value]))
            other.append(made.without(matching[pattern]))
        if more is not False:
            value = self.schema(more, f"{at}/additionalProperties", inside)
            found.append(made.sequence([made.both([*allowed, *other]), self._colon, value]))
        return made.either(found)

    def _found(self, pattern: str, name: str) -> bool:
        """Whether a name matches a pattern."""
        if pattern not in self._patterns:
            made = Expressions()
            self._patterns[pattern] = automaton(made, regex(made, pattern, utf8, search=True), self._budget)
        return self._patterns[pattern].matches(name.encode())

    # ----------------------------------------------------------------------------------------------
    # What is wrong

    def _invalid(self, at: str, why: str) -> NoReturn:
        raise ConstraintError("invalid_schema", f"schema at {at or '/'}: {why}")

    def _unsupported(self, at: str, why: str) -> NoReturn:
        raise ConstraintError("unsupported_schema", f"schema at {at or '/'}: {why}")


def _constant(value: Value) -> Value:
    """A schema that allows this value alone."""
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [*map(_constant, value)], "items": False, "minItems": len(value)}
    if isinstance(value, Mapping):
        properties = {name: _constant(one) for name, one in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    return {"const": value}
