"""Prompts that begin alike: chunks kept on the device, to be copied into the slot of another request.

A chunk is what its prefill left behind: a snapshot of the target's cache and one of the drafter's state. Copied back,
they are the same bits. A recurrent state is not of positions: one snapshot stands for all before it, and may be as
large as thousands of tokens. So these are kept apart from the chunks, and at fewer places: where prompts end or part,
and every `STATE_EVERY` tokens. Shapes: E kept chunks, C tokens of a chunk.
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

from dflash_jax.cache import size_in_bytes
from dflash_jax.decoding.penalties import remember_prompts
from dflash_jax.decoding.state import State
from dflash_jax.mesh import constrain
from dflash_jax.sharding import partition, pin

STATE_EVERY = 2048  # tokens


class Prefixes(struct.PyTreeNode):
    """Snapshots of both models, every array [E, ...]; no draft without a drafter."""

    target: Any
    draft: Any


def _is_state(x: Any) -> bool:
    return getattr(x, "whole", False)


def _snapshots(state: State, row: Int[Array, ""], start: Int[Array, ""], chunk: int) -> Prefixes:
    """Of the chunk of a row that begins at `start`."""
    draft = () if state.draft is None else state.draft.snapshot(row, start, chunk)
    return Prefixes(state.target_cache.snapshot(row, start, chunk), draft)


def _positions(snapshots: Prefixes) -> Prefixes:
    """What they hold of the chunk's own positions."""
    return jax.tree.map(lambda x: None if _is_state(x) else x, snapshots, is_leaf=_is_state)


def _states(snapshots: Prefixes) -> Prefixes:
    """What they hold of all positions together."""
    return jax.tree.map(lambda x: x if _is_state(x) else None, snapshots, is_leaf=_is_state)


def _together(positions: Prefixes, states: Prefixes) -> Prefixes:
    absent = lambda x: x is None or _is_state(x)
    return jax.tree.map(lambda x, y: y if x is None else x, positions, states, is_leaf=absent)


@partial(jax.jit, static_argnames=("entries", "chunk"))
def init_prefixes(state: State, entries: tuple[int, int], chunk: int) -> tuple[Prefixes, Prefixes]:
    """Room for so many chunks, and so many states, of the rows of `state`."""
    like = jax.eval_shape(lambda state: _snapshots(state, jnp.int32(0), jnp.int32(0), chunk), state)
    room = lambda tree, count: _pinned(jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), tree))
    return room(_positions(like), entries[0]), room(_states(like), entries[1])


@partial(jax.jit, donate_argnames="prefixes", static_argnames="chunk")
def keep(
    prefixes: Prefixes, state: State, entry: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""], chunk: int
) -> Prefixes:
    """Keeps the chunk of a row that begins at position `start` and has just been committed."""
    return _put(prefixes, _positions(_snapshots(state, row, start, chunk)), entry)


@partial(jax.jit, donate_argnames="prefixes")
def keep_state(prefixes: Prefixes, state: State, entry: Int[Array, ""], row: Int[Array, ""]) -> Prefixes:
    """Keeps the states of a row."""
    return _put(prefixes, _states(_snapshots(state, row, jnp.int32(0), 1)), entry)


def _put(prefixes: Prefixes, one: Prefixes, entry: Int[Array, ""]) -> Prefixes:
    put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, entry, axis=0)
    return _pinned(jax.tree.map(put, prefixes, one))


@partial(jax.jit, donate_argnames="state")
def restore(
    state: State,
    prefixes: Prefixes,
    entry: Int[Array, ""],
    row: Int[Array, ""],
    tokens: Int[Array, " C"],
    states: tuple[Prefixes, Int[Array, ""]] | None = None,
) -> State:
    """Commits a kept chunk to an idle row, as its prefill would; `tokens` are the chunk's own.

    Args:
        states: kept states and the entry of that after the chunk; None leaves the row's own as they are, for a chunk
            that another one follows.
    """
    pick = lambda tree, entry: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, entry, 1), tree)
    one = pick(prefixes, entry)
    if states is not None:
        one = _together(one, pick(*states))
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
    absent = lambda x: x is None
    put = lambda x, spec: None if x is None else constrain(x, spec)
    return jax.tree.map(put, prefixes, partition(prefixes), is_leaf=absent)


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


class Places:
    """Entries by key; the one unused for longest makes room.

    Args:
        count: how many entries there are.
    """

    def __init__(self, count: int):
        self._free, self._of = list(range(count)), OrderedDict[bytes, int]()

    def find(self, key: bytes) -> int | None:
        """The entry of a key, which counts as used; None if it has none."""
        if key in self._of:
            self._of.move_to_end(key)
        return self._of.get(key)

    def take(self, key: bytes) -> int:
        """An entry for a key that has none."""
        entry = self._of[key] = self._free.pop() if self._free else self._of.popitem(last=False)[1]
        return entry


class PrefixCache:
    """Chunks on the device by key, and the states after some of them.

    Args:
        state: whose rows they are of. Its programs must be called where the engine's are.
        entries: how many chunks; 0 keeps none. If there are states, too, all take no more memory than so many chunks.
        chunk: tokens of each.
    """

    def __init__(self, state: State, entries: int, chunk: int):
        self.chunk = chunk
        self.entries = self.states = 0
        if entries:  # tracing a snapshot takes a while, and most engines for one answer keep none
            like = jax.eval_shape(lambda state: _snapshots(state, jnp.int32(0), jnp.int32(0), chunk), state)
            sizes = size_in_bytes(_positions(like)), size_in_bytes(_states(like))
            self.entries, self.states = within(entries, *sizes, chunk)
        self._chunks, self._ends = Places(self.entries), Places(self.states)
        if self.entries:
            self._kept, self._kept_states = init_prefixes(state, (self.entries, self.states), chunk)

    @property
    def programs(self) -> int:
        """How many `warm_up` compiles."""
        return (2 + 2 * bool(self.states)) if self.entries else 0

    def warm_up(self, state: State) -> State:
        """Compiles the copies there and back; `state` is consumed, and its first row must be idle."""
        if not self.entries:
            return state
        self._keep(state, 0, 0, 0)
        if self.states:
            self._keep_state(state, 0, 0)
            state = self._restore(state, 0, 0, [0] * self.chunk, 0)
        return self._restore(state, 0, 0, [0] * self.chunk, None)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of a prompt's whole chunks, for the calls below."""
        return chain(prompt, self.chunk) if self.entries else []

    def copy(self, state: State, row: int, filled: int, prompt: Sequence[int], keys: list[bytes]) -> tuple[State, int]:
        """Commits to a row that was begun the next chunks of its prompt that are kept; never its last token, which
        chooses the first new one.

        Returns:
            The state, and how many tokens of the prompt are committed now.
        """
        found: list[tuple[int, int | None]] = []  # of the next chunks: their entry, and that of the state after them
        if keys and filled % self.chunk == 0:
            most = (len(prompt) - 1) // self.chunk
            for key in keys[filled // self.chunk : most]:
                if (entry := self._chunks.find(key)) is None:
                    break
                found.append((entry, self._ends.find(key) if self.states else None))
        while self.states and found and found[-1][1] is None:
            found.pop()
        for i, (entry, end) in enumerate(found):
            tokens = prompt[filled : filled + self.chunk]
            state = self._restore(state, entry, row, tokens, end if i == len(found) - 1 else None)
            filled += self.chunk
        return state, filled

    def offer(self, state: State, row: int, end: int, keys: list[bytes], *, awaited: bool = False) -> None:
        """Keeps the last chunk of the `end` tokens of a prompt that are committed, if a chunk ends there.

        Args:
            awaited: whether other prompts, too, will go on from here.
        """
        if not keys or end % self.chunk:
            return
        at = end // self.chunk
        known = self._chunks.find(keys[at - 1]) is not None
        if not known:
            self._keep(state, self._chunks.take(keys[at - 1]), row, end - self.chunk)
        if not self.states or self._ends.find(keys[at - 1]) is not None:
            return
        parts = known and (at == len(keys) or self._chunks.find(keys[at]) is None)  # from a prompt that was here before
        if awaited or parts or at == len(keys) or end % STATE_EVERY < self.chunk:
            self._keep_state(state, self._ends.take(keys[at - 1]), row)

    def _keep(self, state: State, entry: int, row: int, start: int) -> None:
        self._kept = keep(self._kept, state, np.int32(entry), np.int32(row), np.int32(start), self.chunk)

    def _keep_state(self, state: State, entry: int, row: int) -> None:
        self._kept_states = keep_state(self._kept_states, state, np.int32(entry), np.int32(row))

    def _restore(self, state: State, entry: int, row: int, tokens: Sequence[int], end: int | None) -> State:
        states = None if end is None else (self._kept_states, np.int32(end))
        return restore(state, self._kept, np.int32(entry), np.int32(row), np.asarray(tokens, np.int32), states)


def within(entries: int, chunk_bytes: int, state_bytes: int, chunk: int) -> tuple[int, int]:
    """How many chunks and states to keep in the memory of so many chunks: one state for `STATE_EVERY` tokens."""
    if not state_bytes:
        return entries, 0
    states = lambda count: max(1, count * chunk // STATE_EVERY)
    count = next(
        (n for n in range(entries, 0, -1) if n * chunk_bytes + states(n) * state_bytes <= entries * chunk_bytes), 0
    )
    return count, states(count) if count else 0
