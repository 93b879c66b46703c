"""Jobs whose lines have tools, or whose model thinks."""

import json

import pytest

from dflash_jax import serve
from dflash_jax.constraints.tools.formats import FORMATS
from tests import tiny
from tests.fakes import vocabulary
from tests.fakes.templates import TEMPLATES
from tests.infer.jobs.test_constraints import URL
from tests.jobs import command, write

ASKED = [{"role": "user", "content": "x"}]
PARAMETERS = {"type": "object", "properties": {"kind": {"enum": ["rain", "sun"]}}, "required": ["kind"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory, marks = tmp_path_factory.mktemp("pair"), [*FORMATS["qwen3"].marks, "<|im_end|>"]
    ids = {"vocab_size": vocabulary.size(marks)}
    tiny.write_target(directory / "target", tiny.target_config(**ids, eos_token_id=vocabulary.END))
    vocabulary.write_tokenizer(directory / "target", marks, TEMPLATES["qwen3"].text)
    drafting = {"mask_token_id": vocabulary.MASK}
    tiny.write_drafter(directory / "drafter", tiny.drafter_config(**ids, eos_token_id=None, dflash_config=drafting))
    return directory


def said(path):
    """Tokens and messages of each record, by its id; a batch record has a random name."""
    found = {}
    for record in map(json.loads, path.read_text().splitlines()):
        if "custom_id" in record:
            found[record["custom_id"]] = record["response"]["body"]["choices"]
        else:
            found[record["id"]] = [
                (one.get("token_ids"), one.get("message")) for one in record.get("samples", [record])
            ]
    return found


@pytest.mark.slow
def test_a_job_with_tools_continues(pair, tmp_path):
    """Its records have the message, with the same ids; a batch line has it in OpenAI's form."""
    line = {"messages": ASKED, "max_tokens": 90} | NAMED | QUIET
    rows = [line | {"id": f"{i}", "temperature": 0.5 * (i % 3)} for i in range(4)]
    rows += [line | {"id": "two", "n": 2}, {"id": "none", "messages": ASKED, "max_tokens": 5} | QUIET]
    rows += [{"id": "thinks", "messages": ASKED, "max_tokens": 5}]
    rows += [{"id": "wrong", "messages": ASKED, "tools": [{"type": "function", "function": {}}]}]
    rows += [{"custom_id": "batch", **URL, "body": line | {"model": "m"}}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    more = ["--max-length", "512"]
    assert serve.main([*command(pair, source, output), *more]) == 1
    whole, text = said(output), output.read_text().splitlines(keepends=True)
    found = {record.get("id"): record for record in map(json.loads, text)}
    batch = next(record for record in found.values() if record.get("custom_id") == "batch")
    assert found["wrong"]["error"]["code"] == "invalid_parameter"
    assert "message" not in found["none"]
    assert found["thinks"]["message"]["role"] == "assistant"
    messages = [found[row["id"]]["message"] for row in rows[:4]]
    messages += [sample["message"] for sample in found["two"]["samples"]]
    messages.append(batch["response"]["body"]["choices"][0]["message"])
    for message in messages:
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["kind"] in ("rain", "sun")
    ids = [message["tool_calls"][0]["id"] for message in messages]
    assert len(set(ids)) == len(ids)
    assert {found[row["id"]]["finish_reason"] for row in rows[:4]} == {"stop"}
    output.write_text("".join(text[:2])[:-5])
    assert serve.main([*command(pair, source, output), *more]) == 1
    assert said(output) == whole
    alone = tmp_path / "alone.jsonl"
    assert serve.main([*command(pair, source, alone), *more, "--no-speculation"]) == 1
    assert said(alone) == whole
