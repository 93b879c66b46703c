"""The OpenAI forms of requests and answers: batch lines in, batch records out."""

import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.files import Fields, Json
from dflash_jax.infer.engine.params import MOST_ALTERNATIVES
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.infer.fields import BODY, COMMON, check_fields, flag
from dflash_jax.infer.text import valid_text

LONGEST_NAME = 256  # characters of a model's name
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class BatchLine(NamedTuple):
    """Endpoint and model of a batch line, for its record."""

    endpoint: str
    model: str


def plain_line(row: Fields) -> tuple[Json, BatchLine]:
    """The plain form of a batch line `{"custom_id", "method", "url", "body"}`; raises RequestError."""
    if row.get("method") != "POST" or row.get("url") not in (CHAT, TEXT):
        found = f"method {row.get('method')!r:.80} and url {row.get('url')!r:.80}"
        raise RequestError("invalid_request", f"a batch line needs method POST and url {CHAT} or {TEXT}, got {found}")
    body = row.get("body")
    if not isinstance(body, dict):
        raise RequestError("invalid_request", f"body must be an object, got {type(body).__name__}")
    return plain_body(body, row["url"]), BatchLine(row["url"], model_name(body))


def model_name(body: Fields, default: str = "dflash-jax") -> str:
    """The model that a request body names; raises RequestError if it is no name."""
    name = body.get("model")
    if name is None or name == "":
        return default
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise invalid(f"model must be a string of at most {LONGEST_NAME} characters")
    return valid_text(name)


def plain_body(body: Fields, endpoint: str) -> Json:
    """The plain form of a request body; raises RequestError for a field that would be ignored (see `fields`)."""
    # A chat template writes the special tokens itself; plain text gets the tokenizer's.
    done = lambda name, value: name == "add_special_tokens" and value is (endpoint == TEXT)
    check_fields({name: value for name, value in body.items() if not done(name, value)}, BODY)
    plain = {name: body[name] for name in COMMON if name in body}
    if (alternatives := _alternatives(body, endpoint)) is not None:
        plain["logprobs"] = alternatives
    if endpoint == CHAT:
        if body.get("prompt") is not None or body.get("messages") is None:
            raise RequestError("invalid_request", f"{CHAT} needs messages, and no prompt")
        return plain | {"messages": body["messages"]}
    if body.get("messages") is not None or body.get("prompt") is None:
        raise RequestError("invalid_request", f"{TEXT} needs a prompt, and no messages")
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return plain | {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return plain | {"prompt_token_ids": prompt}
    hint = "; send a request for each of several prompts" if isinstance(prompt, list) and len(prompt) > 1 else ""
    raise RequestError("invalid_request", f"prompt must be a string or a list of token ids, got {prompt!r:.80}{hint}")


def _alternatives(body: Fields, endpoint: str) -> int | None:
    """How many log-probabilities per token are asked for besides the chosen one's; None is none at all."""
    given, most = body.get("logprobs"), body.get("top_logprobs")
    if endpoint == CHAT:
        if most and not flag(body, "logprobs"):
            raise invalid("top_logprobs needs logprobs true")
        name, count = "top_logprobs", (most or 0) if flag(body, "logprobs") else None
    elif most is not None:
        raise invalid(f"top_logprobs is of {CHAT}; {TEXT} takes a number as logprobs")
    else:
        name, count = "logprobs", None if given is False else given
    if count is not None and (type(count) is not int or not 0 <= count <= MOST_ALTERNATIVES):
        raise invalid(f"{name} must be an integer in 0..{MOST_ALTERNATIVES}, got {count!r:.60}")
    return count


def logprobs(endpoint: str, entries: Sequence[Fields] | None) -> Json | None:
    """Our own entries per token in OpenAI's form, tokens that are no text left out."""
    if entries is None:
        return None
    entries = [entry for entry in entries if "special" not in entry]
    if endpoint == CHAT:
        return {"content": [_scored(entry) | {"top_logprobs": list(map(_scored, entry["top"]))} for entry in entries]}
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [None if entry["top"] is None else _likeliest(entry["top"]) for entry in entries],
    }


def _likeliest(entries: Sequence[Fields]) -> Json:
    """Log-probabilities by text. Of tokens with the same one, such as halves of characters, the likeliest counts."""
    return {entry["token"]: entry["logprob"] for entry in reversed(entries)} | {
        entry["token"]: entry["logprob"] for entry in entries[:1]
    }


def _scored(entry: Fields) -> Json:
    token = entry["token"] or ""
    # Half a character has no bytes of its own that the tokenizer would tell.
    known = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": entry["logprob"], "bytes": known}


def body(endpoint: str, model: str, answers: Sequence[Fields]) -> Json:
    """A response body for the answers to one prompt, in our own form; with their `speculation` in addition."""
    choices = []
    for index, answer in enumerate(answers):
        scores = logprobs(endpoint, answer.get("logprobs"))
        choice = {"index": index, "logprobs": scores, "finish_reason": answer["finish_reason"]}
        if endpoint == CHAT:
            text = {"role": "assistant", "content": answer["text"], "refusal": None}
            choice["message"] = answer.get("message", text)
        else:
            choice["text"] = answer["text"]
        choices.append(choice)
    kind = "chat.completion" if endpoint == CHAT else "text_completion"
    generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    speculation = [answer["speculation"] for answer in answers]
    return envelope(endpoint, kind, model) | {
        "choices": choices,
        "usage": usage(answers[0]["usage"]["prompt_tokens"], generated),
        "speculation": speculation[0] if len(speculation) == 1 else speculation,
    }


def envelope(endpoint: str, kind: str, model: str) -> Json:
    """The fields every response object begins with."""
    name = ("chatcmpl-" if endpoint == CHAT else "cmpl-") + uuid.uuid4().hex
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, generated: int) -> Json:
    """Tokens of the prompt, of all answers to it, and their sum."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def chunk_choice(
    endpoint: str,
    text: str,
    finish_reason: str | None,
    first: bool,
    scores: Sequence[Fields] | None,
    parts: Json | None = None,
) -> Json:
    """The choice of a streamed chunk, without its index; `parts` is its delta where an answer has more than text."""
    choice: Json = {"logprobs": logprobs(endpoint, scores), "finish_reason": finish_reason}
    if endpoint != CHAT:
        return choice | {"text": text}
    role = {"role": "assistant"} if first else {}
    if parts is not None:
        return choice | {"delta": role | parts}
    delta = role | ({"content": text} if text or first else {})
    return choice | {"delta": delta}


def batch_record(custom_id: str, batch: BatchLine, answers: Sequence[Fields]) -> Json:
    """The batch output line of an answered request."""
    name = f"batch_req_{uuid.uuid4().hex}"
    response = {"status_code": 200, "request_id": name, "body": body(batch.endpoint, batch.model, answers)}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


def batch_error(custom_id: str, error: RequestError) -> Json:
    """The batch output line of a request that cannot be served."""
    name, said = f"batch_req_{uuid.uuid4().hex}", {"code": error.code, "message": str(error)}
    return {"id": name, "custom_id": custom_id, "response": None, "error": said}
