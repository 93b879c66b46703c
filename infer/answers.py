"""Answers as JSON, for the records of jobs and over HTTP."""

from collections.abc import Sequence
from functools import partial

from dflash_jax.constraints.tools.form import Form
from dflash_jax.files import Json
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.parts import AnswerParts, message
from dflash_jax.infer.text import Text


def answer(
    completion: Completion,
    text: Text,
    stop: Sequence[str] = (),
    after: int = 0,
    form: Form | None = None,
    name: str = "",
) -> Json:
    """An answer as output records have it.

    Args:
        stop, after: see `Text.find_stop`.
        form: what it may be made of besides text; then it has a `message`, whose parts stand apart.
        name: of the request; see `AnswerParts`.
    """
    scores = {"logprobs": token_logprobs(completion, text)} if completion.logprobs else {}
    found: Json = {
        "text": text.answer(completion.token_ids, stop, after),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {"prompt_tokens": completion.prompt_tokens, "completion_tokens": len(completion.token_ids)},
        "speculation": speculation(completion),
    }
    if form is not None:
        parts = AnswerParts(text, form, answer_name(name, completion), stop, after)
        found["message"] = message(parts.add(completion.token_ids, last=True))
        found["finish_reason"] = parts.finish_reason(completion.finish_reason)
    return found | scores


def answer_name(name: str, completion: Completion) -> str:
    """The name of one of the answers to a request."""
    return f"{name}/{completion.sample}"


def speculation(completion: Completion) -> Json:
    """Acceptance lengths of an answer's steps, and their mean."""
    lengths = completion.acceptance_lengths
    return {"steps": len(lengths), "acceptance_lengths": lengths, "tau": completion.tau}


def token_logprobs(completion: Completion, text: Text, start: int = 0, stop: int | None = None) -> list[Json]:
    """Tokens from `start` to `stop`, each with its log-probability and its likeliest alternatives."""

    c, these = completion, slice(start, stop)
    chosen = zip(c.token_ids[these], c.logprobs[these], c.top_logprobs[these], strict=True)
    entry = partial(scored_token, text)
    return [entry(token, p) | {"top": [entry(*other) for other in top]} for token, p, top in chosen]


def scored_token(text: Text, token: int, logprob: float | None) -> Json:
    """A token with its log-probability."""
    special = {"special": True} if text.is_special(token) else {}
    return {"token": text.token(token), "id": token, "logprob": logprob} | special
