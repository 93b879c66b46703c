"""gpt-oss: an answer is messages in channels (the harmony format)."""

import re
from collections.abc import Sequence

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form, Thinking
from dflash_jax.constraints.tools.format import Format, Grammar
from dflash_jax.constraints.tools.reading import EndedError, Event, Feed, Kind, Steps
from dflash_jax.files import Json

CHANNEL, MESSAGE, END, START, JSON = "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+)")


class GptOss(Format):
    """Reasoning in the channel analysis, then an answer in final or one call in commentary (openai/harmony, its guide
    to the format; chat template of openai/gpt-oss-20b). The prompt ends with the beginning of the first message."""

    name, known_by = "gpt_oss", (CHANNEL, START)
    marks = CHANNEL, MESSAGE, END, START, JSON
    closes = CHANNEL
    single = True

    def thinking(self, prompt: str, template: str) -> Thinking:
        """See `Format.thinking`."""
        return "may"

    def messages(self, messages: Sequence[Json], tools: Sequence[Json]) -> Sequence[Json]:
        """See `Format.messages`; the template takes reasoning, or else text, beside a call."""
        found = list[Json]()
        for message in messages:
            if reasoning := message.get("reasoning_content"):
                message = {name: value for name, value in message.items() if name != "reasoning_content"}
                if not (message.get("tool_calls") and message.get("content")):
                    message["thinking"] = reasoning
            found.append(message)
        return found

    def expression(self, grammar: Grammar, form: Form, content: Expression | None) -> Expression:
        """See `Format.expression`."""
        made, mark = grammar.made, grammar.made.mark
        text = made.free(CHANNEL, MESSAGE, END, START, JSON)
        head = lambda name: [mark(CHANNEL), made.text(name.encode()), mark(MESSAGE)]
        again = [mark(END), mark(START), made.text(b"assistant")]
        channels = ["analysis"] + (["commentary"] if form.choice == "auto" and content is None else [])
        before = [made.sequence([*head(name), text, *again]) for name in channels]
        last = list[Expression]()
        if form.calls and content is None:
            last.append(self.call(grammar, form))
        if not form.must_call or content is not None:
            last.append(made.sequence([*head("final"), text if content is None else content]))
        return made.then(made.times(made.either(before), 0, None), made.either(last))

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`; the recipient stands before or in the channel."""
        made, mark = grammar.made, grammar.made.mark
        found = list[Expression]()
        for tool in form.tools:
            name, channel = made.text(f" to=functions.{tool.name}".encode()), made.text(b"commentary")
            heads = [made.sequence([name, mark(CHANNEL), channel]), made.sequence([mark(CHANNEL), channel, name])]
            kind = made.sequence([made.text(b" "), made.optional(mark(JSON)), made.text(b"json"), mark(MESSAGE)])
            found.append(made.sequence([made.either(heads), kind, grammar.arguments(tool)]))
        return made.either(found)

    def read(self, feed: Feed) -> Steps:
        """See `Format.read`."""
        before = set[Kind]()
        while True:
            try:
                head = yield from feed.take(MESSAGE)
            except EndedError:
                if not before and feed.mark(CHANNEL) not in feed.text:  # no message at all
                    yield from feed.until("content")
                return
            said = head.replace(feed.mark(CHANNEL), " ").replace(feed.mark(JSON), " ")
            if (found := _RECIPIENT.search(said)) and feed.form.calls:
                yield Event("call", found[1])
                yield from feed.value()
                yield Event("done")
                return
            kind: Kind = "reasoning" if "analysis" in head else "content"
            if kind in before:
                yield Event(kind, "\n\n")
            before.add(kind)
            yield from feed.until(kind, END)
