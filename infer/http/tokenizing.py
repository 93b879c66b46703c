"""Text into tokens and back, as vLLM's clients ask for it."""

from dflash_jax.files import Json
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.infer.fields import check_fields, flag
from dflash_jax.infer.http.asked import read_object
from dflash_jax.infer.plain import refusal
from dflash_jax.infer.text import Text

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def token_ids(raw: bytes, text: Text) -> Json:
    """The tokens that a completion, or an answer to messages, begins with; raises RequestError."""
    try:
        body = read_object(raw)
        check_fields(body, ("prompt", "messages", "add_special_tokens"))
        prompt, messages, special = body.get("prompt"), body.get("messages"), flag(body, "add_special_tokens")
        if (prompt is None) == (messages is None):
            raise invalid("a request for tokens needs a prompt, or messages, and not both", "prompt")
        if messages is not None:
            tokens = text.encode_chat(messages)
        elif isinstance(prompt, str):
            tokens = text.encode_rendered(prompt) if special is False else text.encode(prompt)
        else:
            raise invalid(f"prompt must be a string, got {prompt!r:.60}", "prompt")
    except Exception as error:
        raise refusal(error) from error
    return {"count": len(tokens), "tokens": tokens}


def text_of(raw: bytes, text: Text) -> Json:
    """The text of tokens, special ones left out; raises RequestError."""
    try:
        body = read_object(raw)
        check_fields(body, ("tokens",))
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise invalid(f"tokens must be a list of token ids, got {tokens!r:.60}", "tokens")
        if (found := text.decode(tokens)) is None:
            raise RequestError("no_tokenizer", "the target has no tokenizer; there is no text of its tokens")
    except Exception as error:
        raise refusal(error) from error
    return {"prompt": found}
