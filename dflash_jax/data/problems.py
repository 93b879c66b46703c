"""Problems with worked answers, made without limit: word problems, unit conversions, small algebra, lists.

The text the bundled pair speaks. A question belongs to the held-out split or not by a hash of its words, so no
seed can put a held-out question into training.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

HELD_OUT = 20  # one question in so many
NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Iris Jonas Kira Leo Maya Nico Olga Paul Rosa Sam Tara Victor"
).split()
THINGS = (
    "apples books coins stickers marbles pencils shells stamps cards flowers eggs cookies oranges buttons "
    "stones balloons candles lemons photos tickets"
).split()
HOLDERS = "box bag basket drawer shelf tray jar crate".split()
SHOPS = "shop market bakery stall bookstore kiosk".split()


class Problem(NamedTuple):
    """One question, its worked answer (which ends with `The answer is X.`), and X."""

    question: str
    working: str
    answer: str


Drawn = tuple[list[str], list[str], object]  # ways to ask, steps of the working, and the answer


def problems(seed: int, *, held_out: bool = False) -> Iterator[Problem]:
    """Problems of one split without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        questions, steps, answer = rng.choice(KINDS)(rng)
        question = rng.choice(questions)
        if is_held_out(question) == held_out:
            yield Problem(question, " ".join([*steps, f"The answer is {answer}."]), str(answer))


def is_held_out(question: str) -> bool:
    """Whether the question belongs to the held-out split."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT == 0


def is_correct(problem: Problem, text: str) -> bool:
    """Whether an answer in words ends with the right result."""
    found = re.findall(r"The answer is (.+?)\.(?:\s|$)", text)
    return bool(found) and found[-1] == problem.answer


def _plus(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


def _minus(a: int, b: int) -> str:
    return f"{a} - {b} = {a - b}"


def _times(a: int, b: int) -> str:
    """A product; of a two-digit factor by way of its tens and ones."""
    tens, ones = b // 10 * 10, b % 10
    if not ones or not tens:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"


# --------------------------------------------------------------------------------------------------
# Word problems


def _more_and_fewer(rng: random.Random) -> Drawn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(5, 30), rng.randint(2, 20)
    c = rng.randint(2, min(20, a + b - 2))
    verb, other = rng.choice(["finds", "buys", "gets", "collects"]), rng.choice(NAMES)
    questions = [
        f"{name} has {a} {thing}. {name} {verb} {b} more and then gives {c} to {other}. "
        f"How many {thing} does {name} have now?",
        f"There are {a} {thing} on the table. {name} {verb} {b} more {thing} and puts them there, then takes {c} "
        f"away. How many {thing} are on the table now?",
        f"In the morning {name} counts {a} {thing}. During the day {name} {verb} {b} more and loses {c}. "
        f"How many {thing} are left?",
    ]
    steps = [
        f"At first there are {a} {thing}.",
        f"After {b} more there are {_plus(a, b)} {thing}.",
        f"After {c} go away there are {_minus(a + b, c)} {thing}.",
    ]
    return questions, steps, a + b - c


def _boxes(rng: random.Random) -> Drawn:
    name, thing, holder = rng.choice(NAMES), rng.choice(THINGS), rng.choice(HOLDERS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    c = rng.randint(1, min(20, a * b - 1))
    plural = {"box": "boxes", "shelf": "shelves"}.get(holder, holder + "s")
    questions = [
        f"{name} has {a} {plural} with {b} {thing} in each {holder}. {name} sells {c} {thing}. How many are left?",
        f"Each {holder} holds {b} {thing}. {name} fills {a} {plural} and then takes {c} {thing} out. "
        f"How many {thing} remain in the {plural}?",
        f"A {rng.choice(SHOPS)} gets {a} {plural} of {b} {thing}. By noon {c} {thing} are sold. "
        f"How many {thing} are still there?",
    ]
    steps = [
        f"There are {a} {plural} with {b} {thing} each, which makes {_times(a, b)} {thing}.",
        f"After {c} go away there are {_minus(a * b, c)} {thing}.",
    ]
    return questions, steps, a * b - c


def _money(rng: random.Random) -> Drawn:
    name, thing, shop = rng.choice(NAMES), rng.choice(THINGS), rng.choice(SHOPS)
    a, price = rng.randint(2, 6), rng.randint(2, 8)
    paid = rng.choice([note for note in (10, 20, 50) if note > a * price])
    questions = [
        f"{name} buys {a} {thing} at the {shop} for {price} dollars each and pays with {paid} dollars. "
        f"How much change does {name} get?",
        f"At the {shop} {thing} cost {price} dollars each. {name} has {paid} dollars and buys {a} of them. "
        f"How many dollars does {name} have left?",
    ]
    steps = [
        f"The {thing} cost {_times(a, price)} dollars.",
        f"{name} has {paid} dollars, so {_minus(paid, a * price)} dollars are left.",
    ]
    return questions, steps, f"{paid - a * price} dollars"


def _share(rng: random.Random) -> Drawn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each, extra = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 20)
    total = friends * each
    questions = [
        f"{name} shares {total} {thing} equally among {friends} friends. One of the friends already had {extra} "
        f"{thing}. How many {thing} does this friend have now?",
        f"{friends} children divide {total} {thing} fairly. {name}, one of them, has {extra} more {thing} at home. "
        f"How many {thing} does {name} have in all?",
    ]
    steps = [
        f"There are {total} {thing} for {friends} people, so each gets {total} / {friends} = {each} {thing}.",
        f"With {extra} more there are {_plus(each, extra)} {thing}.",
    ]
    return questions, steps, each + extra


def _journey(rng: random.Random) -> Drawn:
    name = rng.choice(NAMES)
    speed, hours, walked = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 20)
    means = rng.choice(["bike", "boat", "sledge", "pony"])
    questions = [
        f"{name} travels by {means} for {hours} hours at {speed} km per hour and then walks {walked} km. "
        f"How many km does {name} travel altogether?",
        f"A {means} moves at {speed} km per hour. {name} rides it for {hours} hours after walking {walked} km. "
        f"How long is the whole way in km?",
    ]
    steps = [
        f"In {hours} hours at {speed} km per hour {name} travels {_times(speed, hours)} km.",
        f"With {walked} km on foot the whole way is {_plus(speed * hours, walked)} km.",
    ]
    return questions, steps, f"{speed * hours + walked} km"


def _garden(rng: random.Random) -> Drawn:
    name, place = rng.choice(NAMES), rng.choice(["garden", "room", "field", "yard", "carpet", "window"])
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        questions = [
            f"The {place} of {name} is {a} m long and {b} m wide. What is its area?",
            f"{name} has a {place} of {a} m by {b} m. How many square meters is that?",
        ]
        steps = [f"The area is length times width. The {place} has {_times(a, b)} square meters."]
        return questions, steps, f"{a * b} square meters"
    questions = [
        f"The {place} of {name} is {a} m long and {b} m wide. How long is the line around it?",
        f"{name} has a {place} of {a} m by {b} m. What is its perimeter?",
    ]
    steps = [
        f"Length and width together are {_plus(a, b)} m.",
        f"The perimeter is twice that, and 2 * {a + b} = {2 * (a + b)} m.",
    ]
    return questions, steps, f"{2 * (a + b)} m"


def _ages(rng: random.Random) -> Drawn:
    name, other = rng.sample(NAMES, 2)
    age, older, years = rng.randint(4, 30), rng.randint(2, 15), rng.randint(2, 15)
    questions = [
        f"{name} is {age} years old and {other} is {older} years older. How old will {other} be in {years} years?",
        f"{other} is {older} years older than {name}, who is {age}. What is the age of {other} {years} years from now?",
    ]
    steps = [
        f"{name} is {age} years old, so {other} is {_plus(age, older)} years old now.",
        f"In {years} years {other} will be {_plus(age + older, years)} years old.",
    ]
    return questions, steps, age + older + years


WORD_PROBLEMS = (_more_and_fewer, _boxes, _money, _share, _journey, _garden, _ages)

# --------------------------------------------------------------------------------------------------
# Unit conversions, algebra, lists

UNITS = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("feet", "inches", 12),
    ("meters", "centimeters", 100),
    ("kilograms", "grams", 1000),
    ("dozens", "eggs", 12),
    ("centimeters", "millimeters", 10),
    ("gallons", "quarts", 4),
)


def _convert(rng: random.Random) -> Drawn:
    name = rng.choice(NAMES)
    large, small, factor = rng.choice(UNITS)
    a, extra = rng.randint(2, 9), rng.randint(1, min(factor - 1, 20))
    one = {"feet": "foot"}.get(large, large[:-1])
    questions = [
        f"How many {small} are {a} {large} and {extra} {small}?",
        f"Convert {a} {large} and {extra} {small} to {small}.",
        f"{name} notes {a} {large} and {extra} {small}. Write this in {small} for {name}.",
    ]
    steps = [
        f"One {one} is {factor} {small}.",
        f"So {a} {large} are {a} * {factor} = {a * factor} {small}.",
        f"Together with {extra} {small} this makes {_plus(a * factor, extra)} {small}.",
    ]
    return questions, steps, f"{a * factor + extra} {small}"


def _equation(rng: random.Random) -> Drawn:
    letter = rng.choice("xyznkt")
    a, b, value = rng.randint(2, 9), rng.randint(1, 20), rng.randint(2, 9)
    plus = rng.random() < 0.5 or a * value <= b
    sign, c = ("+", a * value + b) if plus else ("-", a * value - b)
    equation = f"{a} * {letter} {sign} {b} = {c}"
    move = f"Subtract {b} from both sides" if plus else f"Add {b} to both sides"
    questions = [
        f"Solve {equation} for {letter}.",
        f"What is {letter} if {equation}?",
        f"Find the number {letter} with {equation}.",
    ]
    steps = [
        f"{move}: {a} * {letter} = {_minus(c, b) if plus else _plus(c, b)}.",
        f"Divide both sides by {a}: {letter} = {a * value} / {a} = {value}.",
    ]
    return questions, steps, f"{letter} = {value}"


def _pair_of_numbers(rng: random.Random) -> Drawn:
    name = rng.choice(NAMES)
    a, b = rng.randint(2, 9), rng.randint(11, 29)
    questions = [
        f"What is {a} times {b}?",
        f"Compute {a} * {b} step by step.",
        f"{name} needs the product of {a} and {b}. What is it?",
    ]
    steps = [f"Split the second number into tens and ones: {_times(a, b)}."]
    return questions, steps, a * b


def _numbers(rng: random.Random, low: int, high: int, most: int = 40) -> list[int]:
    return rng.sample(range(1, most), rng.randint(low, high))


def _words(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _order(rng: random.Random) -> Drawn:
    values = _numbers(rng, 3, 4)
    rising = rng.random() < 0.5
    which = "smallest to largest" if rising else "largest to smallest"
    result = _words(sorted(values, reverse=not rising))
    questions = [f"Sort these numbers from {which}: {_words(values)}.", f"Put {_words(values)} in order from {which}."]
    steps = [f"There are {len(values)} numbers: {_words(values)}.", f"From {which} they are {result}."]
    return questions, steps, result


def _reverse(rng: random.Random) -> Drawn:
    values = rng.sample(THINGS, rng.randint(3, 4)) if rng.random() < 0.5 else _numbers(rng, 3, 5)
    questions = [f"Reverse this list: {_words(values)}.", f"Write {_words(values)} backwards."]
    result = _words(values[::-1])
    steps = [f"The list has {len(values)} entries: {_words(values)}.", f"Read from the end it is {result}."]
    return questions, steps, result


def _total(rng: random.Random) -> Drawn:
    name, values = rng.choice(NAMES), _numbers(rng, 3, 4, 20)
    questions = [
        f"What is the sum of {_words(values)}?",
        f"{name} adds the numbers {_words(values)}. What is the total?",
    ]
    sums = (f"{_plus(before, value)}." for before, value in zip(accumulate(values), values[1:], strict=False))
    return questions, [f"Add the {len(values)} numbers one after the other.", *sums], sum(values)


def _largest(rng: random.Random) -> Drawn:
    values = _numbers(rng, 3, 4)
    largest, smallest = max(values), min(values)
    questions = [
        f"What is the difference between the largest and the smallest of {_words(values)}?",
        f"How far apart are the largest and the smallest number in the list {_words(values)}?",
    ]
    steps = [
        f"The largest of {_words(values)} is {largest}.",
        f"The smallest of them is {smallest}.",
        f"The difference is {_minus(largest, smallest)}.",
    ]
    return questions, steps, largest - smallest


OTHERS = (_convert, _equation, _pair_of_numbers, _order, _reverse, _total, _largest)
KINDS: tuple[Callable[[random.Random], Drawn], ...] = (*WORD_PROBLEMS, *OTHERS)
