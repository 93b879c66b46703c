"""Constraints as plain data, and what prepares them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dflash_jax.constraints.automaton import Budget, automaton
from dflash_jax.constraints.characters import utf8
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.patterns import regex as pattern_expression
from dflash_jax.constraints.schema import json_schema as schema_expression
from dflash_jax.constraints.tools.form import Choice, Form, Thinking, Tool
from dflash_jax.constraints.tools.formats import FORMATS, answer_expression
from dflash_jax.constraints.vocabulary import TokenAutomaton, Vocabulary
from dflash_jax.files import Fields, Value

VERSION = 1  # of what constraints mean: answers of another one may differ
LARGEST = 2**18  # bytes of a constraint
SECONDS = 2.0  # that an automaton over bytes may take, and as long again its tokens
STATES = 2**13  # that an automaton may have

Kind = Literal["regex", "choice", "json_schema", "free"]


@dataclass(frozen=True)
class Constraint:
    """What an answer must look like; make one with `regex`, `choice`, `json_schema`, `json_object` or `tool_calls`.

    Attributes:
        kind, source: what the text of the answer must be.
        compact: whether JSON is written without blanks.
        form: what else the answer may have, such as reasoning and calls; None is nothing.
        name: of the field of a request that it came from, for messages.
    """

    kind: Kind
    source: str
    compact: bool = False
    form: Form | None = None
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


def tool_calls(
    tools: Sequence[Fields],
    format: str,
    *,
    choice: Choice = "auto",
    thinking: Thinking = "",
    parallel: bool = True,
) -> Constraint:
    """Answers that may call functions, or must.

    Args:
        tools: `{"name", "parameters", "strict"}` each, as in OpenAI's `tools[].function`.
        format: what the target's family writes (`FORMATS`).
        choice, thinking: see `Form`.
        parallel: whether several calls may follow one another.

    Raises:
        ValueError: the format is unknown, or has no reasoning.
    """
    if format not in FORMATS or not FORMATS[format].calls:
        known = ", ".join(name for name, one in FORMATS.items() if one.calls)
        raise ValueError(f"format must be one of {known}, got {format!r:.60}")
    if thinking and not FORMATS[format].closes:
        raise ValueError(f'thinking must be "" with the format {format}, got {thinking!r:.60}')
    made = [
        Tool(tool["name"], json.dumps(tool["parameters"]) if tool.get("parameters") else "", tool.get("strict"))
        for tool in tools
    ]
    return Constraint("free", "", form=Form(format, thinking, tuple(made), choice, parallel))


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
    try:
        return _prepared(constraint, vocabulary, ends, states, seconds)
    except ConstraintError as error:
        form = constraint.form
        too_much = error.code in ("constraint_too_large", "constraint_timeout")
        if not too_much or form is None or form.loosened == form:
            raise
        # Nothing was promised of tools that are not strict.
        return _prepared(replace(constraint, form=form.loosened), vocabulary, ends, states, seconds)


def _prepared(
    constraint: Constraint, vocabulary: Vocabulary, ends: Sequence[int], states: int, seconds: float
) -> TokenAutomaton:
    begin, made = time.thread_time(), Expressions(vocabulary.special)
    budget = Budget(states, begin + seconds)
    size = len(constraint.source.encode(errors="replace"))
    if constraint.form is not None:
        size += sum(len(tool.parameters) for tool in constraint.form.tools if tool.strict is not False)
    if size > LARGEST:
        raise ConstraintError("constraint_too_large", f"a constraint may have at most {LARGEST} bytes, got {size}")
    try:
        content = _expression(constraint, made, budget)
        whole = answer_expression(made, constraint.form, content, budget) if constraint.form else content
        of_bytes = automaton(made, made.free() if whole is None else whole, budget)
        found = vocabulary.reading(of_bytes, ends, Budget(states, begin + 2 * seconds), made.marks)
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


def _expression(constraint: Constraint, made: Expressions, budget: Budget) -> Expression | None:
    """What the text of the answer must be; None is any."""
    if constraint.kind == "free":
        return None
    if constraint.kind == "regex":
        return pattern_expression(made, constraint.source, utf8)
    given = json.loads(constraint.source)
    if constraint.kind == "choice":
        return made.texts(text.encode() for text in given)
    return schema_expression(made, given, Layout(constraint.compact), budget)
