"""What is asked of the engine and what comes back: plain data of the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.params import SamplingParams

MOST_CHARACTERS = 1000  # of a message


class RequestError(ValueError):
    """A request that cannot be served; `code` is stable, the message says what to do, `param` is the field it is about,
    if that is known.

    A message may quote the request. So it is cut where it is long, and what is no text in it is escaped: it can always
    be written.
    """

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message[:MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode())
        self.code, self.param = code, param


def invalid(message: str, param: str | None = None) -> RequestError:
    """The error of a request with a setting that cannot be served."""
    return RequestError("invalid_parameter", message, param)


@dataclass(frozen=True)
class Request:
    """One prompt and its settings.

    Attributes:
        prompt_token_ids: at least one token.
        params: how its tokens are chosen.
        sample: number of this answer, where a prompt is answered more than once; each has its own random numbers.
        id: any string; used to derive the seed of a request without one.
        find_stop: for stop strings. Called on the host as `find_stop(tokens, new)`, where the last `new` of `tokens`
            have just come; returns how many tokens to keep if the answer ends there, or None to go on.
        max_block_size: largest block size of its steps, which changes the speed, and in float32 never the tokens; 1 is
            no speculation, None leaves it to the engine. A step has the largest block size, or the one that pays, that
            the engine has compiled within this limit, so a limit in between counts as the next lower one. It holds for
            requests that run at the same time, too. Below an engine's fixed block size it needs
            `EngineConfig(plain=True)`.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0
    id: str = ""
    find_stop: Callable[[Sequence[int], int], int | None] | None = None
    max_block_size: int | None = None

    def check(self, vocab_size: int, max_length: int) -> None:
        """Raises RequestError if an engine of this vocabulary and length cannot serve it."""
        if not self.prompt_token_ids:
            raise RequestError("empty_prompt", "the prompt is empty; it must have at least one token")
        outside = [token for token in self.prompt_token_ids if not 0 <= token < vocab_size]
        if outside:
            raise RequestError("invalid_token", f"token ids must lie in 0..{vocab_size - 1}, got {outside[0]}")
        if len(self.prompt_token_ids) >= max_length:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(self.prompt_token_ids)} tokens, which leaves no room to generate within a "
                f"length of {max_length}; raise max_length (--max-length)",
            )
        if (most := self.max_block_size) is not None and (type(most) is not int or most < 1):
            raise invalid(f"max_block_size must be an integer of at least 1, got {most!r:.60}; 1 is no speculation")
        try:
            self.params.check()
        except ValueError as error:
            raise invalid(str(error)) from error


@dataclass
class Completion:
    """An answer, complete or in progress.

    Attributes:
        token_ids: generated tokens, the stop token included.
        finish_reason: "stop" at a stop token or stop string, "length" at the maximum length; "" in progress.
        logprobs, top_logprobs: of each generated token, if asked for: its log-probability, and (token, log-probability)
            of the likeliest ones in order. They are the target's own, before penalties, temperature and filters;
            other sequences in the batch may change their last digits.
        sampled_logprobs: of each generated token in the distribution that it was sampled from, after penalties,
            temperature and filters, if the engine serves them (`EngineConfig.sampled_logprobs`); of greedy answers 0.
        sampled_top_logprobs: of each generated token, the likeliest tokens in that distribution, like `top_logprobs`;
            tokens that it cannot pick are not among them.
        acceptance_lengths: tokens that each step of an engine with a drafter added, also of those without speculation.
            The first token comes from the prefill and belongs to no step.
        proposed_tokens: number of draft tokens in these steps: nodes of trees, or of chains.
        draft: of its last steps, and how many tokens each of them proposed; None before the first.
        features: of prompt and answer but for its last token, [positions, FD], if they are kept
            (`EngineConfig.keep_features`): outputs of the layers that the drafter taps, side by side.
        prompt_tokens, sample: of the request.
        cached_tokens: of the prompt, those that were copied from an earlier prompt instead of read.
        versions: of the weights that it comes from, and the first token of each part, as an index of `token_ids`; see
            `Engine.update`.
        submitted, started, first_token, finished: when, in seconds of `time.perf_counter`; 0 is not yet.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    sampled_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    proposed_tokens: int = 0
    draft: tuple[Draft, int] | None = field(default=None, compare=False)
    features: np.ndarray | None = field(default=None, compare=False)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sample: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def begin_part(self, version: int) -> None:
        """What follows comes from weights of this version."""
        if self.versions and self.versions[-1][1] == len(self.token_ids):  # it has given no token
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.token_ids)))

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, the bonus token included; None without a step."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else None
