"""Prompts that begin alike: chunks kept on the device, to be copied into the slot of another request.

A chunk is what its prefill left behind: a snapshot of the target's cache and one of the drafter's state. Copied back,
they are the same bits. Shapes: E kept chunks, C tokens of a chunk.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from dflash_jax.decoding.penalties import remember_prompts
from dflash_jax.decoding.state import State
from dflash_jax.mesh import constrain
from dflash_jax.sharding import partition, pin


class Prefixes(struct.PyTreeNode):
    """Kept chunks: the snapshots of both models, every array [E, ...]; no draft without a drafter."""

    target: Any
    draft: Any


def _snapshots(state: State, row: Int[Array, ""], start: Int[Array, ""], chunk: int) -> Prefixes:
    """Of the chunk of a row that begins at `start`."""
    draft = () if state.draft is None else state.draft.snapshot(row, start, chunk)
    return Prefixes(state.target_cache.snapshot(row, start, chunk), draft)


@partial(jax.jit, static_argnames=("entries", "chunk"))
def init_prefixes(state: State, entries: int, chunk: int) -> Prefixes:
    """Room for so many chunks of the rows of `state`."""
    like = jax.eval_shape(lambda state: _snapshots(state, jnp.int32(0), jnp.int32(0), chunk), state)
    return _pinned(jax.tree.map(lambda x: jnp.zeros((entries, *x.shape[1:]), x.dtype), like))


@partial(jax.jit, donate_argnames="prefixes", static_argnames="chunk")
def keep(
    prefixes: Prefixes, state: State, entry: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""], chunk: int
) -> Prefixes:
    """Keeps the chunk of a row that begins at position `start` and has just been committed."""
    put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, entry, axis=0)
    return _pinned(jax.tree.map(put, prefixes, _snapshots(state, row, start, chunk)))


@partial(jax.jit, donate_argnames="state")
def restore(
    state: State, prefixes: Prefixes, entry: Int[Array, ""], row: Int[Array, ""], tokens: Int[Array, " C"]
) -> State:
    """Commits a kept chunk to an idle row, as its prefill would; `tokens` are the chunk's own."""
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, entry, 1), prefixes)
    start = state.lengths[row]
    end = start + tokens.shape[0]
    return pin(
        state.replace(
            lengths=state.lengths.at[row].set(end),
            target_cache=state.target_cache.restore(one.target, row, end),
            draft=None if state.draft is None else state.draft.restore(one.draft, row, end),
            history=remember_prompts(state.history, tokens[None], row[None], start[None], end[None] - start[None]),
        )
    )


def _pinned(prefixes: Prefixes) -> Prefixes:
    return jax.tree.map(constrain, prefixes, partition(prefixes))


def chain(tokens: Sequence[int], chunk: int) -> list[bytes]:
    """A key for each whole chunk of a prompt, which stands for the chunk and all before it."""
    keys, key = [], b""
    for start in range(0, len(tokens) - chunk + 1, chunk):
        key = hashlib.sha256(key + np.asarray(tokens[start : start + chunk], "<i4").tobytes()).digest()
        keys.append(key)
    return keys


def shared_chunks(prompts: Iterable[Sequence[int]], chunk: int) -> int:
    """How many different chunks would serve more than one of these prompts."""
    return sum(count > 1 for count in _occurrences(prompts, chunk).values())


def shared_tokens(prompts: Iterable[Sequence[int]], chunk: int) -> int:
    """How many tokens of these prompts could be copied from an earlier one."""
    return chunk * sum(count - 1 for count in _occurrences(prompts, chunk).values())


def _occurrences(prompts: Iterable[Sequence[int]], chunk: int) -> Counter[bytes]:
    return Counter(key for prompt in prompts for key in chain(prompt[:-1], chunk))  # the last token is always read


class PrefixCache:
    """Chunks on the device by key; the one unused for longest makes room.

    Args:
        state: whose rows they are of. Its programs must be called where the engine's are.
        entries: how many chunks; 0 keeps none.
        chunk: tokens of each.
    """

    def __init__(self, state: State, entries: int, chunk: int):
        self.entries, self.chunk = entries, chunk
        self._free, self._places = list(range(entries)), OrderedDict[bytes, int]()
        if entries:
            self._kept = init_prefixes(state, entries, chunk)

    def warm_up(self, state: State) -> State:
        """Compiles the copies there and back; `state` is consumed, and its first row must be idle."""
        if not self.entries:
            return state
        self._keep(state, 0, 0, 0)
        return self._restore(state, 0, 0, [0] * self.chunk)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of a prompt's whole chunks, for the calls below."""
        return chain(prompt, self.chunk) if self.entries else []

    def copy(self, state: State, row: int, filled: int, prompt: Sequence[int], keys: list[bytes]) -> tuple[State, int]:
        """Commits to a row that was begun the next chunks of its prompt that are kept; never its last token, which
        chooses the first new one.

        Returns:
            The state, and how many tokens of the prompt are committed now.
        """
        while keys and filled % self.chunk == 0 and filled + self.chunk < len(prompt):
            if (entry := self._find(keys[filled // self.chunk])) is None:
                break
            state = self._restore(state, entry, row, prompt[filled : filled + self.chunk])
            filled += self.chunk
        return state, filled

    def offer(self, state: State, row: int, end: int, keys: list[bytes]) -> None:
        """Keeps the last chunk of the `end` tokens of a prompt that are committed, if a chunk ends there."""
        if not keys or end % self.chunk:
            return
        start, key = end - self.chunk, keys[end // self.chunk - 1]
        if self._find(key) is None:
            entry = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._places[key] = entry
            self._keep(state, entry, row, start)

    def _find(self, key: bytes) -> int | None:
        if key in self._places:
            self._places.move_to_end(key)
        return self._places.get(key)

    def _keep(self, state: State, entry: int, row: int, start: int) -> None:
        self._kept = keep(self._kept, state, np.int32(entry), np.int32(row), np.int32(start), self.chunk)

    def _restore(self, state: State, entry: int, row: int, tokens: Sequence[int]) -> State:
        return restore(state, self._kept, np.int32(entry), np.int32(row), np.asarray(tokens, np.int32))
