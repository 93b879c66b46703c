"""What all formats share: reasoning before the answer, and calls after the text."""

import json
from collections.abc import Callable, Sequence
from typing import ClassVar

from dflash_jax.constraints.automaton import Budget
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.expressions import Expression, Expressions
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.schema import json_schema
from dflash_jax.constraints.tools.eased import eased
from dflash_jax.constraints.tools.form import Form, Thinking, Tool
from dflash_jax.constraints.tools.kinds import allowed_kinds
from dflash_jax.constraints.tools.reading import Event, Feed, Steps
from dflash_jax.files import Json

ONE_LINE = Layout(lines=False)
NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


class Grammar:
    """Makes the expressions of calls.

    Attributes:
        made, budget: see `schema.json_schema`.
    """

    def __init__(self, made: Expressions, budget: Budget):
        self.made, self.budget = made, budget

    def arguments(self, tool: Tool, layout: Layout = ONE_LINE) -> Expression:
        """The arguments of a call, as one object. On one line, as templates write them: a model that is free to begin
        new ones may do so until its tokens are used up.

        Raises:
            ConstraintError: the schema of a strict tool cannot be enforced, or that of any is none.
        """
        found = self.enforced(tool, lambda schema: self._object(schema, layout))
        return json_schema(self.made, {"type": "object"}, layout, self.budget) if found is None else found

    def _object(self, schema: Json, layout: Layout) -> Expression:
        """What a schema allows that is an object."""
        made, found = self.made, json_schema(self.made, schema, layout, self.budget)
        kinds = allowed_kinds(schema, schema)
        if kinds == {"object"}:
            return found
        return made.both([found, made.then(made.text(b"{"), made.anything)]) if "object" in kinds else made.nothing

    def enforced(self, tool: Tool, read: Callable[[Json], Expression]) -> Expression | None:
        """What `read` makes of the schema of a tool; None where it is not enforced."""
        if tool.strict is False:
            return None
        try:
            found = read(schema_of(tool))
        except ConstraintError as error:
            if tool.strict or error.code not in ("unsupported_schema", "invalid_regex"):
                raise ConstraintError(error.code, f"function {tool.name}: {error}") from error
            return None
        if found is self.made.nothing:
            raise ConstraintError("unsatisfiable", f"function {tool.name}: no arguments satisfy its parameters")
        return found

    def several(self, one: Expression, between: Expression, *, parallel: bool) -> Expression:
        """One call, or several."""
        made = self.made
        return made.then(one, made.times(made.then(between, one), 0, None)) if parallel else one


def schema_of(tool: Tool) -> Json:
    """The schema of a tool's arguments: what of it is enforced."""
    found = json.loads(tool.parameters) if tool.parameters else NO_ARGUMENTS
    found = found if tool.strict else eased(found)
    if not found.get("type") and not set(found) & {"anyOf", "oneOf", "allOf", "$ref"}:
        found = {**found, "type": "object"}
    return found


class Format:
    """How a family writes an answer: reasoning, then text, then calls.

    Attributes:
        name: that `--tool-format` takes.
        known_by: parts of a chat template, all of which the templates of this format have.
        unlike: parts of a template that none of this format has.
        opens, heading, closes: what stands around reasoning; "" where there is none.
        begins: what the first call begins with; "" where the format has no calls.
        marks: special tokens that reading looks for.
        calls: whether it has calls.
        single: whether an answer has one call at most.
        describes: whether `messages` tells of tools, in place of the template.
    """

    name: ClassVar[str] = ""
    known_by: ClassVar[Sequence[str]] = ()
    unlike: ClassVar[Sequence[str]] = ()
    opens: ClassVar[str] = "<think>"
    heading: ClassVar[str] = ""
    closes: ClassVar[str] = "</think>"
    begins: ClassVar[str] = ""
    marks: ClassVar[Sequence[str]] = ()
    calls: ClassVar[bool] = True
    single: ClassVar[bool] = False
    describes: ClassVar[bool] = False

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """All calls of an answer."""
        raise NotImplementedError

    def read_calls(self, feed: Feed) -> Steps:
        """Reads calls, of which `begins` has been read."""
        raise NotImplementedError

    def messages(self, messages: Sequence[Json], tools: Sequence[Json]) -> Sequence[Json]:
        """A conversation as the chat template takes it; where the template of the family prints no tools, they are
        written into the messages."""
        return messages

    def thinking(self, prompt: str, template: str) -> Thinking:
        """See `Form.thinking`; what the end of a prompt says."""
        end = prompt.rstrip()
        if not self.closes or self.closes not in template:
            return ""
        if end.endswith((self.opens, self.opens + self.heading.rstrip())):
            return "opened"
        return "" if end.endswith(self.closes) else "may"

    def expression(self, grammar: Grammar, form: Form, content: Expression | None) -> Expression:
        """An answer; `content` is what its text must be, None is any."""
        made = grammar.made
        answer = self._answer(grammar, form, content)
        if not form.thinking:
            return answer
        blank = made.times(made.text(b"\n"), 0, 2)
        thought = made.sequence([made.free(self.opens, self.closes), made.mark(self.closes), blank, answer])
        if form.thinking == "opened":
            return thought
        heading = made.text(self.heading.encode())
        return made.either([answer, made.sequence([blank, made.mark(self.opens), heading, thought])])

    def _answer(self, grammar: Grammar, form: Form, content: Expression | None) -> Expression:
        made = grammar.made
        if content is not None:
            return content
        if form.must_call:
            return self.call(grammar, form)
        without = [*([self.begins] if self.begins else []), *([self.opens] if form.thinking else [])]
        free = made.free(*without)
        return made.then(free, made.optional(self.call(grammar, form))) if form.calls else free

    def read(self, feed: Feed) -> Steps:
        """Reads an answer."""
        thinking = feed.form.thinking
        if thinking == "may":
            yield from feed.skip("\n")
        if thinking == "opened" or (thinking and (yield from feed.starts(self.opens))):
            if thinking == "may" and self.heading:
                yield from feed.starts(self.heading)
            if not (yield from feed.until("reasoning", self.closes, trim="both")):
                return
            yield from feed.skip("\n")
        if not (feed.form.calls and self.begins):
            yield from feed.until("content")
        elif (yield from feed.until("content", self.begins, trim="end")):
            yield from self.read_calls(feed)


def json_call(grammar: Grammar, tool: Tool, key: str = "arguments") -> Expression:
    """A call written as an object with its name and arguments."""
    made = grammar.made
    begin = made.text(f'{{"name": "{tool.name}", "{key}": '.encode())
    return made.sequence([begin, grammar.arguments(tool), made.text(b"}")])


def read_json_call(feed: Feed, key: str = "arguments") -> Steps:
    """Reads such a call."""
    yield from feed.take('{"name": "')
    yield Event("call", (yield from feed.take('"')))
    yield from feed.take(f'"{key}": ')
    yield from feed.value()
    yield from feed.take("}")
    yield Event("done")
