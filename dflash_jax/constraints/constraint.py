"""Constraints as plain data, and what prepares them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash_jax.constraints.automaton import Budget, automaton
from dflash_jax.constraints.characters import utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.patterns import regex as pattern_expression
from dflash_jax.constraints.schema import Layout
from dflash_jax.constraints.schema import json_schema as schema_expression
from dflash_jax.constraints.vocabulary import TokenAutomaton, Vocabulary
from dflash_jax.files import Value

VERSION = 1  # of what constraints mean: answers of another one may differ
LARGEST = 2**18  # bytes of a constraint
SECONDS = 2.0  # that an automaton over bytes may take, and as long again its tokens
STATES = 2**13  # that an automaton may have

Kind = Literal["regex", "choice", "json_schema"]


@dataclass(frozen=True)
class Constraint:
    """What an answer must look like; make one with `regex`, `choice`, `json_schema` or `json_object`.

    Attributes:
        kind, source: what it is, as text.
        compact: whether JSON is written without blanks.
        name: of the field of a request that it came from, for messages.
    """

    kind: Kind
    source: str
    compact: bool = False
    name: str = field(default="", compare=False)


def regex(pattern: str) -> Constraint:
    """Answers that a regular expression matches as a whole (Python's syntax, with ASCII classes)."""
    return Constraint("regex", pattern)


def choice(texts: Sequence[str]) -> Constraint:
    """Answers that are one of these texts."""
    return Constraint("choice", json.dumps(list(texts)))


def json_schema(schema: Value, *, compact: bool = False) -> Constraint:
    """Answers of JSON that a schema allows (docs/constraints.md).

    Args:
        schema: of JSON Schema, as Python's objects.
        compact: without blanks.
    """
    return Constraint("json_schema", json.dumps(schema), compact)


def json_object(*, compact: bool = False) -> Constraint:
    """Answers that are an object of JSON."""
    return json_schema({"type": "object"}, compact=compact)


def prepared(
    constraint: Constraint,
    vocabulary: Vocabulary,
    ends: Sequence[int],
    *,
    states: int = STATES,
    seconds: float = SECONDS,
) -> TokenAutomaton:
    """The automaton of a constraint.

    Args:
        ends: tokens that end an answer.
        states: that it may have.
        seconds: see `SECONDS`.

    Raises:
        ConstraintError: it cannot be enforced, or not within these limits.
    """
    begin, made = time.thread_time(), Expressions()
    budget = Budget(states, begin + seconds)
    if len(constraint.source.encode(errors="replace")) > LARGEST:
        raise ConstraintError(
            "constraint_too_large", f"a constraint may have {LARGEST} bytes, got {len(constraint.source)}"
        )
    try:
        of_bytes = automaton(made, _expression(constraint, made, budget), budget)
        found = vocabulary.reading(of_bytes, ends, Budget(states, begin + 2 * seconds))
    except RecursionError as error:
        raise ConstraintError("constraint_too_large", "the constraint is nested too deep") from error
    except ConstraintError:
        raise
    except UnicodeEncodeError as error:
        raise ConstraintError("invalid_schema", "the constraint holds a lone surrogate") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        # A schema is looked at in parts before each of them is checked.
        raise ConstraintError("invalid_schema", f"the constraint cannot be read: {error!s:.200}") from error
    if len(found.next) > states:
        raise ConstraintError("constraint_too_large", f"the constraint needs more than {states} states")
    return found


def _expression(constraint: Constraint, made: Expressions, budget: Budget) -> Expression:
    if constraint.kind == "regex":
        return pattern_expression(made, constraint.source, utf8)
    given = json.loads(constraint.source)
    if constraint.kind == "choice":
        return made.texts(text.encode() for text in given)
    return schema_expression(made, given, Layout(constraint.compact), budget)
