"""Qwen3-Coder and Qwen3.5: parameters between tags, each on lines of its own."""

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.parameters import Tags, arguments, read_arguments
from dflash_jax.constraints.tools.reading import Event, Feed, Steps

TAGS = Tags("<parameter=", ">\n", "\n</parameter>", "\n")


class Qwen3Coder(Format):
    """`<tool_call>`, `<function=NAME>`, parameters, `</function>`, `</tool_call>` (chat template of
    Qwen/Qwen3-Coder-30B-A3B-Instruct)."""

    name, known_by = "qwen3_coder", ("<tool_call>", "<function=")
    begins = "<tool_call>"
    marks = "<think>", "</think>", "<tool_call>", "</tool_call>"

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made, inside = grammar.made, list[Expression]()
        for tool in form.tools:
            inside.append(made.then(made.text(f"{tool.name}>\n".encode()), arguments(grammar, tool, TAGS)))
        begin = made.then(made.mark(self.begins), made.text(b"\n<function="))
        end = made.then(made.text(b"</function>\n"), made.mark("</tool_call>"))
        one = made.sequence([begin, made.either(inside), end])
        return grammar.several(one, made.text(b"\n"), parallel=form.several)

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        while True:
            yield from feed.take("<function=")
            name = yield from feed.take(">")
            yield Event("call", name)
            yield from read_arguments(feed, name, TAGS, "</function>")
            yield Event("done")
            yield from feed.take("</tool_call>")
            yield from feed.skip("\n")
            if not (yield from feed.starts(self.begins)):
                return
