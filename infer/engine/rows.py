"""A request on its way: what it asks of the device, what it has got, and when it is finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflash_jax.decoding.automata import Walk
from dflash_jax.decoding.state import RowSettings
from dflash_jax.decoding.step import Committed
from dflash_jax.infer.engine.chooser import Outcome
from dflash_jax.infer.engine.constraints import Ready
from dflash_jax.infer.engine.requests import Completion, Request


@dataclass(eq=False)
class ActiveRequest:
    """Waiting, then in a slot, where its prompt is read first and then it decodes.

    Attributes:
        budget: tokens it may generate.
        keys: of the prompt's whole chunks (see `prefixes.PrefixIndex`).
        settings: for the device; known from its admission on.
        filled: prompt tokens committed.
        read: tokens of the answer that are read as the prompt is, since the row has left a slot that it was in.
        left_slots: how many it has left.
        constraint: of the answer; None is none.
        walk: where it begins in the automata of the engine, in a slot.
    """

    ticket: int
    request: Request
    completion: Completion
    budget: int
    keys: list[bytes]
    settings: RowSettings = field(init=False)
    filled: int = 0
    read: int = 0
    left_slots: int = 0
    constraint: Ready | None = None
    walk: Walk | None = None

    @property
    def prompt(self) -> Sequence[int]:
        given = self.request.prompt_token_ids
        return [*given, *self.completion.token_ids[: self.read]] if self.read else given

    @property
    def decoding(self) -> bool:
        return not self.left

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not committed."""
        return len(self.prompt) - self.filled

    def on_device(self, engine_seed: int) -> RowSettings:
        """Its settings for what it may still generate."""
        request, left = self.request, self.budget - len(self.completion.token_ids)
        how = request.id, request.sample, engine_seed, left, len(request.prompt_token_ids)
        return request.params.on_device(*how)._replace(walk=self.walk)

    def most(self, more: int) -> int:
        """Tokens that it holds at most after so many more."""
        generated = min(len(self.completion.token_ids) + more, self.budget)
        return len(self.request.prompt_token_ids) + generated

    def leave(self) -> None:
        """It has left its slot, and what it has got so far is to be read again."""
        self.filled, self.read = 0, len(self.completion.token_ids)
        self.left_slots += 1

    def advance(
        self, trace: Committed, at: int, committed: np.ndarray, proposed: int | None, page: int | None = None
    ) -> tuple[list[int], Outcome] | None:
        """Takes its tokens of a visit.

        Args:
            trace: of the visit, in which it is row `at`.
            committed: which of its tokens [steps, most of a step] count.
            proposed: tokens that each step proposed for it, and verified but for a budget; None without a drafter.
            page: positions of a page of memory, at the end of which a step may have been cut; None is no such end.

        Returns:
            How many tokens of each step it has kept, and what its chooser learns of that; None if it got none.
        """
        step, place = np.nonzero(committed)
        if not step.size:
            return None
        kept = self.extend(trace, (step, at, place))
        counts = np.bincount(step[:kept])  # of each step; the device runs on past a stop string
        counts = counts[counts > 0].tolist()
        of_steps = lambda x: x[: len(counts), at].tolist()
        chain = None if trace.forecast is None else of_steps(trace.forecast.chain)
        verified, following = (None, None) if trace.limited is None else map(of_steps, jax.tree.leaves(trace.limited))
        if proposed is not None:
            self.completion.acceptance_lengths.extend(counts)
            self.completion.proposed_tokens += sum(verified) if verified else len(counts) * proposed
        # What cut a row's last step was its end or that of its page, not a wrong proposal.
        full = page is not None and self.most(0) % page == 0
        uncut = slice(-1 if self.completion.finish_reason or full else None)
        more = (some and some[uncut] for some in (chain, verified, following))
        return counts, Outcome(counts[uncut], *more)

    def extend(self, committed: Committed, at: Any) -> int:
        """Appends the tokens at an index, in order, decides whether that is the end, and returns how many were kept."""
        request, completion = self.request, self.completion
        before, tokens = len(completion.token_ids), committed.tokens[at].tolist()
        completion.token_ids.extend(tokens)
        if request.params.logprobs is not None:
            scores = committed.logprobs
            assert scores is not None
            completion.logprobs.extend(scores.chosen[at].tolist())
            completion.sampled_logprobs.extend([] if scores.sampled is None else scores.sampled[at].tolist())
            count = request.params.logprobs
            completion.top_logprobs.extend(_pairs(scores.ids[at].tolist(), scores.top[at].tolist(), count))
            if scores.sampled_ids is not None and scores.sampled_top is not None:
                found = _pairs(scores.sampled_ids[at].tolist(), scores.sampled_top[at].tolist(), count)
                completion.sampled_top_logprobs.extend([pair for pair in pairs if pair[1] > -np.inf] for pairs in found)
        if request.find_stop and (keep := request.find_stop(completion.token_ids, len(tokens))) is not None:
            scores = completion.logprobs, completion.sampled_logprobs
            for tokenwise in (completion.token_ids, *scores, completion.top_logprobs, completion.sampled_top_logprobs):
                del tokenwise[keep:]
            completion.finish_reason = "stop"
        elif completion.token_ids[-1] in request.params.ends:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= self.budget:
            completion.finish_reason = "length"
        return len(completion.token_ids) - before


def _pairs(ids: list[list[int]], values: list[list[float]], count: int) -> list[list[tuple[int, float]]]:
    """The first tokens of each position, with their values."""
    return [list(zip(*both, strict=True))[:count] for both in zip(ids, values, strict=True)]
