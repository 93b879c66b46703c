"""Gemma 4: arguments are written without JSON's quotes, strings between special tokens."""

import json
from collections.abc import Sequence

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.notation import Layout
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.reading import Event, Feed, Steps, escaped
from dflash_jax.files import Json

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
LAYOUT = Layout(compact=True, quote=QUOTE)


class Gemma4(Format):
    """`call:NAME{key:value,...}` between special tokens; keys are bare and in alphabetical order (chat template of
    google/gemma-4-31B-it)."""

    name, known_by = "gemma4", (CALL,)
    opens, heading, closes = "<|channel>", "thought\n", "<channel|>"
    begins = CALL
    marks = opens, closes, CALL, CALL_END, QUOTE

    def messages(self, messages: Sequence[Json], tools: Sequence[Json]) -> Sequence[Json]:
        """See `Format.messages`; the template prints the name of the function beside what it returned."""
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        names = {call.get("id"): call["function"]["name"] for call in calls}
        return [
            {"name": names.get(message.get("tool_call_id"), ""), **message} if message["role"] == "tool" else message
            for message in messages
        ]

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made = grammar.made
        inside = [
            made.then(made.text(f"call:{tool.name}".encode()), grammar.arguments(tool, LAYOUT)) for tool in form.tools
        ]
        one = made.sequence([made.mark(CALL), made.either(inside), made.mark(CALL_END)])
        return grammar.several(one, made.empty, parallel=form.several)

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        while True:
            yield from feed.take("call:")
            yield Event("call", (yield from feed.take("{")))
            yield Event("arguments", "{")
            yield from _read_value(feed)
            yield from feed.take(CALL_END)
            yield Event("done")
            if not (yield from feed.starts(CALL)):
                return


def _read_value(feed: Feed) -> Steps:
    """The rest of an object, of which the brace was read, as JSON."""
    quote, open = feed.mark(QUOTE), ["{"]
    while open:
        at = next((i for i, letter in enumerate(feed.text) if letter in "{}[],:" or letter == quote[0]), None)
        if at is None or (feed.text[at] == quote[0] and not feed.text.startswith(quote, at)):
            if feed.ended:
                yield Event("arguments", feed.text)
                feed.text = ""
            yield from feed.more()
            continue
        word, letter, feed.text = feed.text[:at].strip(), feed.text[at], feed.text[at:]
        if letter == quote[0]:
            feed.text = feed.text[len(quote) :]
            yield Event("arguments", '"')
            if not (yield from feed.until("arguments", QUOTE, change=escaped)):
                return
            yield Event("arguments", '"')
            continue
        feed.text = feed.text[1:]
        if letter == ":":
            yield Event("arguments", json.dumps(word, ensure_ascii=False) + ": ")
            continue
        word = "null" if word == "None" else word
        if letter in "{[":
            open.append(letter)
            yield Event("arguments", letter)
        elif letter == ",":
            yield Event("arguments", word + ", ")
        else:
            open.pop()
            yield Event("arguments", word + letter)
