"""Llama 3.1 and later: an answer that is an object with a name and parameters is a call."""

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar, json_call, read_json_call
from dflash_jax.constraints.tools.reading import Feed, Steps

TAG = "<|python_tag|>"
KEY = "parameters"


class Llama3(Format):
    """`{"name": ..., "parameters": {...}}` and nothing else; a tag may stand before it (chat template of
    meta-llama/Llama-3.1-8B-Instruct, which takes one call in a message)."""

    name, known_by = "llama3", ("<|start_header_id|>", '"parameters": ')
    opens = closes = ""
    marks = (TAG,)
    single = True

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made = grammar.made
        one = made.either([json_call(grammar, tool, KEY) for tool in form.tools])
        return made.then(made.optional(made.mark(TAG)), one)

    def _answer(self, grammar: Grammar, form: Form, content: Expression | None) -> Expression:
        made = grammar.made
        if content is not None or not form.calls:
            return super()._answer(grammar, form, content)
        if form.must_call:
            return self.call(grammar, form)
        # A text that begins as a call of a known function is one.
        begins = made.either([made.text(f'{{"name": "{tool.name}"'.encode()) for tool in form.tools])
        text = made.both([made.free(TAG), made.without(made.then(begins, made.anything))])
        return made.either([text, self.call(grammar, form)])

    def read(self, feed: Feed) -> Steps:
        """See `Format.read`."""
        tagged = feed.form.calls and (yield from feed.starts(TAG))
        begins = [f'{{"name": "{tool.name}"' for tool in feed.form.tools] if feed.form.calls else []
        while any(text.startswith(feed.text) and text != feed.text for text in begins) and not feed.ended:
            yield None
        if tagged or feed.text.startswith(tuple(begins)):
            yield from read_json_call(feed, KEY)
        else:
            yield from feed.until("content")
