"""A request on its way: what it asks of the device, what it has got, and when it is finished."""

from dataclasses import dataclass
from typing import Any

from dflash_jax.decoding.state import RowSettings
from dflash_jax.decoding.step import Committed
from dflash_jax.infer.engine.prompts import Unread
from dflash_jax.infer.engine.requests import Completion, Request


@dataclass(eq=False)
class ActiveRequest:
    """Waiting, then in a slot, where its prompt is read first and then it decodes.

    Attributes:
        budget: tokens it may generate.
        keys: of the prompt's whole chunks (see `prefixes.PrefixCache`).
        settings: for the device; known from its admission on.
        room: tokens it may generate in its slot; if they are fewer than its budget, it moves to a longer one then.
        filled: prompt tokens committed.
    """

    ticket: int
    request: Request
    completion: Completion
    budget: int
    keys: list[bytes]
    settings: RowSettings | None = None
    room: int = 0
    filled: int = 0

    @property
    def decoding(self) -> bool:
        return not self.left and not self.outgrown

    @property
    def outgrown(self) -> bool:
        """Whether its slot is full and it waits for a longer one."""
        return self.room < self.budget and 0 < self.room <= len(self.completion.token_ids)

    def begins_in(self, length: int) -> bool:
        """Whether a slot of so many tokens will do: for all it may generate, or for a prompt that leaves it half free.
        Most answers end before their budget does."""
        prompt = len(self.request.prompt_token_ids)
        return prompt + self.budget <= length or prompt <= length // 2

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not committed."""
        return len(self.request.prompt_token_ids) - self.filled

    def unread(self, slot: int) -> Unread:
        """The prompt, for `slots.Slots.read`."""
        assert self.settings is not None
        return Unread(slot, self.request.prompt_token_ids, self.filled, self.keys, self.settings)

    def extend(self, committed: Committed, at: Any) -> int:
        """Appends the tokens at an index, in order, decides whether that is the end, and returns how many were kept."""
        request, completion = self.request, self.completion
        before, tokens = len(completion.token_ids), committed.tokens[at].tolist()
        completion.token_ids.extend(tokens)
        if request.params.logprobs is not None:
            scores = committed.logprobs
            assert scores is not None
            completion.logprobs.extend(scores.chosen[at].tolist())
            for ids, values in zip(scores.ids[at].tolist(), scores.top[at].tolist(), strict=True):
                completion.top_logprobs.append(list(zip(ids, values, strict=True))[: request.params.logprobs])
        if request.find_stop and (keep := request.find_stop(completion.token_ids, len(tokens))) is not None:
            for tokenwise in (completion.token_ids, completion.logprobs, completion.top_logprobs):
                del tokenwise[keep:]
            completion.finish_reason = "stop"
        elif completion.token_ids[-1] in request.params.ends:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= self.budget:
            completion.finish_reason = "length"
        return len(completion.token_ids) - before
