"""Constraints made to be expensive end soon: prepared, or refused."""

import random
import time

import pytest

from dflash_jax.constraints.constraint import prepared
from dflash_jax.constraints.errors import ConstraintError
from tests.constraints.hostile import hostile
from tests.fakes import vocabulary

SECONDS = 30.0  # far above what any takes here, and far below what one takes that does not end


# Thousands of them, and what each takes: `python -m tests.constraints.hostile`.
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_each_ends_soon(part):
    nasty, refused = vocabulary.vocabulary(), set()
    for seed in range(20 * part, 20 * part + 20):
        constraint, begin = hostile(random.Random(seed)), time.monotonic()
        try:
            prepared(constraint, nasty, [vocabulary.END], **({"states": 2**10} if part == 0 else {}))
        except ConstraintError as error:
            refused.add(error.code)
        assert time.monotonic() - begin < SECONDS, constraint.source[:200]
    limits = {"constraint_too_large"} if part == 0 else {"constraint_too_large", "constraint_timeout"}
    assert refused & limits  # of the default ones a slow processor meets that of time first
    known = {"constraint_too_large", "constraint_timeout", "unsatisfiable", "unsupported_schema", "invalid_regex"}
    assert refused <= known | {"invalid_schema"}
