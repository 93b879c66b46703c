"""Jobs whose lines have constraints."""

import json

import pytest

from dflash_jax import serve
from dflash_jax.infer.jobs.journal import settings_path
from tests import tiny
from tests.fakes import vocabulary
from tests.jobs import command, records, write

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
URL = {"method": "POST", "url": "/v1/chat/completions"}
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 9,
    "structured_outputs": {"choice": ["on", "off"]},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory, ids = tmp_path_factory.mktemp("pair"), {"vocab_size": vocabulary.SIZE}
    tiny.write_target(directory / "target", tiny.target_config(**ids, eos_token_id=vocabulary.END))
    vocabulary.write_tokenizer(directory / "target")
    drafting = {"mask_token_id": vocabulary.MASK}
    tiny.write_drafter(directory / "drafter", tiny.drafter_config(**ids, eos_token_id=None, dflash_config=drafting))
    return directory


def test_a_job_with_constraints_continues(pair, tmp_path):
    """With and without speculation the same records; and a wrong line is its own error."""
    rows = [{"id": f"{i}", "prompt": "abc"[: i % 3 + 1], "temperature": 0.5 * (i % 3)} for i in range(8)]
    for row in rows[::2]:
        row["response_format"] = FORMAT
    rows += [{"id": "regex", "prompt": "x", "guided_regex": "(ab){3}", "n": 2}]
    rows += [{"id": "wrong", "prompt": "x", "guided_json": {"not": {}}}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 1
    whole, text = records(output), output.read_text().splitlines(keepends=True)
    answers = {record["id"]: record for record in map(json.loads, text)}
    assert answers["wrong"]["error"]["code"] == "unsupported_schema"
    assert [sample["text"] for sample in answers["regex"]["samples"]] == ["ababab"] * 2
    for row in rows[:8:2]:
        record = answers[row["id"]]
        assert record["finish_reason"] == "length" or isinstance(json.loads(record["text"])["n"], int)
    assert json.loads(settings_path(output).read_text())["constraints"] == 1
    output.write_text("".join(text[:3])[:-5])
    assert serve.main(command(pair, source, output)) == 1
    assert records(output) == whole
    alone = tmp_path / "alone.jsonl"
    assert serve.main([*command(pair, source, alone), "--no-speculation"]) == 1
    assert records(alone) == whole


def test_batch_lines_and_conversations_have_them(pair, tmp_path):
    rows = [{"custom_id": "a", **URL, "body": BODY}, {"id": "turns", "turns": ["x", "y"], "regex": "[01]{3}"}]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 0
    batch, turns = sorted(map(json.loads, output.read_text().splitlines()), key=lambda record: "turns" in record)
    assert batch["response"]["body"]["choices"][0]["message"]["content"] in ("on", "off")
    assert all(set(turn["text"]) <= {"0", "1"} and len(turn["text"]) == 3 for turn in turns["turns"])


def test_a_job_without_any_has_nothing_of_them(pair, tmp_path):
    source, output = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 0
    assert "constraints" not in json.loads(settings_path(output).read_text())
