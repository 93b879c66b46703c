"""What answers over HTTP say of how they were made, in the forms that clients and load generators read."""

from collections import Counter
from collections.abc import Iterable, Sequence

from dflash_jax.files import Json
from dflash_jax.infer import openai
from dflash_jax.infer.answers import speculation
from dflash_jax.infer.engine.requests import Completion


def usage(
    answers: Sequence[Completion], counts: Sequence[int] | None = None, prompts: Iterable[Completion] | None = None
) -> Json:
    """OpenAI's `usage` of answers, with so many tokens of each (`counts`) or all.

    Args:
        prompts: an answer to each prompt, where there are several.
    """
    generated = sum(len(answer.token_ids) for answer in answers) if counts is None else sum(counts)
    prompts = answers[:1] if prompts is None else list(prompts)
    details = {"prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in prompts)}}
    return openai.usage(sum(answer.prompt_tokens for answer in prompts), generated) | details


def timed(answer: Completion, alone: bool) -> Json:
    """How the steps of a finished answer went, how long they took, and whether it had the engine to itself."""
    seconds = answer.finished - answer.first_token
    rate = (len(answer.token_ids) - 1) / seconds if seconds > 0 else None
    return speculation(answer) | {"decode_seconds": seconds, "tokens_per_second": rate, "alone": alone}


def meta_info(answer: Completion) -> Json:
    """SGLang's `meta_info`, as its benchmark and the `dflash` client read it.

    `spec_accept_length` is tau, the mean number of tokens a step; it is left out where no step was made.
    """
    steps = len(answer.acceptance_lengths)
    found: Json = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": answer.cached_tokens,
        "finish_reason": {"type": answer.finish_reason},
        "spec_verify_ct": steps,
    }
    return found | ({"spec_accept_length": answer.tau} if steps else {})


def metrics(answer: Completion) -> Json:
    """vLLM's `metrics` of a request, as aiperf and `vllm bench` read them. Times are in milliseconds.

    `acceptance_histogram[j]` counts the steps that accepted j proposed tokens; a step's bonus token is not counted.
    """
    found: Json = {
        "queue_time_ms": 1000 * (answer.started - answer.submitted),
        "time_to_first_token_ms": 1000 * (answer.first_token - answer.submitted),
    }
    if not answer.acceptance_lengths:
        return found
    counted = Counter(length - 1 for length in answer.acceptance_lengths)
    steps, accepted = len(answer.acceptance_lengths), sum(answer.acceptance_lengths) - len(answer.acceptance_lengths)
    found["speculative_decoding"] = {
        "num_spec_steps": steps,
        "num_draft_tokens": answer.proposed_tokens,
        "num_accepted_draft_tokens": accepted,
        "acceptance_histogram": [counted[j] for j in range(max(counted) + 1)],
        "mean_acceptance_length": answer.tau,
        "draft_acceptance_rate": accepted / answer.proposed_tokens if answer.proposed_tokens else 0.0,
    }
    return found
