"""Regular expressions match what Python's match."""

import random
import re

import pytest

from dflash_jax.constraints.automaton import Budget, automaton
from dflash_jax.constraints.characters import utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expressions
from dflash_jax.constraints.formats import FORMATS
from dflash_jax.constraints.patterns import regex

PATTERNS = [
    *["a|b*", "(ab|cd){2,3}x?", r"[^a-c\d]+", "^(foo|bar)$", ".{0,5}é+[à-ü]*", r"\w+@\w+\.(com|org)", "a{,3}b{2,}"],
    *["x{a}", "(?P<n>a)(?:b|)", "[]a]+", r"[\w-]+", r"\x41\u00e9?", r"a\.b\$", "(a*)*", "(|a)+b", "a??b+?", "[a-]x|^b"],
    *[r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})", r"\s*\S\D\W", r"[\]\\^]", "(a|ab)(c|bcd)(d*)"],
    *["(?!ab)[a-c]{2}x*", "(?=.*b)(?=.*[0-9])[ab0-9]{2,4}", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "a(?!b|c$)[bc]+|(?=x)x"],
]
ALPHABET = "abcdxyfoobr0123456789-T:+.Z@comrgéàü{}]\\^$ \n\tA"


def texts_like(found, rng, count):
    """Texts that mostly begin as the automaton would have it."""
    for _ in range(count):
        state, text = 1, bytearray()
        for _ in range(rng.randint(0, 30)):
            may = [byte for byte in range(256) if found.next[state, byte]]
            if not may:
                break
            text.append(rng.choice(may))
            state = found.next[state, text[-1]]
        try:
            yield text.decode()
        except UnicodeDecodeError:
            continue
        yield "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 8)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_are_those_of_python(pattern):
    made, rng = Expressions(), random.Random(pattern)
    found, matched = automaton(made, regex(made, pattern, utf8)), 0
    for text in texts_like(found, rng, 400):
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert found.matches(text.encode()) == expected, text
        matched += expected
    assert matched


@pytest.mark.parametrize(
    "pattern", ["b", "^ab", "b$", "^a|b$", "[0-9]{2}", "^$", "", "^(?!a|b$).", "a(?!b)", "^(?=.*9)(?!.*é)"]
)
def test_a_search_finds_it_anywhere(pattern):
    made, rng = Expressions(), random.Random(0)
    found = automaton(made, regex(made, pattern, utf8, search=True))
    for _ in range(400):
        text = "".join(rng.choice("ab09é") for _ in range(rng.randint(0, 5)))
        assert found.matches(text.encode()) == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a", "a missing"),
        ("a)", "unmatched"),
        ("[a", "a missing ]"),
        ("*a", "nothing to repeat"),
        ("a**", "multiple repeat"),
        ("a{3,1}", "fewer than the least"),
        ("a++", "possessive"),
        ("((?=a)b)c", "look-ahead is supported outside groups only"),
        ("(?=a)*", "nothing to repeat"),
        ("a(?=^b)", "the beginning and the end"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", r"\\1 is not supported"),
        (r"\bword", r"\\b is not supported"),
        (r"\p{L}", r"\\p is not supported"),
        ("a^b", "the beginning and the end"),
        ("[z-a]", "bad range"),
        (r"\ud800", "no character"),
        ("a\\", "nothing after it"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_is_not_served_is_named(pattern, why):
    with pytest.raises(ConstraintError, match=why) as error:
        regex(Expressions(), pattern, utf8)
    assert error.value.code == "invalid_regex"


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){20}", "x{16384}{16384}", "((((a{99}){99}){99}){99})", "[^a]{9000}b?"]
)
def test_large_ones_are_refused(pattern):
    made = Expressions()
    with pytest.raises(ConstraintError) as error:
        automaton(made, regex(made, pattern, utf8), Budget(states=2**12))
    assert error.value.code in ("constraint_too_large", "invalid_regex")


def test_formats_are_those_of_the_standard_library():
    import datetime
    import ipaddress

    def valid(read, text):
        try:
            read(text)
        except ValueError:
            return False
        return True

    made, rng = Expressions(), random.Random(0)
    found = {name: automaton(made, regex(made, FORMATS[name], utf8)) for name in ("date", "time", "ipv4", "ipv6")}
    for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert found["date"].matches(text.encode()) == valid(datetime.date.fromisoformat, text)
    for _ in range(500):
        text = ":".join(rng.choice(["", "0", "f00", "12345", "::", "1.2.3.4"]) for _ in range(rng.randint(2, 9)))
        assert not found["ipv6"].matches(text.encode()) or valid(ipaddress.IPv6Address, text)
        text = ".".join(str(rng.randint(0, 300)) for _ in range(rng.randint(3, 5)))
        assert found["ipv4"].matches(text.encode()) == valid(ipaddress.IPv4Address, text)
    for text in ("::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "::2:3:4:5:6:7:8", "1:2:3:4:5:6:1.2.3.4"):
        assert found["ipv6"].matches(text.encode())
    assert found["time"].matches(b"23:59:59Z")
    assert not found["time"].matches(b"24:00:00Z")
