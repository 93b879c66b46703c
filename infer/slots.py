"""The slots of an engine on the device: their state, and the compiled programs that change it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dflash_jax.decoding.choice import Proposals
from dflash_jax.decoding.state import DraftModel, RowSettings, init_state
from dflash_jax.decoding.step import Committed
from dflash_jax.infer.params import STOP_WIDTH, SamplingParams
from dflash_jax.infer.prefixes import PrefixCache
from dflash_jax.infer.programs import begin, decode_call, prefill, release
from dflash_jax.mesh import entered
from dflash_jax.sharding import pin
from dflash_jax.target import Target


class Slots:
    """Rows that decode together. Which requests they belong to is the engine's business.

    Args:
        target, drafter, proposals, prefix_chunks, logprobs: see `EngineConfig`.
        slots: rows.
        max_length: tokens a row can hold.
        chunk: prompts are read in chunks of at most so many tokens.
        block_sizes: what `decode` may be asked for; 0 proposes nothing.
        steps_per_visit: at most.

    Attributes:
        state: consumed and replaced by every call.
    """

    def __init__(
        self,
        target: Target,
        drafter: DraftModel | None,
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
        with self._on_mesh():
            made = jax.jit(lambda: pin(init_state(target, drafter, slots, max_length, STOP_WIDTH, chunk)))()
            self.state = jax.block_until_ready(made)  # if there is no memory, say so here
            self._prefixes = PrefixCache(self.state, prefix_chunks, chunk)

    @property
    def programs(self) -> int:
        """How many `warm_up` compiles: for chunks of prompts, block sizes, a row's beginning and end, kept prefixes."""
        return len(self._chunks) + len(self._block_sizes) + 2 + 2 * bool(self._prefixes.entries)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Of the prompt's chunks, for `read`."""
        return self._prefixes.keys(prompt)

    def warm_up(self) -> None:
        """Compiles every program; afterwards none is compiled any more. All rows must be idle."""
        settings = SamplingParams().on_device("", 0, 0, 1)
        chunks = [(0, np.zeros(size, np.int32), 0, False, settings) for size in self._chunks]
        calls = [(prefill, self._prefill_arguments(*chunk)) for chunk in chunks]
        calls += [self._decode_call(size, 0, False) for size in self._block_sizes]
        with ThreadPoolExecutor() as pool, self._on_mesh():  # the calls below find what is compiled here
            compiling = [pool.submit(program.lower(*arguments).compile) for program, arguments in calls]
        for program in compiling:
            program.result()
        self.begin(0)
        for chunk in chunks:
            self._prefill(*chunk)
        with self._on_mesh():
            self.state = self._prefixes.warm_up(self.state)
        for size in self._block_sizes:
            self.decode(size, 0, False)
        self.release(0)
        jax.block_until_ready(self.state)

    def begin(self, slot: int) -> None:
        """Makes an idle row ready for a new prompt."""
        with self._on_mesh():
            self.state = begin(self.state, np.int32(slot))

    def read(
        self, slot: int, prompt: Sequence[int], start: int, keys: list[bytes], settings: RowSettings
    ) -> tuple[int, int, Committed]:
        """Commits to a row that was begun the next chunk of its prompt; behind the last one the row decodes.

        Args:
            start: tokens of the prompt that are committed.
            keys: of the prompt.

        Returns:
            Tokens of the prompt that are committed now, how many of them were copied from another's, and the first new
            token [1, 1], if that was the last chunk.
        """
        with self._on_mesh():
            self.state, at = self._prefixes.copy(self.state, slot, start, prompt, keys)
        left = len(prompt) - at
        count = min(left, self._chunks[-1] if left > self._chunks[-1] // 2 else self._chunks[0])
        chunk = np.zeros(next(size for size in self._chunks if size >= count), np.int32)
        chunk[:count] = prompt[at : at + count]
        first = self._prefill(slot, chunk, count, count == left, settings)
        with self._on_mesh():
            self._prefixes.offer(self.state, slot, at, count, keys)
        return at + count, at - start, first

    def decode(self, block_size: int, max_steps: int, leave_on_finish: bool) -> Committed:
        """One visit to the device (see `decoding.step.run`): the tokens of each step, on the host."""
        program, arguments = self._decode_call(block_size, max_steps, leave_on_finish)
        with self._on_mesh():
            self.state, trace = program(*arguments)
        return jax.device_get(trace)

    def release(self, slot: int) -> None:
        """Makes a row idle."""
        with self._on_mesh():
            self.state = release(self.state, np.int32(slot))

    def wait(self) -> None:
        """Waits for the device: `read` returns before it has."""
        jax.block_until_ready(self.state.anchor)

    def step_seconds(self) -> dict[int, float]:
        """Times a step at each block size, all rows busy with random tokens and half full: tokens that are alike would
        visit fewer experts than a real block does."""
        rng, length = np.random.default_rng(0), max(1, self._max_length // 2)
        settings = SamplingParams().on_device("", 0, 0, np.iinfo(np.int32).max)
        times: dict[int, list[float]] = {size: [] for size in self._block_sizes}
        for _ in range(3):
            for size in times:
                for slot in range(self._slots):
                    prompt = rng.integers(0, self._target.config.vocab_size, self._chunks[0]).tolist()
                    self._place(slot, max(0, length - len(prompt)))
                    self.read(slot, prompt[:length], 0, [], settings)
                self.wait()
                begin = time.perf_counter()
                trace = self.decode(size, min(self._steps_per_visit, 4), False)
                times[size].append((time.perf_counter() - begin) / int(np.sum(trace.count.any(axis=1))))
        for slot in range(self._slots):
            self.release(slot)
        return {size: min(measured) for size, measured in times.items()}

    def _place(self, slot: int, length: int) -> None:
        """Begins a row as if so many tokens were committed; what the caches hold there is of no interest."""
        self.begin(slot)
        with self._on_mesh():
            self.state = self.state.replace(lengths=pin(self.state.lengths.at[slot].set(length)))

    def _on_mesh(self) -> Any:
        return entered(self._target.mesh)

    def _prefill_arguments(self, slot: int, chunk: np.ndarray, count: int, last: bool, settings: RowSettings) -> tuple:
        where = np.int32(slot), chunk, np.int32(count), np.bool_(last)
        return self._target, self._drafter, self.state, *where, settings, self._logprobs

    def _prefill(self, *chunk: Any) -> Committed:
        with self._on_mesh():
            self.state, first = prefill(*self._prefill_arguments(*chunk))
        return first

    def _decode_call(self, block_size: int, max_steps: int, leave_on_finish: bool) -> tuple[Any, tuple]:
        return decode_call(
            self._target,
            self._drafter,
            self.state,
            max_steps,
            leave_on_finish,
            block_size=block_size,
            proposals=self._proposals,
            capacity=self._steps_per_visit,
            logprobs=self._logprobs,
        )
