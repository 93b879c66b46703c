"""A request on its way: what it asks of the device, what it has got, and when it is finished."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.decoding.penalties import Penalties
from dflash_jax.decoding.sampling import Sampling, request_key
from dflash_jax.decoding.step import Committed, RowSettings
from dflash_jax.infer.requests import Completion, Request

STOP_WIDTH = 8  # stop tokens a row can hold


@dataclass(eq=False)
class Row:
    """Waiting, then in a slot, where it is first filled and then decoded.

    Attributes:
        budget: tokens it may generate.
        settings: for the device; known from its admission on.
        keys: of the prompt's whole chunks (see `prefixes.PrefixCache`).
        filled: prompt tokens committed.
        drafted: whether they are in the draft cache, too.
    """

    ticket: int
    request: Request
    completion: Completion
    budget: int
    keys: list[bytes]
    settings: RowSettings | None = None
    filled: int = 0
    drafted: bool = True

    @property
    def decoding(self) -> bool:
        return self.filled == len(self.request.prompt_token_ids)

    def extend(self, committed: Committed, at: Any) -> int:
        """Appends the tokens at an index, decides whether that is the end, and returns how many of them were kept."""
        request, completion = self.request, self.completion
        before, tokens = len(completion.token_ids), committed.tokens[at].tolist()
        completion.token_ids.extend(tokens)
        if request.logprobs is not None:
            told = committed.logprobs
            completion.logprobs.extend(told.chosen[at].tolist())
            for ids, values in zip(told.ids[at].tolist(), told.top[at].tolist(), strict=True):
                completion.top_logprobs.append(list(zip(ids, values, strict=True))[: request.logprobs])
        if request.find_stop and (keep := request.find_stop(completion.token_ids, len(tokens))) is not None:
            for tokenwise in (completion.token_ids, completion.logprobs, completion.top_logprobs):
                del tokenwise[keep:]
            completion.finish_reason = "stop"
        elif completion.token_ids[-1] in request.stop_token_ids:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= self.budget:
            completion.finish_reason = "length"
        return len(completion.token_ids) - before


def row_settings(request: Request, budget: int, job_seed: int) -> RowSettings:
    """What the device has to know of a request; `job_seed` is the noise of those without a seed of their own."""
    stops = np.full(STOP_WIDTH, -1, np.int32)
    stops[: len(request.stop_token_ids)] = request.stop_token_ids
    sampling = Sampling(
        np.float32(request.temperature),
        np.int32(request.top_k),
        np.maximum(np.float32(request.top_p), np.finfo(np.float32).tiny),
        np.float32(request.min_p),
        request_key(request.seed, job_seed, request.id, request.sample),
    )
    penalties = Penalties(
        np.float32(request.repetition_penalty),
        np.float32(request.presence_penalty),
        np.float32(request.frequency_penalty),
    )
    return RowSettings(np.int32(budget), stops, sampling, penalties, np.bool_(request.logprobs is not None))
