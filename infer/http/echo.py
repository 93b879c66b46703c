"""Completions that begin with their prompt, and the log-probabilities of its tokens: what evaluations read."""

from dflash_jax.files import Json
from dflash_jax.infer.answers import scored_token
from dflash_jax.infer.engine.requests import Request
from dflash_jax.infer.engine.scoring import Scores
from dflash_jax.infer.text import Text


def echo(request: Request, text: Text, scores: Scores | None) -> Json:
    """The prompt of a request as the beginning of an answer: `text`, and `logprobs` if it was scored."""
    tokens, asked = request.prompt_token_ids, request.params.logprobs
    found: Json = {"text": text.decode(tokens)}
    if scores is not None:
        first = scored_token(text, tokens[0], None) | {"top": None}  # nothing comes before it
        rest = zip(tokens[1:], scores.logprobs, scores.top, strict=True)
        later = [
            scored_token(text, token, p) | {"top": [scored_token(text, *other) for other in top[:asked]]}
            for token, p, top in rest
        ]
        found["logprobs"] = [first, *later]
    return found


def after(echoed: Json, answer: Json) -> Json:
    """An answer in our own form, after its prompt. Each token counts, special ones too, or positions would shift."""
    if answer["text"] is not None:  # there is a tokenizer
        answer = answer | {"text": echoed["text"] + answer["text"]}
    if (scores := echoed.get("logprobs")) is not None:
        entries = [*scores, *answer.get("logprobs", [])]
        answer["logprobs"] = [{name: value for name, value in entry.items() if name != "special"} for entry in entries]
    return answer
