"""The slots of an engine on the device: their state, and the compiled programs that change it."""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.step import Committed, Proposals, RowSettings, init_state
from dflash_jax.drafters.dflash import Drafter
from dflash_jax.infer.prefixes import PrefixCache
from dflash_jax.infer.programs import decode_call, prefill, release
from dflash_jax.infer.requests import Request
from dflash_jax.infer.rows import STOP_WIDTH, row_settings
from dflash_jax.mesh import mesh_of
from dflash_jax.sharding import pin
from dflash_jax.target import Target


class Batch:
    """Rows that decode together. Which requests they belong to is the engine's business.

    Args:
        target, drafter, proposals, prefix_chunks, logprobs: see `Engine`.
        slots: rows.
        max_length: tokens a row can hold.
        chunk: prompts are read in chunks of at most so many tokens.
        block_sizes: what `decode` may be asked for. If 0 is among them, 1 does not propose anything either but keeps
            the draft cache up to date, which 0 does not.
        steps_per_visit: at most.

    Attributes:
        state: consumed and replaced by every call.
        draft_optional: whether a prompt may be left out of the draft cache; not where its chunks are kept for others.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        slots: int,
        max_length: int,
        *,
        chunk: int,
        block_sizes: Sequence[int],
        steps_per_visit: int,
        proposals: Proposals,
        prefix_chunks: int,
        logprobs: int | None,
    ):
        self._target, self._drafter, self._slots, self._max_length = target, drafter, slots, max_length
        self._chunks = sorted({min(32, chunk), chunk})
        self._block_sizes, self._steps_per_visit = tuple(block_sizes), steps_per_visit
        self._proposals: Proposals = proposals
        self._logprobs = logprobs
        mesh = mesh_of(target.params)
        self._on_mesh = nullcontext if mesh is None else lambda: jax.set_mesh(mesh)
        with self._on_mesh():
            made = jax.jit(lambda: pin(init_state(target, drafter, slots, max_length, STOP_WIDTH)))()
            self.state = jax.block_until_ready(made)  # if there is no memory, say so here
            self._prefixes = PrefixCache(self.state, prefix_chunks, chunk)
        self.draft_optional = 0 in self._block_sizes and not prefix_chunks

    @property
    def programs(self) -> int:
        """How many `warm_up` compiles: for chunks of prompts, block sizes, ending a row, and kept prefixes."""
        return len(self._empty_chunks()) + len(self._block_sizes) + 1 + 2 * bool(self._prefixes.entries)

    def proposed(self, block_size: int) -> int:
        """Tokens proposed by a step of this block size."""
        if self._drafter is None or (0 in self._block_sizes and block_size <= 1):
            return 0
        return self._drafter.config.proposals(block_size)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Of the prompt's chunks, for `read`."""
        return self._prefixes.keys(prompt)

    def warm_up(self) -> None:
        """Compiles every program; afterwards none is compiled any more. All rows must be idle."""
        chunks = self._empty_chunks()
        calls = [(prefill, self._prefill_arguments(*chunk)) for chunk in chunks]
        calls += [self._decode_call(size, 0, False) for size in self._block_sizes]
        with ThreadPoolExecutor() as pool, self._on_mesh():  # the calls below find what is compiled here
            compiling = [pool.submit(program.lower(*arguments).compile) for program, arguments in calls]
        for program in compiling:
            program.result()
        for chunk in chunks:
            self._prefill(*chunk)
        with self._on_mesh():
            self.state = self._prefixes.warm_up(self.state)
        for size in self._block_sizes:
            self.decode(size, 0, False)
        self.release(0)
        jax.block_until_ready(self.state)

    def _empty_chunks(self) -> list[tuple]:
        """A call of `_prefill` that reads nothing, for each of its programs."""
        settings = row_settings(Request([0]), 1, 0)
        ways = itertools.product(self._chunks, (True, False) if self.draft_optional else (True,))
        return [(0, 0, np.zeros(size, np.int32), 0, False, settings, drafted) for size, drafted in ways]

    def read(
        self, slot: int, prompt: Sequence[int], start: int, keys: list[bytes], settings: RowSettings, drafted: bool
    ) -> tuple[int, int, Committed]:
        """Commits to an idle row the next chunk of its prompt; behind the last one the row decodes.

        Args:
            start: tokens of the prompt that are committed.
            keys: of the prompt.
            drafted: whether they enter the draft cache, too.

        Returns:
            Tokens of the prompt that are committed now, how many of them were copied from another's, and the first new
            token [1, 1], if that was the last chunk.
        """
        assert drafted or self.draft_optional
        with self._on_mesh():
            self.state, at = self._prefixes.copy(self.state, slot, start, prompt, keys)
        left = len(prompt) - at
        count = min(left, self._chunks[-1] if left > self._chunks[-1] // 2 else self._chunks[0])
        chunk = np.zeros(next(size for size in self._chunks if size >= count), np.int32)
        chunk[:count] = prompt[at : at + count]
        first = self._prefill(slot, at, chunk, count, count == left, settings, drafted)
        with self._on_mesh():
            self._prefixes.note(self.state, slot, at, count, keys)
        return at + count, at - start, first

    def decode(self, block_size: int, max_steps: int, leave_on_finish: bool) -> Committed:
        """One visit to the device (see `speculative.run`): the tokens of each step, on the host."""
        program, arguments = self._decode_call(block_size, max_steps, leave_on_finish)
        with self._on_mesh():
            self.state, trace = program(*arguments)
        return jax.device_get(trace)

    def release(self, slot: int) -> None:
        """Makes a row idle."""
        with self._on_mesh():
            self.state = release(self.state, jnp.int32(slot))

    def wait(self) -> None:
        """Waits for the device: `read` returns before it has."""
        jax.block_until_ready(self.state.anchor)

    def step_seconds(self) -> dict[int, float]:
        """Times a step at each block size, all rows busy and half full of a made-up prompt."""
        prompt = [0] * max(1, self._max_length // 2)
        start = max(0, len(prompt) - self._chunks[0])  # what the caches hold before is of no interest
        settings = row_settings(Request([0]), np.iinfo(np.int32).max, 0)
        times: dict[int, list[float]] = {size: [] for size in self._block_sizes}
        for _ in range(3):
            for size in times:
                for slot in range(self._slots):
                    self.read(slot, prompt, start, [], settings, True)
                self.wait()
                begin = time.perf_counter()
                trace = self.decode(size, min(self._steps_per_visit, 4), False)
                times[size].append((time.perf_counter() - begin) / int(np.sum(trace.count.any(axis=1))))
        for slot in range(self._slots):
            self.release(slot)
        return {size: min(measured) for size, measured in times.items()}

    def _prefill_arguments(
        self, slot: int, start: int, chunk: np.ndarray, count: int, last: bool, settings: RowSettings, drafted: bool
    ) -> tuple:
        place = np.int32(slot), np.int32(start), chunk, np.int32(count), np.bool_(last)
        return self._target, self._drafter if drafted else None, self.state, *place, settings, self._logprobs

    def _prefill(self, *chunk: Any) -> Committed:
        with self._on_mesh():
            self.state, first = prefill(*self._prefill_arguments(*chunk))
        return first

    def _decode_call(self, block_size: int, max_steps: int, leave_on_finish: bool) -> tuple[Any, tuple]:
        return decode_call(
            self._target,
            self._drafter if block_size else None,  # without it the draft cache stays as it is
            self.state,
            max_steps,
            leave_on_finish,
            block_size=block_size if self.proposed(block_size) else 0,
            proposals=self._proposals,
            capacity=self._steps_per_visit,
            logprobs=self._logprobs,
        )
