"""Which chunks of prompts are kept, and for whom."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from dflash_jax.decoding.step import State
from dflash_jax.infer.prefix import init_prefixes, keep, restore
from dflash_jax.sharding import pin_chunks


def chain(tokens: Sequence[int], chunk: int) -> list[bytes]:
    """A key for each whole chunk of a prompt, which stands for the chunk and all before it."""
    keys, key = [], b""
    for start in range(0, len(tokens) - chunk + 1, chunk):
        key = hashlib.sha256(key + np.asarray(tokens[start : start + chunk], "<i4").tobytes()).digest()
        keys.append(key)
    return keys


def shared_chunks(prompts: Iterable[Sequence[int]], chunk: int) -> int:
    """How many different chunks would serve more than one of these prompts."""
    seen: dict[bytes, int] = {}
    for prompt in prompts:
        for key in chain(prompt[:-1], chunk):  # the last token is always read: it chooses the next
            seen[key] = seen.get(key, 0) + 1
    return sum(count > 1 for count in seen.values())


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
            self._kept = jax.jit(lambda state: pin_chunks(init_prefixes(state, entries, chunk)))(state)

    def warm_up(self, state: State) -> State:
        """Compiles the copies there and back; `state` is consumed, and its first row must be idle."""
        if not self.entries:
            return state
        self._keep(state, 0, 0, 0)
        return self._restore(state, 0, 0, 0, [0] * self.chunk)

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of a prompt's whole chunks, for the calls below."""
        return chain(prompt, self.chunk) if self.entries else []

    def copy(self, state: State, row: int, filled: int, prompt: Sequence[int], keys: list[bytes]) -> tuple[State, int]:
        """Commits to an idle row the next chunks of its prompt that are kept; never its last token, which chooses the
        first new one.

        Returns:
            The state, and how many tokens of the prompt are committed now.
        """
        while keys and filled % self.chunk == 0 and filled + self.chunk < len(prompt):
            if (entry := self._find(keys[filled // self.chunk])) is None:
                break
            state = self._restore(state, entry, row, filled, prompt[filled : filled + self.chunk])
            filled += self.chunk
        return state, filled

    def note(self, state: State, row: int, start: int, count: int, keys: list[bytes]) -> None:
        """Keeps the `count` tokens of a prompt that were just committed from `start` on, if they are a whole chunk."""
        if not keys or start % self.chunk or count != self.chunk:
            return
        key = keys[start // self.chunk]
        if self._find(key) is None:
            entry = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._places[key] = entry
            self._keep(state, entry, row, start)

    def _find(self, key: bytes) -> int | None:
        if key in self._places:
            self._places.move_to_end(key)
        return self._places.get(key)

    def _keep(self, state: State, entry: int, row: int, start: int) -> None:
        self._kept = keep(self._kept, state, np.int32(entry), np.int32(row), np.int32(start))

    def _restore(self, state: State, entry: int, row: int, start: int, tokens: Sequence[int]) -> State:
        place = np.int32(entry), np.int32(row), np.int32(start)
        return restore(state, self._kept, *place, np.asarray(tokens, np.int32))
