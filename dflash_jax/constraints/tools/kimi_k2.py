"""Kimi-K2: calls are a section of special tokens, and have ids that the model writes."""

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.reading import Event, Feed, Steps

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(Format):
    """`functions.NAME:NUMBER` and an object of JSON for each call (chat template of moonshotai/Kimi-K2-Instruct)."""

    name, known_by = "kimi_k2", (SECTION,)
    begins = SECTION
    marks = "<think>", "</think>", SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made = grammar.made
        digit = made.one(sum(1 << ord(digit) for digit in "0123456789"))
        found = list[Expression]()
        for tool in form.tools:
            head = [made.text(f"functions.{tool.name}:".encode()), made.times(digit, 1, 3), made.mark(ARGUMENTS)]
            found.append(made.sequence([*head, grammar.arguments(tool)]))
        one = made.sequence([made.mark(CALL), made.either(found), made.mark(CALL_END)])
        calls = grammar.several(one, made.empty, parallel=form.several)
        return made.sequence([made.mark(SECTION), calls, made.mark(SECTION_END)])

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        while (yield from feed.starts(CALL)):
            written = yield from feed.take(ARGUMENTS)
            yield Event("call", written.removeprefix("functions.").rpartition(":")[0], written)
            yield from feed.value()
            yield from feed.take(CALL_END)
            yield Event("done")
