"""What answers say of how they were made, and what a body asks for."""

import contextlib
import json

import pytest

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, RequestError
from dflash_jax.infer.fields import BODY, INERT, NEUTRAL, UNSUPPORTED
from dflash_jax.infer.http import reports
from dflash_jax.infer.http.asked import read_body
from dflash_jax.infer.openai import CHAT, TEXT, plain_body
from dflash_jax.infer.text import Text

DONE = Completion(
    token_ids=list(range(12)),
    finish_reason="stop",
    acceptance_lengths=[4, 1, 4, 2],
    proposed_tokens=28,
    prompt_tokens=9,
    cached_tokens=8,
    submitted=1.0,
    started=1.5,
    first_token=3.0,
)


def test_usage():
    assert reports.usage([DONE, DONE]) == {
        "prompt_tokens": 9,
        "completion_tokens": 24,
        "total_tokens": 33,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert reports.usage([DONE], [5])["total_tokens"] == 14


def test_acceptance_in_every_clients_words():
    info = reports.meta_info(DONE)
    assert (info["spec_verify_ct"], info["spec_accept_length"]) == (4, 2.75)
    found = reports.metrics(DONE)
    assert (found["queue_time_ms"], found["time_to_first_token_ms"]) == (500.0, 2000.0)
    speculation = found["speculative_decoding"]
    histogram, steps = speculation["acceptance_histogram"], speculation["num_spec_steps"]
    assert histogram == [1, 1, 0, 2]
    assert steps == sum(histogram) == 4
    assert speculation["num_accepted_draft_tokens"] == sum(j * n for j, n in enumerate(histogram)) == 7
    assert speculation["mean_acceptance_length"] == 1 + 7 / 4 == DONE.tau
    assert speculation["draft_acceptance_rate"] == 7 / 28


def test_an_answer_without_steps_reports_no_acceptance():
    plain = Completion(token_ids=[1])
    assert "spec_accept_length" not in reports.meta_info(plain)
    assert "speculative_decoding" not in reports.metrics(plain)


def read(endpoint, **body):
    body = {"prompt": [1, 2]} | body if endpoint == TEXT else body
    return read_body(json.dumps(body).encode(), endpoint, Text(""), SamplingParams(16), "m")


def test_what_a_body_asks_for():
    asked = read(TEXT, n=2, return_meta_info=True, stream_options={"continuous_usage_stats": True}, speculation=False)
    assert [request.sample for request in asked.samples] == [0, 1]
    assert (asked.with_meta_info, asked.always_usage, asked.streamed) == (True, True, False)
    assert asked.samples[0].max_block_size == 1
    assert read(TEXT, speculation={"max_block_size": 4}).samples[0].max_block_size == 4
    assert read(TEXT, speculation=True).samples[0].max_block_size is None
    assert read(TEXT, prompt=[[3, 4]]).samples[0].prompt_token_ids == [3, 4]


@pytest.mark.parametrize(
    "body",
    [
        {"stream": "yes"},
        {"stream_options": []},
        {"stream_options": {"include_usage": 1}},
        {"return_meta_info": "x"},
        {"speculation": 0},
        {"messages": []},
        {"temprature": 1},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_an_error_of_that_request(body):
    with pytest.raises(RequestError):
        read(TEXT, **body)


def test_bodies_that_are_no_objects():
    for raw in (b"", b"[]", b"\xff", b"[" * 100_000, b"null", b'{"prompt": "\\ud800"}'):
        with pytest.raises(RequestError):
            read_body(raw, CHAT, Text(""), SamplingParams(16), "m")


HOSTILE = [
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    1e999,
    float("nan"),
    "",
    "a",
    "\ud800",
    [],
    [[]],
    {},
    {"a": None},
    [None],
    [2**70],
]


def test_any_value_of_any_field_is_read_or_an_error_of_that_request():
    names = sorted(BODY | INERT | NEUTRAL.keys() | UNSUPPORTED | {"stream", "stream_options", "speculation", "no such"})
    for endpoint in (TEXT, CHAT):
        for name in names:
            for value in HOSTILE:
                with contextlib.suppress(RequestError):
                    read(endpoint, **{name: value})


def test_values_that_ask_for_nothing_on_one_endpoint():
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert plain_body({**chat, "add_special_tokens": False}, CHAT)
    assert plain_body({"prompt": "a", "add_special_tokens": True}, TEXT)
    assert "logprobs" not in plain_body({"prompt": "a", "logprobs": False}, TEXT)
    assert plain_body({"prompt": "a", "n": 2, "best_of": 2}, TEXT)["n"] == 2
    for body in ({"add_special_tokens": False}, {"best_of": 2}):
        with pytest.raises(RequestError, match="is not supported"):
            plain_body({"prompt": "a", **body}, TEXT)
