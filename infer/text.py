"""Tokenizer, chat template and stop strings. The only user of `transformers` outside the tests."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.infer.requests import RequestError

LEAST_BYTES = 16  # that a text may have per token, however short the tokens of a vocabulary are
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# What `apply_chat_template` takes itself, or is given here: no arguments of a template.
RESERVED = frozenset(
    "self conversation messages chat_template tokenize add_generation_prompt continue_final_message padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs processor_kwargs".split()
)


class Text:
    """Turns prompts into tokens and tokens into text.

    Args:
        directory: checkpoint directory holding the tokenizer files. Without any, only prompts of token ids
            can be served.
        template_arguments: of the chat template, where a call gives no others; see `template_arguments`.
        most_tokens: a text that cannot fit into so many is refused without being tokenized; None refuses none.

    Raises:
        ValueError: there are tokenizer files, but they cannot be used.
    """

    def __init__(
        self, directory: str, template_arguments: Mapping[str, Any] | None = None, most_tokens: int | None = None
    ):
        self.template_arguments = dict(template_arguments or {})
        self._directory, self._tokenizer = directory, None
        self._most_tokens, self._most_bytes = most_tokens, math.inf
        if not any((Path(directory) / name).is_file() for name in TOKENIZER_FILES):
            return
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # tokenizer files are read by several libraries, which raise what they like
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{directory} must hold a tokenizer (tokenizer.json and its config): {reason}") from error
        if most_tokens is not None:
            longest = max((len(token.encode(errors="replace")) for token in self._tokenizer.get_vocab()), default=1)
            self._most_bytes = most_tokens * max(longest, LEAST_BYTES)

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise RequestError(
                "no_tokenizer",
                f"{self._directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); give the prompt as token ids, "
                "without stop strings, or add the files",
            )
        return self._tokenizer

    def encode(self, prompt: str) -> list[int]:
        """Tokens of plain text, with whatever special tokens the tokenizer adds."""
        return self._need_tokenizer().encode(self._checked(prompt))

    def _checked(self, prompt: str) -> str:
        """Returns the text; raises RequestError if it is no UTF-8 or cannot fit into `most_tokens`."""
        if (size := len(valid_text(prompt).encode())) > self._most_bytes:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {size} bytes, which cannot fit into {self._most_tokens} tokens; "
                "shorten it or raise max_length",
            )
        return prompt

    def encode_chat(self, messages: Sequence[Mapping[str, str]], **arguments: Any) -> list[int]:
        """Tokens of a conversation under the chat template, up to where the answer begins.

        Args:
            arguments: of the template, like `enable_thinking`; they win over the ones this was made with.
        """
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise RequestError("no_chat_template", "the target's tokenizer has no chat template; give a plain prompt")
        for message in messages:
            for value in message.values():
                self._checked(value)
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_arguments | arguments
            )
        except Exception as error:  # templates are programs, and raise what they like
            why = f"{error!s:.200}"
            raise RequestError("invalid_messages", f"the chat template refused the messages: {why}") from error
        return tokenizer.encode(self._checked(text), add_special_tokens=False)

    @property
    def end_token(self) -> int | None:
        """The tokenizer's own end token, for checkpoints whose configs name none."""
        return self._tokenizer.eos_token_id if self._tokenizer else None

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return str(self._tokenizer.chat_template) if self.has_chat_template else None

    @property
    def mask_token(self) -> int | None:
        """The tokenizer's mask token, if it has one."""
        return self._tokenizer.mask_token_id if self._tokenizer else None

    @property
    def reserved_tokens(self) -> set[int]:
        """Pad and end token."""
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id) if self._tokenizer else ()
        return {i for i in ids if i is not None}

    @property
    def tokens(self) -> dict[str, int]:
        """The id of every token the tokenizer can produce, by its text."""
        return self._tokenizer.get_vocab() if self._tokenizer else {}

    @property
    def used_tokens(self) -> set[int]:
        """Every token the tokenizer can produce."""
        return set(self._tokenizer.get_vocab().values()) if self._tokenizer else set()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer and self._tokenizer.chat_template)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Text of generated tokens, special tokens left out; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def token(self, token: int) -> str | None:
        """Text of a single token, special or not; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode([token])

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves the token out."""
        return self._tokenizer is not None and token in self._tokenizer.all_special_ids

    def find_stop(self, stops: Sequence[str]) -> Callable[[Sequence[int], int], int | None] | None:
        """A function for `Request.find_stop`: tokens up to the one that completes the first stop string.

        Special tokens count with their own text, so `<|im_end|>` works as a stop string.
        """
        if not stops:
            return None
        # A token is at least one byte or a special token: what a new token completes began no earlier than this.
        reach = max(len(stop.encode()) for stop in stops) + 8
        tokenizer = self._need_tokenizer()

        def find(tokens: Sequence[int], new: int) -> int | None:
            start = max(0, len(tokens) - new - reach)

            def complete(count: int) -> bool:
                text = tokenizer.decode(tokens[start:count])
                return any(stop in text for stop in stops)

            if not complete(len(tokens)):
                return None
            low, high = max(start, len(tokens) - new), len(tokens)  # complete(low) is false, complete(high) is true
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if complete(middle) else (middle, high)
            return high

        return find


def template_arguments(value: Any) -> dict[str, Any]:
    """Arguments for a chat template as a request gives them: a JSON object, or None for none.

    Raises:
        RequestError: it is something else, or names what is no argument of a template.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("invalid_parameter", f"chat_template_kwargs must be an object, got {value!r:.80}")
    if reserved := sorted(RESERVED & value.keys()):
        raise RequestError("invalid_parameter", f"chat_template_kwargs may not set {', '.join(reserved)}")
    return value


def valid_text(value: str) -> str:
    """Returns `value`; raises RequestError if it cannot be written as UTF-8 (lone surrogates)."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("invalid_request", f"the text holds a lone surrogate: {error!s:.100}") from error
    return value


class GrowingText:
    """The text of an answer while its tokens arrive.

    A few tokens are decoded at a time: the new ones, after those before them that may change how they read.

    Args:
        stops: the text ends before the first of these.
    """

    def __init__(self, text: Text, stops: Sequence[str] = ()):
        self._text, self._stops = text, stops
        self._context: list[int] = []  # tokens whose text is whole, before those of `_tokens`
        self._tokens: list[int] = []  # tokens whose text may lack the rest of a character
        self._pending = ""  # text that may turn out to begin a stop string
        self.sent = 0  # characters returned so far

    def add(self, tokens: Sequence[int]) -> str:
        """The text that further tokens settle: without half a character or half a stop string at its end."""
        self._tokens += tokens
        before = self._text.decode(self._context) or ""
        new = (self._text.decode(self._context + self._tokens) or "")[len(before) :]
        if new and not new.endswith("\ufffd"):
            self._pending += new
            self._context, self._tokens = self._tokens, []
        ready = cut_at_stop(self._pending, self._stops) or ""
        if ready == self._pending:
            ready = settled(ready, self._stops)
        self._pending = self._pending[len(ready) :]
        self.sent += len(ready)
        return ready

    def end(self, tokens: Sequence[int]) -> str:
        """What is left of the answer, which has these tokens in all."""
        return (cut_at_stop(self._text.decode(tokens), self._stops) or "")[self.sent :]


def settled(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that is no beginning of a stop string."""
    held = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:size]):
                held = size
                break
    return text[: len(text) - held]


def cut_at_stop(text: str | None, stops: Sequence[str]) -> str | None:
    """The text before the earliest stop string."""
    if text is None:
        return None
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
