"""Numbers of JSON within bounds, as expressions."""

from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext

from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.files import Fields


class Numbers:
    """Expressions of numbers, made in one `Expressions`."""

    def __init__(self, made: Expressions):
        self._made = made
        self._digit, self._point, self._minus = self._between(0, 9), made.text(b"."), made.text(b"-")
        self._digits = made.times(self._digit, 0, None)
        self._whole = made.either([made.text(b"0"), made.then(self._between(1, 9), self._digits)])

    def _between(self, low: int, high: int) -> Expression:
        return self._made.one(sum(1 << (0x30 + digit) for digit in range(low, high + 1)))

    def integer(self, least: int | None = None, most: int | None = None) -> Expression:
        """An integer within bounds, both of which are included; it is written without fraction and exponent."""
        made = self._made
        if least is None and most is None:
            return made.then(made.optional(self._minus), self._whole)
        above = made.either([made.text(b"0"), made.then(made.optional(self._minus), self._from(1))])
        found = [above]
        if least is not None:
            negative = made.then(self._minus, self._to(-least, 1)) if least < 0 else made.nothing
            found.append(made.either([self._from(max(least, 0)), negative]))
        if most is not None:
            negative = made.then(self._minus, self._from(max(1, -most)))
            found.append(made.either([negative, self._to(most) if most >= 0 else made.nothing]))
        return made.both(found)

    def of_schema(self, schema: Fields, at: str, *, whole: bool) -> Expression:
        """The numbers, or the integers (`whole`), of a schema that stands at a JSON pointer; raises ConstraintError."""
        with localcontext(prec=2000, Emax=MAX_EMAX, Emin=MIN_EMIN):
            return self._of_schema(schema, at, whole=whole)

    def _of_schema(self, schema: Fields, at: str, *, whole: bool) -> Expression:
        least, most, above, below = _bounds(schema)
        step = Decimal(str(schema["multipleOf"])) if "multipleOf" in schema else None
        if whole or (step is not None and step % 1 == 0):
            if least is not None:
                least = int(least.to_integral_value("ROUND_CEILING")) if least % 1 else int(least) + above
            if most is not None:
                most = int(most.to_integral_value("ROUND_FLOOR")) if most % 1 else int(most) - below
            if step is not None and step % 1 and 1 % step:
                raise _unsupported(at, f"{step} is supported for numbers, or integers that divide 1000")
            found = self.integer(least, most)
            return found if step is None or 1 % step == 0 else self._made.both([found, self._multiple(step, at)])
        places = None
        if step is not None:
            exponent = step.normalize().as_tuple()
            if exponent.digits != (1,):
                raise _unsupported(at, f"{step} is supported for integers, and for 0.1, 0.01 and so on")
            places = -int(exponent.exponent)
        if least is None and most is None and places is None:
            return self.number()
        if above or below:  # more digits might be read as the bound itself
            size = max(len(str(int(abs(x)))) for x in (least, most) if x is not None)
            places = min(max(0, 15 - size), 15 if places is None else places)
        return self.decimal(least, most, above=above, below=below, places=places)

    def _multiple(self, step: Decimal, at: str) -> Expression:
        """Multiples of a step, by their last digits."""
        made = self._made
        size = next((size for size in (1, 2, 3) if 10**size % step == 0), None)
        if size is None:
            raise _unsupported(at, f"{step} is supported for steps that divide 1000")
        last = [f"{value:0{size}}" for value in range(0, 10**size, int(step))]
        ending = made.then(self._digits, made.texts(x.encode() for x in last))
        short = made.texts(str(int(x)).encode() for x in last)
        return made.then(made.optional(self._minus), made.either([ending, short]))

    def number(self) -> Expression:
        """Any number."""
        made = self._made
        fraction = made.sequence([self._point, self._digit, self._digits])
        sign = made.optional(made.one((1 << 0x2B) | (1 << 0x2D)))
        exponent = made.sequence([made.one((1 << 0x45) | (1 << 0x65)), sign, self._digit, self._digits])
        parts = [made.optional(self._minus), self._whole, made.optional(fraction), made.optional(exponent)]
        return made.sequence(parts)

    def decimal(
        self,
        least: Decimal | None = None,
        most: Decimal | None = None,
        *,
        above: bool = False,
        below: bool = False,
        places: int | None = None,
    ) -> Expression:
        """A number within bounds, written without exponent.

        Args:
            above, below: whether the bounds themselves are excluded.
            places: most digits of its fraction; None is any.
        """
        made = self._made
        fraction = made.then(self._point, made.times(self._digit, 1, places))
        plain = made.then(self._whole, made.empty if places == 0 else made.optional(fraction))
        found = [made.then(made.optional(self._minus), plain)]
        if least is not None:
            if least < 0:
                found.append(made.either([plain, made.then(self._minus, self._smaller(-least, above))]))
            else:
                found.append(self._larger(least, above))
        if most is not None:
            if most < 0 or (most == 0 and below):
                found.append(made.then(self._minus, self._larger(-most, below)))
            else:
                found.append(made.either([made.then(self._minus, plain), self._smaller(most, below)]))
        return made.both(found)

    def _from(self, low: int) -> Expression:
        """Whole numbers from `low` on, which is not negative."""
        size = len(str(low))
        longer = self._made.then(self._between(1, 9), self._made.times(self._digit, size, None))
        return self._made.either([self._of_length(str(low), "9" * size), longer])

    def _to(self, high: int, low: int = 0) -> Expression:
        """Whole numbers from `low`, 0 or 1, to `high`."""
        found = list[Expression]()
        for size in range(1, len(str(high)) + 1):
            first = str(max(low, 10 ** (size - 1) if size > 1 else 0))
            last = min(high, 10**size - 1)
            if int(first) <= last:
                found.append(self._of_length(first, str(last)))
        return self._made.either(found)

    def _of_length(self, low: str, high: str) -> Expression:
        """Texts of as many digits between two others, both included."""
        made = self._made
        if not low:
            return made.empty
        free = lambda count: made.times(self._digit, count, count)
        if not low.strip("0") and not high.strip("9"):
            return free(len(low))
        if low[0] == high[0]:
            return made.then(made.text(low[:1].encode()), self._of_length(low[1:], high[1:]))
        first, last, rest = int(low[0]), int(high[0]), len(low) - 1
        found = [
            made.then(made.text(low[:1].encode()), self._of_length(low[1:], "9" * rest)),
            made.then(made.text(high[:1].encode()), self._of_length("0" * rest, high[1:])),
        ]
        if first + 1 < last:
            found.append(made.then(self._between(first + 1, last - 1), free(rest)))
        return made.either(found)

    def _larger(self, than: Decimal, strictly: bool) -> Expression:
        """What is at least as large as a number that is not negative."""
        made, (whole, part) = self._made, _split(than)
        nonzero = made.sequence([made.times(made.text(b"0"), 0, None), self._between(1, 9), self._digits])
        rest = nonzero if strictly else self._digits
        for digit in reversed(part):
            larger = made.then(self._between(digit + 1, 9), self._digits)
            rest = made.either([made.then(self._between(digit, digit), rest), larger])
        here = made.then(self._point, rest)
        if not part:
            some = nonzero if strictly else made.then(self._digit, self._digits)
            here = made.then(self._point, some)
            here = here if strictly else made.optional(here)
        any_fraction = made.optional(made.sequence([self._point, self._digit, self._digits]))
        return made.either(
            [made.then(made.text(str(whole).encode()), here), made.then(self._from(whole + 1), any_fraction)]
        )

    def _smaller(self, than: Decimal, strictly: bool) -> Expression:
        """What is at most as large as a number that is not negative, and is not negative itself."""
        made, (whole, part) = self._made, _split(than)
        rest = made.nothing if strictly else made.times(made.text(b"0"), 0, None)
        for place, digit in reversed(list(enumerate(part))):
            smaller = made.then(self._between(0, digit - 1), self._digits)
            rest = made.either(
                [made.then(self._between(digit, digit), rest), smaller, made.empty if place else made.nothing]
            )
        if part:
            here = made.optional(made.then(self._point, rest))
        else:
            zeros = made.then(self._point, made.times(made.text(b"0"), 1, None))
            here = made.nothing if strictly else made.optional(zeros)
        found = [made.then(made.text(str(whole).encode()), here)]
        if whole:
            any_fraction = made.optional(made.sequence([self._point, self._digit, self._digits]))
            found.append(made.then(self._to(whole - 1), any_fraction))
        return made.either(found)


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


def _unsupported(at: str, why: str) -> ConstraintError:
    return ConstraintError("unsupported_schema", f"schema at {at}/multipleOf: {why}")


def _split(number: Decimal) -> tuple[int, list[int]]:
    """The whole part, and the digits after the point without zeros at the end."""
    text = format(number, "f")
    whole, _, part = text.partition(".")
    return int(whole), [int(digit) for digit in part.rstrip("0")]
