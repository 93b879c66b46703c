"""Prompts and chat messages into tokens, tokens into text, and stop strings."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_jax.constraints.tools.format import Format
from dflash_jax.constraints.tools.formats import FORMATS, format_of
from dflash_jax.files import Fields, Json
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.infer.messages import strings_in, template_messages
from dflash_jax.vocabulary import TOKENIZER_FILES, load_tokenizer

FIRST_MARK = 0xFDD0  # the first of 32 characters that no text should have: they stand for special tokens
LEAST_BYTES = 16  # that a text may have per token, however short the tokens of a vocabulary are
# What `apply_chat_template` takes itself, or is given here: no arguments of a template.
RESERVED = frozenset(
    "self conversation messages tools chat_template tokenize add_generation_prompt continue_final_message padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "processor_kwargs".split()
)


class Text:
    """Turns prompts into tokens and tokens into text.

    Args:
        directory: checkpoint directory holding the tokenizer files. Without any, only prompts of token ids
            can be served.
        template_arguments: of the chat template, where a call gives no others; see `template_arguments`.
        most_tokens: a text that cannot fit into so many is refused without being tokenized; None refuses none.
        tool_format: name of the format in which the family writes reasoning and calls (`FORMATS`); None is what the
            chat template shows.
        chat_template: Jinja source, in place of the tokenizer's own.

    Raises:
        ValueError: there are tokenizer files, but they cannot be used, or the format is unknown.
    """

    def __init__(
        self,
        directory: str,
        template_arguments: Fields | None = None,
        most_tokens: int | None = None,
        tool_format: str | None = None,
        chat_template: str | None = None,
    ):
        if tool_format is not None and tool_format not in FORMATS:
            raise ValueError(f"--tool-format must be one of {', '.join(FORMATS)}, got {tool_format!r:.60}")
        self.tool_format = tool_format
        self.template_arguments = dict(template_arguments or {})
        self._directory, self._tokenizer = directory, load_tokenizer(Path(directory))
        if chat_template is not None:
            if self._tokenizer is None:
                raise ValueError(f"a chat template needs a tokenizer, but {directory} holds none; add its files")
            self._tokenizer.chat_template = chat_template
        self._most_tokens, self._most_bytes = most_tokens, math.inf
        if self._tokenizer is not None and most_tokens is not None:
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

    def encode_chat(self, messages: Any, **arguments: Any) -> list[int]:
        """Tokens of a conversation; see `render`."""
        return self.encode_rendered(self.render(messages, **arguments))

    def render(self, messages: Any, tools: Sequence[Json] = (), **arguments: Any) -> str:
        """A conversation under the chat template, up to where the answer begins.

        Args:
            messages: as a request gives them; see `messages.template_messages`.
            tools: that the model may call, as OpenAI's requests have them.
            arguments: of the template, like `enable_thinking`; they win over the ones this was made with.

        Raises:
            RequestError: there is no template, the messages are none for it, or it prints no tools.
        """
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise RequestError("no_chat_template", "the target's tokenizer has no chat template; give a plain prompt")
        for text in strings_in([messages, *tools]):
            self._checked(text)
        given = template_messages(messages, str(tokenizer.chat_template))
        if self.format is not None:
            given = self.format.messages(given, tools)
        if tools and not (self.format is not None and self.format.describes):
            if not self._prints_tools:
                raise RequestError(
                    "no_tool_template", "the target's chat template prints no tools; leave them out", "tools"
                )
            arguments["tools"] = list(tools)
        arguments = self.template_arguments | arguments
        try:
            return self._rendered(given, arguments)
        except RequestError:
            if not tools or "tools" not in arguments:
                raise
            # Some templates need what OpenAI's requests may leave out.
            return self._rendered(given, arguments | {"tools": [_whole(tool) for tool in tools]})

    def answered(self, messages: object) -> list[tuple[str, bool]]:
        """A conversation with its answers under the chat template, in pieces that follow one another, each with whether
        it is an answer. If the template shows earlier answers in another way than the last one, as some do that leave
        out reasoning, only the last one is a piece of its own.

        Raises:
            RequestError: as `render`; or there is no answer, or the template does not put it behind its prompt.
        """
        pieces, done = list[tuple[str, bool]](), ""
        messages = messages if isinstance(messages, list) else []
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            prompt = self.render(messages[:i]) if i else ""
            given = template_messages(messages[: i + 1], str(self._need_tokenizer().chat_template))
            whole = self._rendered(given, self.template_arguments, ended=True)
            if not i or not whole.startswith(prompt):
                raise invalid(
                    "messages must begin with a question, and the template must put answers behind what was asked"
                )
            if not prompt.startswith(done):
                pieces, done = [], ""
            pieces += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
            done = whole
        if not pieces:
            raise invalid("messages must have an answer, of the role assistant")
        return pieces

    def _rendered(self, messages: Sequence[Json], arguments: Fields, *, ended: bool = False) -> str:
        try:
            return self._need_tokenizer().apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not ended, **arguments
            )
        except Exception as error:  # templates are programs, and raise what they like
            why = f"{error!s:.200}" or type(error).__name__
            raise RequestError("invalid_messages", f"the chat template refused the messages: {why}") from error

    def encode_rendered(self, prompt: str) -> list[int]:
        """Tokens of what a template has rendered, special tokens included."""
        return self._need_tokenizer().encode(self._checked(prompt), add_special_tokens=False)

    @cached_property
    def _prints_tools(self) -> bool:
        """Whether the chat template reads its argument `tools`."""
        name = "function_of_a_trial"
        tool = {
            "type": "function",
            "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}},
        }
        try:
            return name in self._rendered([{"role": "user", "content": "x"}], {"tools": [tool]})
        except RequestError:
            return False

    @cached_property
    def format(self) -> Format | None:
        """How the family writes reasoning and calls; None if that is not known."""
        if self.tool_format is not None:
            return FORMATS[self.tool_format]
        return format_of(self.chat_template or "")

    @cached_property
    def marks(self) -> Mapping[str, tuple[int, str]]:
        """The marks of the format that are special tokens: the token of each, and a character that stands for it."""
        if self.format is None or self._tokenizer is None:
            return {}
        names = self.format.marks
        ids = {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items()}
        return {name: (ids[name], chr(FIRST_MARK + place)) for place, name in enumerate(names) if name in ids}

    def reasoning_arguments(self, effort: Any) -> Json:
        """Arguments of the chat template for OpenAI's `reasoning_effort`; none if the template takes no such thing.

        Raises:
            RequestError: the effort is no string.
        """
        if effort is None:
            return {}
        if not isinstance(effort, str):
            raise invalid(f"reasoning_effort must be a string, got {effort!r:.60}")
        template = self.chat_template or ""
        if "reasoning_effort" in template:
            return {"reasoning_effort": valid_text(effort)}
        return {"enable_thinking": False} if effort == "none" and "enable_thinking" in template else {}

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
    def used_tokens(self) -> set[int]:
        """Every token the tokenizer can produce."""
        return set(self._tokenizer.get_vocab().values()) if self._tokenizer else set()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer and self._tokenizer.chat_template)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Text of generated tokens, special tokens left out; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)

    def token(self, token: int) -> str | None:
        """Text of a single token, special or not; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode([token])

    def is_special(self, token: int) -> bool:
        """Whether a token is special, so that `decode` leaves it out."""
        return self._tokenizer is not None and token in self._tokenizer.all_special_ids

    def answer(self, tokens: Sequence[int], stops: Sequence[str] = (), after: int = 0) -> str | None:
        """Text of a whole answer, cut at the stop string that ended it (see `find_stop`); None without a tokenizer."""
        text = self.decode(tokens)
        if text is None or not stops:
            return text
        early = self.decode(tokens[:after]) if after else None
        return cut_at_stop(text, stops, len(_settled_characters(early or "")))

    def find_stop(self, stops: Sequence[str], after: int = 0) -> Callable[[Sequence[int], int], int | None] | None:
        """A function for `Request.find_stop`: the least number of tokens whose text, as the tokenizer decodes it, has a
        stop string. It does not depend on how many tokens come at a time.

        Special tokens count with their own text, so `<|im_end|>` works as a stop string.

        Args:
            after: of the first so many tokens none completes a stop string (see `SamplingParams.min_tokens`).
        """
        if not stops:
            return None
        tokenizer = self._need_tokenizer()
        # A further token adds to the text before it and changes nothing of it, but for half a character at its end,
        # which reads as U+FFFD, and for blanks that some tokenizers clean up.
        adds = not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        adds &= not any("\ufffd" in stop for stop in stops)
        # A token is at least one byte or a special token: what a new token completes began no earlier than this.
        reach = max(len(stop.encode()) for stop in stops) + 8

        def find(tokens: Sequence[int], new: int) -> int | None:
            first = max(len(tokens) - new, after)
            start = max(0, first - reach) if adds else 0
            early = tokenizer.decode(tokens[start:after]) if start < after else ""
            begin = len(_settled_characters(early))

            def ended(count: int) -> bool:
                return _stop_place(tokenizer.decode(tokens[start:count]), stops, begin) is not None

            if adds and not ended(len(tokens)):
                return None
            return next((count for count in range(first + 1, len(tokens) + 1) if ended(count)), None)

        return find


def _whole(tool: Json) -> Json:
    """A tool with all parts of a function."""
    given = {name: value for name, value in tool["function"].items() if value is not None}
    function = {"description": "", "parameters": {"type": "object", "properties": {}}} | given
    return {"type": "function", "function": function}


def template_arguments(value: Any) -> Json:
    """Arguments for a chat template as a request gives them: a JSON object, or None for none.

    Raises:
        RequestError: it is something else, or names what is no argument of a template.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"chat_template_kwargs must be an object, got {value!r:.80}")
    if reserved := sorted(RESERVED & value.keys()):
        raise invalid(f"chat_template_kwargs may not set {', '.join(reserved)}")
    return value


def valid_text(value: str) -> str:
    """Returns `value`; raises RequestError if it cannot be written as UTF-8 (lone surrogates)."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("invalid_request", f"the text holds a lone surrogate: {error!s:.100}") from error
    return value


class GrowingText:
    """The text of an answer while its tokens arrive; `stops` and `after` as in `Text.find_stop`.

    A few tokens are decoded at a time: the new ones, after those before them that may change how they read.
    """

    def __init__(self, text: Text, stops: Sequence[str] = (), after: int = 0):
        self._text, self._stops, self._after = text, stops, after
        self._count = 0  # tokens so far
        self._begin = 0  # characters of `_pending` that complete no stop string
        self._context: list[int] = []  # tokens whose text is whole, before those of `_tokens`
        self._tokens: list[int] = []  # tokens whose text may lack the rest of a character
        self._pending = ""  # text that may turn out to begin a stop string
        self.sent = 0  # characters returned so far

    def add(self, tokens: Sequence[int]) -> str:
        """The text that further tokens settle: without half a character or half a stop string at its end."""
        if early := list(tokens[: max(0, self._after - self._count)]):
            half = self._take(early)
            self._begin = len(self._pending) + len(_settled_characters(half))
        self._take(tokens[len(early) :])
        self._count += len(tokens)
        place = _stop_place(self._pending, self._stops, self._begin)
        ready = settled(self._pending, self._stops) if place is None else self._pending[:place]
        self._pending = self._pending[len(ready) :]
        self._begin = max(0, self._begin - len(ready))
        self.sent += len(ready)
        return ready

    def _take(self, tokens: Sequence[int]) -> str:
        """Adds the text of tokens to what is pending, or returns it if it ends in half a character."""
        self._tokens += tokens
        before = self._text.decode(self._context) or ""
        new = (self._text.decode(self._context + self._tokens) or "")[len(before) :]
        if not new or new.endswith("\ufffd"):
            return new
        self._pending += new
        self._context, self._tokens = self._tokens, []
        return ""

    def end(self, tokens: Sequence[int]) -> str:
        """The rest of the answer, which has these tokens in all."""
        return (self._text.answer(tokens, self._stops, self._after) or "")[self.sent :]


def settled(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that is no beginning of a stop string."""
    held = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:size]):
                held = size
                break
    return text[: len(text) - held]


def cut_at_stop(text: str, stops: Sequence[str], begin: int = 0) -> str:
    """The text before the earliest stop string that ends after its first `begin` characters."""
    return text[: _stop_place(text, stops, begin)]


def _stop_place(text: str, stops: Sequence[str], begin: int) -> int | None:
    """Where the earliest stop string begins that ends after the first `begin` characters; None if there is none."""
    places = (text.find(stop, max(0, begin - len(stop) + 1)) for stop in stops)
    return min((place for place in places if place >= 0), default=None)


def _settled_characters(text: str) -> str:
    """The text without what may be half a character at its end."""
    return text.rstrip("\ufffd")
