"""Qwen3, Qwen3-Next, Qwen2.5 and Hermes: each call is an object of JSON between tags."""

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar, json_call, read_json_call
from dflash_jax.constraints.tools.reading import Feed, Steps


class Qwen3(Format):
    """`<tool_call>`, an object with name and arguments, `</tool_call>`, each on a line of its own (chat template of
    Qwen/Qwen3-8B)."""

    name, known_by = "qwen3", ("<tool_call>", "arguments")
    unlike = "<arg_key>", "<invoke", "<tool_calls>"
    begins = "<tool_call>"
    marks = "<think>", "</think>", "<tool_call>", "</tool_call>"

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made = grammar.made
        inside = made.either([json_call(grammar, tool) for tool in form.tools])
        line = made.text(b"\n")
        one = made.sequence([made.mark(self.begins), line, inside, line, made.mark("</tool_call>")])
        return grammar.several(one, line, parallel=form.several)

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        while True:
            yield from read_json_call(feed)
            yield from feed.take("</tool_call>")
            yield from feed.skip("\n")
            if not (yield from feed.starts(self.begins)):
                return
