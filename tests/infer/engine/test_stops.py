"""What ends an answer: end tokens, `ignore_eos`, `stop_token_ids`, `min_tokens`."""

import dataclasses

import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams, generate, replay, spec_generate
from dflash_jax.infer.engine.requests import RequestError
from dflash_jax.infer.text import Text
from tests import tiny
from tests.infer.engine.test_settings import logits_of

PROMPTS = [[5, 9, 11, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40]]
LEAST = 9


@pytest.fixture(scope="module")
def engines(target, drafter):
    """Autoregressive decoding, a chain and a tree."""
    made = lambda *drafters, **given: Engine(target, *drafters, slots=4, max_length=64, **given)
    return [made(None), made(drafter), made(drafter, tree=9)]


@pytest.fixture(scope="module")
def stops(target):
    """Tokens that would end each answer early."""
    free = generate(target, PROMPTS, max_new_tokens=24, stop_token_ids=[]).tokens
    return tuple({token for answer in free for token in answer[:6]})[:12]


@pytest.mark.slow
@pytest.mark.lossless
def test_answers_with_min_tokens_are_those_of_plain_decoding(target, engines, stops):
    """Greedy and sampled, beside a row without."""
    common = {"eos_token_ids": stops[:2], "stop_token_ids": stops[2:], "min_tokens": LEAST, "seed": 3}
    settings = [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 5}]
    every = [(prompt, given) for given in settings for prompt in PROMPTS]
    requests = [tiny.ask(prompt, 24, id=str(i), **common, **given) for i, (prompt, given) in enumerate(every)]
    requests.append(tiny.ask(PROMPTS[0], 24, id="other", stop_token_ids=stops, seed=3))
    plain, *speculative = (engine.generate(requests) for engine in engines)
    assert len(plain[-1].token_ids) < LEAST
    for answer in plain[:-1]:
        assert not set(answer.token_ids[:LEAST]) & set(stops)
        assert answer.finish_reason == "length" or answer.token_ids[-1] in stops
    assert any(answer.finish_reason == "stop" for answer in plain[:-1])
    for done in speculative:
        assert [answer.token_ids for answer in done] == [answer.token_ids for answer in plain]
    for request, answer in zip(requests[:4], plain, strict=False):
        assert replay(target, request.prompt_token_ids, answer.token_ids, request.params, chunk=8).mismatches == 0


@pytest.mark.lossless
@pytest.mark.parametrize("least", [0, LEAST])
def test_stop_strings_of_halves_of_characters_end_plain_and_speculative_answers_alike(engines, least):
    """Tokens are bytes, so most answers are full of U+FFFD, and some characters have two tokens."""
    text = byte_text()
    requests = []
    for i, stop in enumerate(["\ufffd", "é", "\ufffda", "è\ufffd", "ab", "bé", "\ufffd\ufffd\ufffd"]):
        given = {"temperature": 1.5, "seed": i, "min_tokens": least, "find_stop": text.find_stop([stop], least)}
        requests += [tiny.ask(prompt, 40, id=f"{i}", **given) for prompt in PROMPTS]
    plain, *speculative = (engine.generate(requests) for engine in engines)
    assert {answer.finish_reason for answer in plain} == {"stop", "length"}
    for done in speculative:
        for ours, theirs in zip(done, plain, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)


def byte_text():
    """A tokenizer of 64 tokens, each a byte: the halves of é and è, and letters."""

    class Bytes:
        clean_up_tokenization_spaces = False

        def decode(self, tokens, **_):
            return bytes((b"\xc3\xa9\xa8" * 18 + b"abcdefghij")[token] for token in tokens).decode(errors="replace")

    text = Text("")
    text._tokenizer = Bytes()
    return text


def test_held_back_tokens_give_way_to_the_next_best(target, drafter, stops):
    asked = [tiny.ask(prompt, 20, stop_token_ids=stops, min_tokens=20) for prompt in PROMPTS]
    done = Engine(target, drafter, slots=3, max_length=64).generate(asked)
    for prompt, answer in zip(PROMPTS, done, strict=True):
        logits = logits_of(target, prompt, answer.token_ids)
        logits[:, list(stops)] = -np.inf
        assert answer.token_ids == np.argmax(logits, axis=1).tolist()
        assert answer.finish_reason == "length"


def test_replay_finds_a_stop_token_that_came_too_early(target, stops):
    answer = generate(target, PROMPTS[:1], max_new_tokens=8, stop_token_ids=[]).tokens[0]
    params = SamplingParams(8, stop_token_ids=(answer[2],), min_tokens=4)
    assert replay(target, PROMPTS[0], answer, params).worst_gap == np.inf


def test_ignore_eos_ignores_the_models_end_tokens_alone(target, drafter):
    free = generate(target, PROMPTS[0], max_new_tokens=12, stop_token_ids=[]).tokens[0]
    params = SamplingParams(12, eos_token_ids=(free[2],), stop_token_ids=(free[6],), ignore_eos=True)
    assert params.ends == (free[6],)
    answer = Engine(target, drafter, slots=1, max_length=64).generate([tiny.ask(PROMPTS[0], 12, **_fields(params))])
    assert answer[0].token_ids == free[: free.index(free[6]) + 1]

    ends = target.replace(config=dataclasses.replace(target.config, eos_token_ids=(free[2],)))
    assert spec_generate(ends, None, PROMPTS[0], max_new_tokens=12).tokens[0][-1] == free[2]
    assert spec_generate(ends, None, PROMPTS[0], max_new_tokens=12, ignore_eos=True).tokens[0] == free


@pytest.mark.parametrize("least", [-1, 25])
def test_min_tokens_out_of_range_are_refused(target, least):
    with pytest.raises(RequestError, match="min_tokens must lie in 0..24"):
        Engine(target, None, slots=1, max_length=64).generate([tiny.ask([1], 24, min_tokens=least)])


def _fields(params):
    return {name: getattr(params, name) for name in ("eos_token_ids", "stop_token_ids", "ignore_eos")}
