"""SmolLM2: calls are one list of JSON between tags, and functions stand in a system message."""

import json
from collections.abc import Sequence

from dflash_jax.constraints.expressions import Expression
from dflash_jax.constraints.tools.form import Form
from dflash_jax.constraints.tools.format import Format, Grammar, json_call, read_json_call
from dflash_jax.constraints.tools.reading import Feed, Steps
from dflash_jax.files import Json

PROMPT = """You can call functions. Each is given as a JSON object with its name, its description and its parameters:
{tools}

To call functions, answer with a list of calls between tags and nothing after it:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function helps, answer in plain text."""


class SmolLM2(Format):
    """`<tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>` (model card of
    HuggingFaceTB/SmolLM2-1.7B-Instruct).

    Its chat template knows no tools, so that they are described in the system message.
    """

    name, known_by = "smollm2", ("SmolLM",)
    begins = "<tool_call>"
    opens = closes = ""
    unlike = "xml_tools", "</think>"
    describes = True
    marks = "<tool_call>", "</tool_call>"

    def call(self, grammar: Grammar, form: Form) -> Expression:
        """See `Format.call`."""
        made = grammar.made
        one = made.either([json_call(grammar, tool) for tool in form.tools])
        calls = grammar.several(one, made.text(b", "), parallel=form.several)
        begin, end = made.mark(self.begins), made.mark("</tool_call>")
        return made.sequence([begin, made.text(b"["), calls, made.text(b"]"), end])

    def read_calls(self, feed: Feed) -> Steps:
        """See `Format.read_calls`."""
        yield from feed.take("[")
        while True:
            yield from read_json_call(feed)
            if not (yield from feed.starts(", ")):
                return

    def messages(self, messages: Sequence[Json], tools: Sequence[Json]) -> Sequence[Json]:
        """See `Format.messages`."""
        described = PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        found = [_written(message) for message in messages]
        if tools and found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{described}"}
        elif tools:
            found.insert(0, {"role": "system", "content": described})
        return found


def _written(message: Json) -> Json:
    """A message with its calls, or the result of one, as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
    ]
    written = f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>"
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], written]))}
