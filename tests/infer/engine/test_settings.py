"""Penalties and log-probabilities of requests, against plain passes over their own tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, replay
from dflash_jax.infer.engine.requests import RequestError
from tests import tiny

PROMPTS = [[5, 9, 11, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40]]
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -1.5, "frequency_penalty": 2.0},
]


def logits_of(target, prompt, answer):
    """float64 logits of every token of the answer, by one pass over all tokens."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
    logits = np.asarray(_logits(target, tokens)[0], np.float64)
    return logits[len(prompt) - 1 : len(prompt) - 1 + len(answer)]


@jax.jit
def _logits(target, tokens):
    hidden, _, _ = target.forward(tokens, jnp.arange(64)[None], None, target.init_cache(1, 64))
    return target.unembed(hidden)


def penalised(logits, prompt, answer, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    """As transformers and OpenAI define them."""
    for token in set(prompt) | set(answer):
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    for token in answer:
        logits[token] -= frequency_penalty
    for token in set(answer):
        logits[token] -= presence_penalty
    return logits


@pytest.mark.parametrize("given", PENALTIES, ids=["repetition", "presence and frequency", "all"])
def test_penalties_choose_what_a_plain_loop_chooses(target, drafter, given):
    done = Engine(target, drafter, slots=2, max_length=64, prefill_chunk=8).generate(
        [tiny.ask(prompt, 24, **given) for prompt in PROMPTS]
    )
    free = Engine(target, None, slots=1, max_length=64).generate([tiny.ask(prompt, 24) for prompt in PROMPTS])
    assert any(a.token_ids != b.token_ids for a, b in zip(done, free, strict=True))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        answer = completion.token_ids
        for step, logits in enumerate(logits_of(target, prompt, answer)):
            assert answer[step] == np.argmax(penalised(logits, prompt, answer[:step], **given))


@pytest.mark.lossless
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_are_exact_with_speculation_and_leave_neighbours_alone(target, drafter, temperature):
    requests = [
        tiny.ask(prompt, 30, temperature, id=f"r{i}{prompt[0]}", **given)
        for i, given in enumerate([{}, *PENALTIES])
        for prompt in PROMPTS
    ]
    alone = Engine(target, None, slots=1, max_length=64)
    expected = [alone.generate([request])[0].token_ids for request in requests]
    engine = Engine(target, drafter, slots=3, max_length=64)
    assert [done.token_ids for done in engine.generate(requests)] == expected
    for request, tokens in zip(requests, expected, strict=True):
        again = replay(target, request.prompt_token_ids, tokens, request.params, request_id=request.id, chunk=7)
        assert again.mismatches == again.near_ties


def test_logprobs_are_the_targets_own(target, drafter):
    requests = [
        tiny.ask(prompt, 20, 0.8, id=str(i), logprobs=n, presence_penalty=0.5)
        for i, (prompt, n) in enumerate(zip(PROMPTS, (3, None, 0), strict=True))
    ]
    plain = Engine(target, None, slots=1, max_length=64, logprobs=5)
    ours = Engine(target, drafter, slots=2, max_length=64, logprobs=5)
    for request, a, b in zip(requests, ours.generate(requests), plain.generate(requests), strict=True):
        assert a.token_ids == b.token_ids
        assert len(a.logprobs) == len(a.top_logprobs) == (0 if request.params.logprobs is None else 20)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        for step, logits in enumerate(logits_of(target, request.prompt_token_ids, a.token_ids[: len(a.logprobs)])):
            expected = logits - np.log(np.sum(np.exp(logits)))
            assert a.logprobs[step] == pytest.approx(expected[a.token_ids[step]], abs=1e-4)
            best = np.argsort(-expected, kind="stable")[: request.params.logprobs]
            assert [token for token, _ in a.top_logprobs[step]] == best.tolist()
            np.testing.assert_allclose([value for _, value in a.top_logprobs[step]], expected[best], atol=1e-4)


def test_a_stop_cuts_logprobs_too(target, drafter):
    request = tiny.ask(PROMPTS[0], 20, logprobs=1, find_stop=lambda tokens, new: 5 if len(tokens) >= 5 else None)
    (done,) = Engine(target, drafter, max_length=64, logprobs=1).generate([request])
    assert len(done.token_ids) == len(done.logprobs) == len(done.top_logprobs) == 5


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"logprobs": 3},
        {"logprobs": -1},
    ],
)
def test_what_is_out_of_range_is_refused(target, given):
    with pytest.raises(RequestError, match=next(iter(given))):
        Engine(target, None, max_length=64, logprobs=2).check(tiny.ask([1], **given))
    if "logprobs" in given:
        with pytest.raises(RequestError, match="logprobs=None"):
            Engine(target, None, max_length=64).check(tiny.ask([1], logprobs=0))
