"""Slots, admission and the host side of decoding.

A fixed batch of slots decodes on the device for several steps per visit; whenever a row finishes, the
next request is prefilled into its slot. What a request gets back does not depend on its neighbours.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.drafter import Drafter
from dflash_jax.infer.requests import Completion, Request, RequestError, check_seed
from dflash_jax.sampling import request_key
from dflash_jax.speculative import Proposals, RowSettings, decode, init_state, prefill, release
from dflash_jax.target import Target

STOP_WIDTH = 8  # stop tokens a row can hold


@dataclass
class Stats:
    """Seconds and steps since the engine was made. A step advances every busy row.

    Attributes:
        steps: device steps.
        row_steps: steps counted once per row they advanced.
        decode_tokens: tokens committed by them; first tokens come from prefill and do not count.
        wall times include the transfer of tokens to the host.
    """

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    decode_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; None before the first step."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length so far; None before the first step."""
        return self.decode_tokens / self.row_steps if self.row_steps else None

    def reset(self) -> None:
        """Back to zero."""
        self.__init__()


@dataclass
class _Row:
    index: int
    request: Request
    completion: Completion = field(default_factory=Completion)


class Engine:
    """Generates for a stream of requests with one target, speculatively if there is a drafter.

    Args:
        target: the model whose output is wanted.
        drafter: its DFlash drafter; None decodes autoregressively.
        slots: rows decoded at the same time.
        max_length: prompt and answer tokens a row can hold.
        block_size: draft slots per step, at most the checkpoint's (the default); 1 does not speculate.
        proposals: see `speculative.drafting`; never changes the output.
        seed: noise of requests without a seed of their own.
        prefill_chunk: prompts are processed in chunks of at most this many tokens.
        steps_per_visit: device steps between two looks of the host.

    Raises:
        ValueError: a drafter of another target, or an argument out of range.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        max_length: int = 2048,
        block_size: int | None = None,
        proposals: Proposals = "coupled",
        seed: int = 0,
        prefill_chunk: int = 256,
        steps_per_visit: int = 16,
    ):
        sizes = {"slots": slots, "max_length": max_length, "prefill_chunk": prefill_chunk}
        for name, value in (sizes | {"steps_per_visit": steps_per_visit}).items():
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} must be at least 1 and below 2**31, got {value}")
        check_seed(seed)
        if proposals not in get_args(Proposals):
            raise ValueError(f"proposals must be one of {', '.join(get_args(Proposals))}; got {proposals!r}")
        if drafter is not None:
            drafter.config.check_pair(target.config)
            block_size = check_block_size(drafter, block_size)
            if drafter.config.proposals(block_size) == 0:
                drafter = None
        self.target, self.drafter = target, drafter
        self.max_length, self.slots, self.seed = max_length, slots, seed
        self.block_size = block_size if drafter else 1
        self.proposals: Proposals = proposals
        self.stats = Stats()
        self._chunks = sorted({min(32, prefill_chunk), prefill_chunk})
        self._capacity = steps_per_visit
        self._state = init_state(target, drafter, slots, max_length, STOP_WIDTH)

    @property
    def width(self) -> int:
        """Most tokens a step can commit per row."""
        return self.drafter.config.proposals(self.block_size) + 1 if self.drafter else 1

    def warm_up(self) -> None:
        """Compiles every program this engine will run; afterwards none is compiled any more."""
        begin = time.perf_counter()
        settings = self._settings(Request([0]))
        for size in self._chunks:
            self._prefill_chunk(0, 0, np.zeros(size, np.int32), 0, False, settings)
        self._visit(0, False)
        self._state = release(self._state, jnp.int32(0))
        jax.block_until_ready(self._state)
        self.stats.compile_seconds += time.perf_counter() - begin

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests; raises RequestError for one that cannot be served."""
        requests = list(requests)
        done = {index: completion for index, completion in self.stream(requests) if completion.finish_reason}
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yields (index of the request, its completion so far) whenever tokens arrived.

        The completion object of a request is the same each time; it is final once it has a finish
        reason. All requests are checked before the first starts.
        """
        for request in requests:
            self.check(request)
        waiting = iter(enumerate(requests))
        left = len(requests)
        rows: list[_Row | None] = [None] * self.slots
        try:
            while True:
                for slot in range(self.slots):
                    while rows[slot] is None and left:
                        left -= 1
                        row = _Row(*next(waiting))
                        self._admit(slot, row)
                        rows[slot] = None if row.completion.finish_reason else row
                        yield row.index, row.completion
                if not any(rows):
                    return
                for slot, row in self._advance(rows, leave_on_finish=left > 0):
                    if row.completion.finish_reason:
                        rows[slot] = None
                    yield row.index, row.completion
        finally:  # a consumer that stops early leaves busy rows behind
            for slot, row in enumerate(rows):
                if row is not None:
                    self._state = release(self._state, jnp.int32(slot))

    def check(self, request: Request) -> None:
        """Raises RequestError if this engine cannot serve the request."""
        request.check(self.target.config.vocab_size, self.max_length)
        if len(request.stop_token_ids) > STOP_WIDTH:
            raise RequestError(
                "invalid_parameter", f"at most {STOP_WIDTH} stop tokens, got {len(request.stop_token_ids)}"
            )

    def _admit(self, slot: int, row: _Row) -> None:
        begin = time.perf_counter()
        prompt = np.asarray(row.request.prompt_token_ids, np.int32)
        settings, start, token = self._settings(row.request), 0, None
        while start < len(prompt):
            left = len(prompt) - start
            size = self._chunks[-1] if left > self._chunks[-1] // 2 else self._chunks[0]
            count = min(size, left)
            chunk = np.zeros(size, np.int32)
            chunk[:count] = prompt[start : start + count]
            token = self._prefill_chunk(slot, start, chunk, count, count == left, settings)
            start += count
        self._extend(row, [int(token)])
        self.stats.prefill_seconds += time.perf_counter() - begin
        if row.completion.finish_reason:
            self._state = release(self._state, jnp.int32(slot))

    def _prefill_chunk(
        self, slot: int, start: int, chunk: np.ndarray, count: int, last: bool, settings: RowSettings
    ) -> jax.Array:
        self._state, token = prefill(
            self.target,
            self.drafter,
            self._state,
            np.int32(slot),
            np.int32(start),
            chunk,
            np.int32(count),
            np.bool_(last),
            settings,
        )
        return token

    def _visit(self, max_steps: int, leave_on_finish: bool) -> tuple[np.ndarray, np.ndarray]:
        self._state, trace = decode(
            self.target,
            self.drafter,
            self._state,
            max_steps,
            leave_on_finish,
            block_size=self.block_size,
            proposals=self.proposals,
            capacity=self._capacity,
        )
        trace = jax.device_get(trace)
        return trace.tokens, trace.count

    def _advance(self, rows: list[_Row | None], leave_on_finish: bool) -> list[tuple[int, _Row]]:
        """One visit to the device; returns the rows that got tokens."""
        begin = time.perf_counter()
        tokens, counts = self._visit(self._capacity, leave_on_finish)
        self.stats.decode_seconds += time.perf_counter() - begin
        self.stats.steps += int(np.sum(counts.any(axis=1)))
        advanced = []
        for slot, row in enumerate(rows):
            if row is None:
                continue
            for step in np.flatnonzero(counts[:, slot]):
                if row.completion.finish_reason:
                    break  # the device ran on past a stop string
                committed = self._extend(row, tokens[step, slot, : counts[step, slot]].tolist())
                self.stats.decode_tokens += committed
                self.stats.row_steps += 1
                if self.drafter:
                    row.completion.acceptance_lengths.append(committed)
            if row.completion.finish_reason and row.request.find_stop:
                self._state = release(self._state, jnp.int32(slot))
            advanced.append((slot, row))
        return advanced

    def _extend(self, row: _Row, tokens: list[int]) -> int:
        """Appends tokens, decides whether the row is finished, and returns how many tokens were kept."""
        request, completion = row.request, row.completion
        before = len(completion.token_ids)
        completion.token_ids.extend(tokens)
        if request.find_stop and (keep := request.find_stop(completion.token_ids, len(tokens))) is not None:
            del completion.token_ids[keep:]
            completion.finish_reason = "stop"
        elif completion.token_ids[-1] in request.stop_token_ids:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= self._budget(request):
            completion.finish_reason = "length"
        return len(completion.token_ids) - before

    def _budget(self, request: Request) -> int:
        return min(request.max_new_tokens, self.max_length - len(request.prompt_token_ids))

    def _settings(self, request: Request) -> RowSettings:
        stops = np.full(STOP_WIDTH, -1, np.int32)
        stops[: len(request.stop_token_ids)] = request.stop_token_ids
        return RowSettings(
            np.int32(self._budget(request)),
            stops,
            np.float32(request.temperature),
            np.int32(request.top_k),
            np.maximum(np.float32(request.top_p), np.finfo(np.float32).tiny),
            request_key(request.seed, self.seed, request.id),
        )


def check_block_size(drafter: Drafter, block_size: int | None) -> int:
    """Returns the block size to use; raises ValueError if it is not one the checkpoint was trained for."""
    largest = drafter.config.block_size
    if block_size is None:
        return largest
    if not 1 <= block_size <= largest:
        raise ValueError(f"block_size must lie in 1..{largest} (the drafter's own), got {block_size}")
    return block_size
