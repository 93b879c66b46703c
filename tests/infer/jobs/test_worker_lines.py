"""Lines on their way to a worker of a cluster: they carry their tokens, and no worker reads the input."""

import json
import pickle
import sys
from dataclasses import replace
from functools import partial

import pytest

from dflash_jax import serve
from dflash_jax.engines import load_engine, needs_of_lines
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.jobs.cluster import EngineWorker
from dflash_jax.infer.jobs.lines import attached, detached, read_lines
from dflash_jax.infer.jobs.records import record_id
from dflash_jax.infer.text import Text
from dflash_jax.models import target_config
from tests import jobs, tiny

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
ROWS = [
    {"id": "text", "prompt": "hello", "max_new_tokens": 9},
    {"id": "stop", "prompt": "hello there", "max_new_tokens": 60, "stop": ["a", "e"], "n": 2, "temperature": 1.0},
    {"id": "ids", "prompt_token_ids": [1, 2, 3], "seed": 4, "temperature": 0.7},
    {"custom_id": "batch", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"stop": "b"}},
    {"id": 7, "turns": ["abc", "def"], "chat_template_kwargs": {"a": 1}},
    {"prompt": "without an id"},
]


@pytest.fixture
def lines(pair):
    text, raw = Text(str(pair / "target")), [json.dumps(row).encode() for row in ROWS]
    return text, read_lines(raw, text, SamplingParams(12))


def test_lines_come_through_whole(lines):
    text, lines = lines
    for line in lines:
        back = attached(pickle.loads(pickle.dumps(detached(line))), text)
        plain = [replace(each, request=replace(each.request, find_stop=None)) for each in (line, back)]
        assert plain[0] == plain[1]
        assert (line.request.find_stop is None) == (back.request.find_stop is None)
    assert attached(detached(lines[1]), text).request.find_stop(text.encode("bcad"), 4) == 3


@pytest.mark.slow
def test_a_worker_turns_no_prompt_into_tokens(pair, lines, monkeypatch):
    command = ["--target", str(pair / "target"), "--no-speculation", "--max-new-tokens", "12", "--batch-size", "2"]
    options = serve.parse_options([*command, "--input", "in.jsonl"])
    asked = options.models, options.generation, options.engine
    taken = [line for line in lines[1] if not line.later]  # later turns are read when the first are answered
    needs = needs_of_lines(target_config(tiny.target_config()), taken, options.engine)
    monkeypatch.setattr(Text, "encode", lambda *_: pytest.fail("a prompt was turned into tokens"))
    monkeypatch.setattr(Text, "encode_chat", lambda *_: pytest.fail("a prompt was turned into tokens"))
    worker, found = EngineWorker(pickle.loads(pickle.dumps(partial(load_engine, *asked, needs, speculative=False)))), []
    sent = pickle.dumps([detached(line) for line in taken])
    while len(found) < len(taken):
        found += worker.work(pickle.loads(sent), True).finished
        sent = pickle.dumps([])
    answers = {record_id(record): [each.token_ids for each in done] for record, done in found}
    for line in taken:
        samples = [replace(line.request, sample=i) for i in range(line.n)]
        assert answers[str(line.id)] == [done.token_ids for done in worker._engine.generate(samples)]


def test_ray_is_asked_for_by_name(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = jobs.write(tmp_path / "in.jsonl", ROWS)
    assert serve.main([*jobs.command(pair, source, tmp_path / "out.jsonl"), "--ray"]) == 2
    assert "--ray needs another package: pip install '.[ray]'" in capsys.readouterr().err
