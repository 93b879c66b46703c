"""Clients against the server: the installed ones as they are, others by the fields that they send and read.

`python -m tests.clients` runs all of them.
"""

import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from dflash_jax import Engine, SamplingParams, load_drafter, load_target
from dflash_jax.infer.http.worker import Worker
from dflash_jax.infer.text import Text
from tests import tiny
from tests.clients import from_wheel
from tests.clients.figures import counted, differences
from tests.clients.runs import CHAT, CLIENTS, LENGTH, TEXT, Setting
from tests.fakes.servers import serving

QUESTIONS = "hello there", "one and two", "three", "hello again"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Address of a server with two slots and no key."""
    directory = tmp_path_factory.mktemp("target")
    tiny.write_target(directory, tiny.target_config())
    tiny.write_tokenizer(directory)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), tiny.drafter_config()))
    engine = Engine(load_target(directory), drafter, slots=2, max_length=128, steps_per_visit=4)
    with serving(Worker(engine), Text(str(directory)), SamplingParams(16)) as address:
        yield address


@pytest.mark.parametrize("name", ["dflash", "openai"])
def test_clients_report_what_the_engine_counted(name, url, tmp_path):
    before = counted(url)
    report = CLIENTS[name](Setting(url, "tiny", tmp_path, QUESTIONS, tmp_path, tmp_path))
    assert differences(report, len(QUESTIONS), before, counted(url)) == []
    assert report.acceptance is not None
    assert report.acceptance >= 1


PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
PLAIN = [{"role": "user", "content": "hello there"}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# What each load generator sends when it fixes the length of answers, in the versions that docs/measuring.md names.
BODIES = {
    "vllm, chat": (CHAT, STREAMED, {"messages": PARTS, "max_completion_tokens": LENGTH, "temperature": 0.0}),
    "vllm, text": (
        TEXT,
        STREAMED,
        {"prompt": "hello", "max_tokens": LENGTH, "repetition_penalty": 1.0, "logprobs": None, "temperature": 0.0},
    ),
    "guidellm, chat": (CHAT, CONTINUOUS, {"messages": PARTS, "max_completion_tokens": LENGTH, "stop": None}),
    "guidellm, text": (TEXT, CONTINUOUS, {"prompt": "hello there", "max_tokens": LENGTH, "stop": None}),
    "aiperf, chat": (CHAT, STREAMED, {"messages": PLAIN, "max_completion_tokens": LENGTH, "min_tokens": LENGTH}),
    "aiperf, text": (TEXT, STREAMED, {"prompt": ["hello there"], "max_tokens": LENGTH}),
    "sglang, chat": (CHAT, STREAMED, {"messages": PLAIN, "max_completion_tokens": LENGTH, "temperature": 0.0}),
    "sglang, text": (
        TEXT,
        {"stream": True},
        {"prompt": "hello there", "max_tokens": LENGTH, "best_of": 1, "temperature": 0.0},
    ),
    "sglang, text, counted": (
        TEXT,
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"prompt": "hello there", "max_tokens": LENGTH, "best_of": 1, "temperature": 0.0},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_streams_have_what_load_generators_read(name, url):
    endpoint, streaming, fields = BODIES[name]
    before = counted(url)
    events = stream(url + endpoint, {"model": "tiny", "ignore_eos": True} | streaming | fields)
    after = counted(url)
    kind = "chat.completion.chunk" if endpoint == CHAT else "text_completion"
    assert {event["object"] for event in events} == {kind}
    assert len({event["id"] for event in events}) == 1
    options = streaming.get("stream_options", {})
    last = ["include_usage"] if "include_usage" in options else []
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - len(last)) + [True] * len(last)
    usages = [event["usage"] for event in events if "usage" in event]
    # The last chunk of an answer has it, too, asked for or not.
    assert len(usages) == (len(events) if "continuous_usage_stats" in options else 1 + len(last))
    for usage in usages:
        assert usage["prompt_tokens"] == after["dflash_prompt_tokens_total"] - before["dflash_prompt_tokens_total"]
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usages[-1]["completion_tokens"] == LENGTH
    (reported,) = [event["metrics"]["speculative_decoding"] for event in events if "metrics" in event]
    histogram = reported["acceptance_histogram"]
    assert sum(histogram) == reported["num_spec_steps"] == after["dflash_steps_total"] - before["dflash_steps_total"]
    accepted = sum(j * count for j, count in enumerate(histogram))
    assert accepted == reported["num_accepted_draft_tokens"] <= reported["num_draft_tokens"]
    # The first token comes from the prompt; each step adds one token that was not proposed.
    assert accepted + reported["num_spec_steps"] == LENGTH - 1
    grown = lambda what: after[f"vllm:spec_decode_num_{what}_total"] - before[f"vllm:spec_decode_num_{what}_total"]
    assert (grown("drafts"), grown("accepted_tokens")) == (reported["num_spec_steps"], accepted)
    assert grown("draft_tokens") == reported["num_draft_tokens"]
    assert grown("accepted_tokens_per_pos") == accepted


def stream(url, body):
    """The events of a streamed answer, which must end as OpenAI's do."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


def test_what_clients_ask_for_besides(url):
    ask = lambda path: json.loads(urllib.request.urlopen(url + path, timeout=60).read())
    assert ask("/v1/models")["data"][0].keys() >= {"id", "root"}  # vLLM's client loads the tokenizer of `root`
    stream(url + TEXT, {"prompt": "hello", "max_tokens": 9, "stream": True})
    figures = counted(url)
    tau = figures["dflash_step_tokens_total"] / figures["dflash_steps_total"]
    assert ask("/server_info")["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(tau)
    assert urllib.request.urlopen(urllib.request.Request(url + "/metrics", method="HEAD"), timeout=60).status == 200


def test_a_load_generator_runs_out_of_its_wheel(tmp_path):
    """The packages on the way are not run, and modules of the engine are empty where the load generator needs none."""
    wheel = tmp_path / "sglang-0.0-py3-none-any.whl"
    generator = """
from sglang.benchmark.near import here
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, Other
from sglang.srt.utils.network import resolve_base_url
import sys
def cli_main():
    print(here, isinstance(Other, type), resolve_base_url("", "h", 1), sys.argv[1:])
"""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/__init__.py", "raise ImportError('torch')")
        archive.writestr("sglang/benchmark/__init__.py", "")
        archive.writestr("sglang/benchmark/near.py", "here = 'near'")
        archive.writestr("sglang/benchmark/serving.py", generator)
    run = lambda *arguments: subprocess.run(
        [sys.executable, str(Path(from_wheel.__file__)), *arguments], capture_output=True, text=True, timeout=60
    )
    assert run(str(wheel), "--num-prompts", "3").stdout == "near True http://h:1 ['--num-prompts', '3']\n"
    failed = run(str(tmp_path / "other-0.0.whl"))
    assert failed.returncode
    assert "expected a wheel of one of sglang, vllm, got" in failed.stderr
