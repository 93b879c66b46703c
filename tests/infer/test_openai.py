"""What is wrong with a request in OpenAI's form is said in its own names."""

import json

import pytest

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.jobs.lines import parse_line
from dflash_jax.infer.openai import CHAT, TEXT
from dflash_jax.infer.text import Text

CHATTING = {"messages": [{"role": "user", "content": "a"}]}


def refusal(body, url=TEXT):
    """The error record's message of a batch line of token ids."""
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": [1, 2]} | body if url == TEXT else body}
    error = parse_line(json.dumps(line).encode(), 0, Text(""), SamplingParams()).error
    assert error
    return str(error)


@pytest.mark.parametrize("name", ["max_new_tokens", "prompt_token_ids", "turns", "max_length"])
def test_names_of_our_own_form_are_unknown(name):
    for url, body in ((TEXT, {}), (CHAT, CHATTING)):
        assert refusal(body | {name: 3}, url).startswith(f"unknown parameter '{name}'; ")


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 2**63, [], {}])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_parameter_that_was_written_is_named(name, value):
    assert refusal({name: value}).startswith(f"{name} must be a positive integer, got")


@pytest.mark.parametrize("value", [21, -1, "2", 1.0, [1]])
def test_log_probabilities(value):
    assert refusal({"logprobs": value}).startswith("logprobs must be an integer in 0..20, got")
    chat = CHATTING | {"logprobs": True, "top_logprobs": value}
    assert refusal(chat, CHAT).startswith("top_logprobs must be an integer in 0..20, got")


@pytest.mark.parametrize("value", [["a", "b"], [[1, 2], [3]], [True], [], 5, {}])
def test_prompts(value):
    assert refusal({"prompt": value}).startswith("prompt must be a string or a list of token ids, got")


def test_quoted_text_stays_as_it_is():
    quoted = "no max_new_tokens, no prompt_token_ids"
    assert quoted in refusal({"seed": quoted})
    assert quoted in refusal({"model": "m", quoted: 1})
