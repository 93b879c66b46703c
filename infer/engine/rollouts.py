"""Groups of sampled answers with their log-probabilities, as arrays that a loss takes, for reinforcement learning.

Shapes: N answers, those of a prompt side by side; L tokens of the longest prompt and answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.stats import Stats


class RolloutStats(NamedTuple):
    """What it took to make them.

    Attributes:
        steps: of the device; a plain decoder takes one for each token of the longest answers.
        tau: mean tokens that a step committed of a row.
        prompt_tokens: tokens of prompts that were read; those copied from another sample's are not among them.
    """

    steps: int
    tau: float | None
    prompt_tokens: int


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts.

    Attributes:
        tokens: prompt, answer, padding.
        mask: where the answers' tokens are.
        logprobs: of each answer's token in the distribution that it was sampled from (penalties, temperature and
            filters applied), 0 elsewhere.
        policy_logprobs: of the same tokens in the target's own distribution, at temperature 1 without filters, over all
            tokens that the tokenizer can decode.
        prompt_lengths, lengths: tokens of the prompt, and with the answer.
        features: of prompt and answer but for its last token, 0 elsewhere, if the engine keeps them
            (`EngineConfig.keep_features`): what an `OnlineDrafter` learns from.
        groups: which prompt each answers.
        completions: the answers themselves, with finish reasons and the versions of the weights that they come from.
        stats: what it took.
        allowed: tokens that could be sampled in the place of each answer's token, likeliest first, -1 after the last,
            if they were asked for.
    """

    tokens: Int[np.ndarray, "N L"]
    mask: Bool[np.ndarray, "N L"]
    logprobs: Float[np.ndarray, "N L"]
    policy_logprobs: Float[np.ndarray, "N L"]
    prompt_lengths: Int[np.ndarray, " N"]
    lengths: Int[np.ndarray, " N"]
    groups: Int[np.ndarray, " N"]
    features: Float[np.ndarray, "N L FD"] | None
    completions: Sequence[Completion]
    stats: RolloutStats
    allowed: Int[np.ndarray, "N L K"] | None = None

    @property
    def finish_reasons(self) -> list[str]:
        """ "stop" or "length" of each answer."""
        return [completion.finish_reason for completion in self.completions]


def rollouts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int = 8,
    params: SamplingParams | None = None,
    *,
    step: int = 0,
    pad: int = 0,
    width: int | None = None,
    allowed: bool = False,
) -> Rollouts:
    """Samples several answers to each prompt.

    The noise of an answer follows from the engine's seed, `step`, the place of its prompt and its number: the same
    engine gives the same answers again, with a drafter and without.

    Args:
        engine: made with `logprobs=0, sampled_logprobs=True`. With `prefix_chunks` the samples of a prompt copy its
            chunks of `prefill_chunk` tokens; what is left of it is read for each.
        params: how tokens are chosen; by default at temperature 1 to the target's end tokens.
        step: of the training; each has other noise.
        pad: token of the padding.
        width: tokens that the arrays are padded to, so that a loss is compiled once; None is the longest answer.
        allowed: whether to return which tokens the filters let through at each place, so that a loss can normalize over
            the same ones. Then `params.top_k` bounds their number, and the engine is made with that many `logprobs`.

    Raises:
        RequestError, ValueError: a prompt or a setting that the engine does not serve, a seed in `params`, a `width`
            that the longest prompt and answer may exceed, or `allowed` without a `top_k` that the engine serves.
    """
    if not engine.config.sampled_logprobs:
        raise ValueError("rollouts need log-probabilities; make the engine with logprobs=0, sampled_logprobs=True")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if params is not None and params.seed is not None:
        raise ValueError(
            "params.seed would give all prompts and steps the same random numbers; set the seed of the engine"
        )
    params = params or SamplingParams(temperature=1.0, eos_token_ids=engine.target.config.eos_token_ids)
    most_allowed = params.top_k if allowed else 0
    if allowed and not 0 < most_allowed <= (engine.config.logprobs or 0):
        served = engine.config.logprobs
        raise ValueError(f"allowed needs params.top_k in 1..{served}, the engine's logprobs; got {params.top_k}")
    params = replace(params, logprobs=most_allowed)
    requests = [
        Request(prompt, params, sample=sample, id=f"{step}.{i}")
        for i, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    most = max((min(len(prompt) + params.max_new_tokens, engine.max_length) for prompt in prompts), default=0)
    if width is not None and most > width:
        raise ValueError(f"width must be at least {most}, for the longest prompt and answer; got {width}")
    before = replace(engine.stats)
    completions = engine.generate(requests)
    stats = _since(before, engine.stats)
    starts = np.asarray([len(request.prompt_token_ids) for request in requests], np.int32)
    lengths = starts + np.asarray([len(one.token_ids) for one in completions], np.int32)
    shape = len(requests), int(lengths.max(initial=0)) if width is None else width
    tokens, sampled, policy = np.full(shape, pad, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    kept = np.full((*shape, most_allowed), -1, np.int32) if allowed else None
    for i, (request, one) in enumerate(zip(requests, completions, strict=True)):
        answer = slice(starts[i], lengths[i])
        tokens[i, : lengths[i]] = [*request.prompt_token_ids, *one.token_ids]
        sampled[i, answer], policy[i, answer] = one.sampled_logprobs, one.logprobs
        if kept is not None:
            for at, pairs in enumerate(one.sampled_top_logprobs, starts[i]):
                kept[i, at, : len(pairs)] = [token for token, _ in pairs]
    features = None
    if engine.config.keep_features:
        features = _stacked([one.features for one in completions], shape[1])
        completions = [replace(one, features=None) for one in completions]  # or they would be held twice
    at = np.arange(shape[1])[None]
    mask = (at >= starts[:, None]) & (at < lengths[:, None])
    groups = np.repeat(np.arange(len(prompts), dtype=np.int32), samples)
    return Rollouts(tokens, mask, sampled, policy, starts, lengths, groups, features, completions, stats, kept)


def _stacked(features: Sequence[np.ndarray | None], length: int) -> Float[np.ndarray, "N L FD"] | None:
    found = None
    for i, x in enumerate(features):
        assert x is not None
        found = np.zeros((len(features), length, x.shape[1]), x.dtype) if found is None else found
        found[i, : len(x)] = x
    return found


def _since(before: Stats, now: Stats) -> RolloutStats:
    taken = now.row_steps - before.row_steps
    read = lambda stats: stats.prompt_tokens - stats.prefix_tokens
    tau = (now.decode_tokens - before.decode_tokens) / taken if taken else None
    return RolloutStats(now.steps - before.steps, tau, read(now) - read(before))
