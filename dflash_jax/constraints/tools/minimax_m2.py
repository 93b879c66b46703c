"""MiniMax-M2: calls are elements of XML in one section."""

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.parameters import Tags, arguments, read_arguments
from dflash_jax.constraints.tools.reading import Event, Feed, Steps

SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
TAGS = Tags('<parameter name="', '">', "</parameter>", "\n")


class MiniMaxM2(Format):
    """`<invoke name="NAME">` with a parameter on each line, one after the other in a section (chat template of
    MiniMaxAI/MiniMax-M2)."""

    name, known_by = "minimax_m2", (SECTION,)
    begins = SECTION
    marks = "<think>", "</think>", SECTION, SECTION_END

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made, inside = grammar.made, list[Expression]()
        for tool in form.tools:
            inside.append(made.then(made.text(f'{tool.name}">\n'.encode()), arguments(grammar, tool, TAGS)))
        one = made.sequence([made.text(b'<invoke name="'), made.either(inside), made.text(b"</invoke>\n")])
        calls = grammar.several(one, made.empty, parallel=form.several)
        return made.sequence([made.mark(SECTION), made.text(b"\n"), calls, made.mark(SECTION_END)])

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        while (yield from feed.skip("\n")) is None and (yield from feed.starts('<invoke name="')):
            name = yield from feed.take('">')
            yield Event("call", name)
            yield from read_arguments(feed, name, TAGS, "</invoke>")
            yield Event("done")
