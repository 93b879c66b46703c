"""How a request wants its tokens chosen: one value, from the command line or the input line to the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.constraints.constraint import Constraint
from dflash_jax.decoding.penalties import Penalties, check_penalties
from dflash_jax.decoding.sampling import Sampling, check_sampling, request_key
from dflash_jax.decoding.state import RowSettings

MOST_TOKENS = np.iinfo(np.int32).max
STOP_WIDTH = 16  # stop tokens a row can hold
MOST_ALTERNATIVES = 20  # log-probabilities per token, that a line or an HTTP request may ask for


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed outside 63 bits."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in 0..2**63 - 1, got {seed}")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. None of them is changed by speculation.

    Attributes:
        max_new_tokens: maximum number of generated tokens; fewer if the engine's `max_length` is reached.
        temperature: divides the logits; 0 is greedy.
        top_k: keeps the k likeliest tokens; 0 keeps all.
        top_p: of those, keeps the smallest set whose probability reaches top_p; 1 keeps all.
        min_p: then drops tokens that are less likely than min_p times the likeliest; 0 drops none.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer; 1 is none.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once, or once per
            occurrence; 0 is none.
        seed: random seed of this request; None derives one from the engine's seed and the request's id.
        logprobs: how many of the likeliest tokens to return the log-probabilities of, besides the chosen one's, at
            most the engine's `logprobs`; None returns none.
        stop_token_ids: tokens that end the answer; the one that does is its last token.
        eos_token_ids: the model's own end tokens, which end the answer, too, if `ignore_eos` is false. None are set by
            default: pass `target.config.eos_token_ids`. Both together may be 16.
        ignore_eos: go on after the model's own end tokens.
        min_tokens: minimum number of tokens before a stop token or stop string may end the answer: until then the model
            chooses among the other tokens. Where a constraint allows nothing but an end, the answer ends.
        constraint: what the answer must look like (see `dflash_jax.constraints`); needs an engine with
            `EngineConfig(constraints=True)`, and `eos_token_ids`. None is anything.

    Values are checked when a request is given to an engine, which raises `RequestError`, a ValueError.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    constraint: Constraint | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end the answer."""
        return tuple(dict.fromkeys((() if self.ignore_eos else self.eos_token_ids) + self.stop_token_ids))

    def check(self) -> None:
        """Raises ValueError for a setting out of range."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed is not None:
            check_seed(self.seed)
        check_sampling(self.temperature, self.top_p, self.top_k, self.min_p)
        check_penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if len(self.ends) > STOP_WIDTH:
            raise ValueError(
                f"stop_token_ids and the model's end tokens may be at most {STOP_WIDTH} together, got {len(self.ends)}"
            )
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0..{self.max_new_tokens}, the most tokens of the answer; got {self.min_tokens}"
            )

    def on_device(
        self, request_id: str, sample: int, engine_seed: int, budget: int, prompt: int = MOST_TOKENS
    ) -> RowSettings:
        """Settings of a row: those of the request named `request_id`, of which this is answer number `sample` and may
        have `budget` more tokens; `engine_seed` is the noise of requests without a seed of their own. Of what is read,
        `prompt` tokens are the prompt."""
        stops = np.full(STOP_WIDTH, -1, np.int32)
        stops[: len(self.ends)] = self.ends
        sampling = Sampling(
            _host(self.temperature, np.float32),
            _host(self.top_k, np.int32),
            _host(max(self.top_p, float(np.finfo(np.float32).tiny)), np.float32),
            _host(self.min_p, np.float32),
            request_key(self.seed, engine_seed, request_id, sample),
        )
        penalties = Penalties(
            _host(self.repetition_penalty, np.float32),
            _host(self.presence_penalty, np.float32),
            _host(self.frequency_penalty, np.float32),
            _host(self.min_tokens, np.int32),
        )
        scored = _host(self.logprobs is not None, np.bool_)
        budgets = _host(budget, np.int32), _host(stops, np.int32)
        return RowSettings(*budgets, sampling, penalties, scored, prompt=_host(prompt, np.int32))


def _host(value: float | np.ndarray, dtype: type[np.generic]) -> Any:
    """An array on the host in the place of one on the device: the program that takes it brings it there."""
    return np.asarray(value, dtype)
