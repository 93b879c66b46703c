"""Prompts that begin alike: chunks kept on the device, to be copied into the slot of another request.

A chunk is what its prefill left behind: a snapshot of the target's cache and one of the drafter's state. Copied back,
they are the same bits. Where caches lie in pages, a chunk's pages are not copied: both rows have them (see `shares`).
A recurrent state is not of positions: one snapshot stands for all before it, and may be as
large as thousands of tokens. So these are kept apart from the chunks, and at fewer places: where prompts end or part,
and every `STATE_EVERY` tokens. Shapes: E kept chunks, C tokens of a chunk.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, PyTree

from dflash_jax.cache import KV, Cache, Carried, Entry, size_in_bytes
from dflash_jax.decoding.penalties import remember_prompts
from dflash_jax.decoding.state import State
from dflash_jax.infer.engine.pages import PageTable
from dflash_jax.mesh import constrain, current_mesh, row_parts
from dflash_jax.sharding import partition, pin, settled

STATE_EVERY = 2048  # tokens


class Prefixes(struct.PyTreeNode):
    """Snapshots of both models, every array [E, ...]; no draft without a drafter."""

    target: Any
    draft: Any


_is_state = lambda x: getattr(x, "whole", False)
_absent = lambda x: x is None


def shares(state: State, chunk: int) -> int | None:
    """Positions of a page, if rows can have the pages of a chunk in common: whole ones, to which nothing is written
    once the chunk is read. A drafter that carries more than a cache may go on with what lies before; and parts of a
    mesh have pages of their own."""
    pages = [cache.page if isinstance(cache, Cache) else 0 for cache in _carried(state)]
    page = next(filter(None, pages), None)
    return page if page and 0 not in pages and chunk % page == 0 and row_parts() == 1 else None


def _carried(state: State) -> list[Carried]:
    """What both models carry; a drafter may carry nothing."""
    return [one for one in (state.target_cache, state.draft) if one is not None and jax.tree.leaves(one)]


def _snapshots(state: State, row: Int[Array, ""], start: Int[Array, ""], chunk: int) -> Prefixes:
    """What both models hold of the chunk of a row that begins at `start`, but for pages that are shared."""
    shared = shares(state, chunk)

    def of(carried: Carried) -> PyTree:
        if not (shared and isinstance(carried, Cache)):
            return carried.snapshot(row, start, chunk)
        paged = [isinstance(entry, KV) and entry.pooled for entry in carried.entries]
        pairs = zip(carried.bound, paged, strict=True)
        return tuple(None if shared else entry.snapshot(row, start, chunk) for entry, shared in pairs)

    return Prefixes(of(state.target_cache), () if state.draft is None else of(state.draft))


def _shapes(state: State, chunk: int) -> tuple[Prefixes, Prefixes]:
    """What a snapshot is like: the part that belongs to the chunk's positions, and that which stands for all before."""
    like = jax.eval_shape(lambda state: _snapshots(state, jnp.int32(0), jnp.int32(0), chunk), state)
    part = lambda states: jax.tree.map(lambda x: x if _is_state(x) is states else None, like, is_leaf=_is_state)
    return part(False), part(True)


@partial(jax.jit, static_argnames=("entries", "chunk"))
def init_prefixes(state: State, entries: tuple[int, int], chunk: int) -> tuple[Prefixes, Prefixes]:
    """Room for so many chunks, and so many states, of the rows of `state`."""
    room = lambda like, count: _pinned(jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), like))
    chunks, states = map(room, _shapes(state, chunk), entries)
    return chunks, states


@partial(jax.jit, donate_argnames="prefixes", static_argnames="chunk")
def keep(
    prefixes: Prefixes, state: State, entry: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""], chunk: int
) -> Prefixes:
    """Keeps the chunk of a row that begins at position `start` and has just been committed, or the states after it:
    that part of the snapshot which `prefixes` have."""
    put = lambda all, one: None if all is None else jax.lax.dynamic_update_slice_in_dim(all, one, entry, axis=0)
    return _pinned(jax.tree.map(put, prefixes, _snapshots(state, row, start, chunk), is_leaf=_absent))


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
        one = jax.tree.map(lambda x, y: y if x is None else x, one, pick(*states), is_leaf=_absent)
    start = state.lengths[row]
    end = start + tokens.shape[0]
    history = remember_prompts(state.paged_history, tokens[None], row[None], start[None], end[None] - start[None])
    return pin(
        state.replace(
            lengths=state.lengths.at[row].set(end),
            target_cache=state.target_cache.restore(one.target, row, end),
            draft=None if state.draft is None else state.draft.restore(one.draft, row, end),
            history=history.replace(pages=None),
        )
    )


def _pinned(prefixes: Prefixes) -> Prefixes:
    put = lambda x, spec: None if x is None else constrain(x, spec)
    return jax.tree.map(put, prefixes, partition(prefixes), is_leaf=_absent)


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
    """Entries by key; the one unused for longest makes room."""

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

    def give_up(self, fits: Callable[[int], bool]) -> int | None:
        """Frees the entry unused for longest of those that fit, and returns it; None if there is none."""
        for key, entry in self._of.items():
            if fits(entry):
                del self._of[key]
                self._free.append(entry)
                return entry
        return None


class KeptChunk(NamedTuple):
    """The chunk of a row that ends after `end` tokens of its prompt.

    Attributes:
        entry: where it is kept; None if it is not to be.
        state: where the states after it are kept; None if they are not to be, or not to be copied, for a chunk that
            another one follows.
    """

    row: int
    end: int
    entry: int | None
    state: int | None


class PrefixIndex:
    """Which chunks, and which states after some of them, are kept where. Pure host code: what it decides, `PrefixCache`
    does on the device."""

    def __init__(self, entries: int, states: int, chunk: int):
        self.entries, self.states, self.chunk = entries, states, chunk
        self.chunks, self.ends = Places(entries), Places(states)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of a prompt's whole chunks, for the calls below."""
        return chain(prompt, self.chunk) if self.entries else []

    def find(self, row: int, filled: int, prompt: Sequence[int], keys: Sequence[bytes]) -> list[KeptChunk]:
        """The kept chunks that follow the first `filled` tokens of a prompt; never with its last token, which chooses
        the first new one."""
        found: list[KeptChunk] = []
        if keys and filled % self.chunk == 0:
            most = (len(prompt) - 1) // self.chunk
            for end, key in enumerate(keys[filled // self.chunk : most], 1):
                if (entry := self.chunks.find(key)) is None:
                    break
                state = self.ends.find(key) if self.states else None
                found.append(KeptChunk(row, filled + end * self.chunk, entry, state))
        while self.states and found and found[-1].state is None:
            found.pop()
        return [*(kept._replace(state=None) for kept in found[:-1]), *found[-1:]]

    def keep(self, row: int, end: int, keys: Sequence[bytes], *, awaited: bool = False) -> KeptChunk:
        """Makes room for the last chunk of the `end` tokens of a prompt that are committed, if a chunk ends there, and
        for the states after it, where they may be of use.

        Args:
            awaited: whether other prompts, too, will go on from here.
        """
        if not keys or end % self.chunk:
            return KeptChunk(row, end, None, None)
        at = end // self.chunk
        key, last = keys[at - 1], at == len(keys)
        known = self.chunks.find(key) is not None
        entry = None if known else self.chunks.take(key)
        if not self.states or self.ends.find(key) is not None:
            return KeptChunk(row, end, entry, None)
        parts = known and (last or self.chunks.find(keys[at]) is None)  # from a prompt that was here before
        useful = awaited or parts or last or end % STATE_EVERY < self.chunk
        return KeptChunk(row, end, entry, self.ends.take(key) if useful else None)


class PrefixCache:
    """Chunks on the device, and the states after some of them.

    Args:
        state: whose rows they are of. Its programs must be called where the engine's are.
        entries: how many chunks; 0 keeps none. If there are states, too, all take no more memory than so many chunks.
        chunk: tokens of each.
        table: of pages, where rows have them.

    Attributes:
        at_ends: whether a chunk can be kept only while its row ends with it: of other things than all positions.
        found: kept chunks that rows which are to begin share, and that are to be copied to them as well.
    """

    def __init__(self, state: State, entries: int, chunk: int, table: PageTable | None = None):
        states, shared = 0, shares(state, chunk) is not None
        every = (isinstance(one, Cache) and all(map(_all_positions, one.entries)) for one in _carried(state))
        self.at_ends = not all(every)
        self._table, self._pages = table if shared else None, dict[int, list[int]]()  # of kept chunks
        self.found: dict[int, list[KeptChunk]] = {}
        if self._table is not None:
            self._table.reclaim = self._give_up
        if entries:  # tracing a snapshot takes a while, and most engines for one answer keep none
            entries, states = kept_of(state, entries, chunk)
        self.index = PrefixIndex(entries, states, chunk)
        if entries:
            kept = init_prefixes(state, (entries, states), chunk)
            self._kept, self._kept_states = settled(kept) if current_mesh() is None else kept

    @property
    def programs(self) -> int:
        """How many programs `warm_up` compiles."""
        return (2 + 2 * bool(self.index.states)) if self.index.entries else 0

    def warm_up(self, state: State) -> State:
        """Compiles the copies there and back, and forgets what was kept; `state` is consumed, and its first row must be
        idle."""
        if not self.index.entries:
            return state
        self.forget()
        chunk, states = self.index.chunk, (0, None) if self.index.states else (None,)
        self.keep(state, KeptChunk(0, chunk, 0, states[0]))
        for end in states:
            state = self.copy(state, KeptChunk(0, chunk, 0, end), [0] * chunk)
        return state

    def forget(self) -> None:
        """Keeps nothing any more."""
        self.index = PrefixIndex(self.index.entries, self.index.states, self.index.chunk)
        while self._pages and self._table is not None:
            self._table.give_up(self._pages.popitem()[1])

    def copy(self, state: State, kept: KeptChunk, prompt: Sequence[int]) -> State:
        """Commits a kept chunk to a row that was begun; `state` is consumed."""
        assert kept.entry is not None
        if self._table is not None and kept.entry in self._pages:
            self._table.share(kept.row, kept.end - self.index.chunk, self._pages[kept.entry])
        states = None if kept.state is None else (self._kept_states, np.int32(kept.state))
        tokens = np.asarray(prompt[kept.end - self.index.chunk : kept.end], np.int32)
        return restore(state, self._kept, np.int32(kept.entry), np.int32(kept.row), tokens, states)

    def keep(self, state: State, kept: KeptChunk) -> None:
        """Keeps what `PrefixIndex.keep` made room for."""
        row, start = np.int32(kept.row), np.int32(kept.end - self.index.chunk)
        if self._table is not None and kept.entry is not None and self._table.has(kept.row, kept.end):
            pages = self._table.of(kept.row, kept.end - self.index.chunk, kept.end)
            self._table.keep(pages)
            self._table.give_up(self._pages.pop(kept.entry, []))
            self._pages[kept.entry] = pages
        if kept.entry is not None:
            self._kept = keep(self._kept, state, np.int32(kept.entry), row, start, self.index.chunk)
        if kept.state is not None:
            self._kept_states = keep(self._kept_states, state, np.int32(kept.state), row, start, self.index.chunk)

    def shared(self, row: int, prompt: Sequence[int], keys: Sequence[bytes]) -> list[tuple[KeptChunk, list[int]]]:
        """The kept chunks that a row's prompt begins with, and their pages; none where pages are not shared."""
        found = self.index.find(row, 0, prompt, keys) if self._table is not None else []
        return [(kept, self._pages[kept.entry]) for kept in found if kept.entry is not None]

    def _give_up(self) -> None:
        """Gives up the kept chunk unused for longest that has pages of its own."""
        assert self._table is not None
        only_kept = self._table.only_kept
        entry = self.index.chunks.give_up(lambda entry: bool(np.any(only_kept(self._pages.get(entry, [])))))
        assert entry is not None
        self._table.give_up(self._pages.pop(entry))


def _all_positions(entry: Entry) -> bool:
    return isinstance(entry, KV) and not entry.ring and entry.recent is None


def _page_bytes(state: State) -> int:
    """Bytes of a page in all entries that lie in pages."""
    caches = [cache for cache in (state.target_cache, state.draft) if isinstance(cache, Cache)]
    paged = [entry for cache in caches for entry in cache.entries if isinstance(entry, KV) and entry.pooled]
    return sum(size_in_bytes(entry) // entry.k.shape[0] for entry in paged)


def kept_of(state: State, entries: int, chunk: int) -> tuple[int, int]:
    """How many chunks and states are kept where so many chunks are asked for; the state may be shapes."""
    chunk_bytes, state_bytes = map(size_in_bytes, _shapes(state, chunk))
    if (page := shares(state, chunk)) is not None:
        chunk_bytes += chunk // page * _page_bytes(state)
    return within(entries, chunk_bytes, state_bytes, chunk)


def within(entries: int, chunk_bytes: int, state_bytes: int, chunk: int) -> tuple[int, int]:
    """How many chunks and states to keep in the memory of so many chunks: one state for `STATE_EVERY` tokens."""
    if not state_bytes:
        return entries, 0
    states = lambda count: max(1, count * chunk // STATE_EVERY)
    count = next(
        (n for n in range(entries, 0, -1) if n * chunk_bytes + states(n) * state_bytes <= entries * chunk_bytes), 0
    )
    return count, states(count) if count else 0
