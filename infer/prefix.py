"""Chunks of prompts kept on the device, to be copied into the slot of another request that begins alike.

A chunk is what its prefill committed: the target's keys and values, and the draft keys and values made from its
features. Copied back, they are the same bits. Shapes: E kept chunks, C tokens of a chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dflash_jax.cache import Block, Cache, commit
from dflash_jax.decoding.penalties import remember_row
from dflash_jax.decoding.step import State
from dflash_jax.sharding import pin, pin_chunks


class Prefixes(struct.PyTreeNode):
    """Kept chunks: one block [E, K, C, H] per layer of each model; no draft without a drafter."""

    target: tuple[Block, ...]
    draft: tuple[Block, ...]


def init_prefixes(state: State, entries: int, chunk: int) -> Prefixes:
    """Room for so many chunks of the rows of `state`."""

    def room(cache: Cache | None) -> tuple[Block, ...]:
        shape = lambda x: (entries, x.shape[1], chunk, x.shape[3])
        empty = lambda x: jnp.zeros(shape(x), x.dtype)
        return tuple(Block(empty(entry.k), empty(entry.v)) for entry in cache.entries) if cache else ()

    return Prefixes(room(state.target_cache), room(state.draft_cache))


@partial(jax.jit, donate_argnames="prefixes")
def keep(
    prefixes: Prefixes, state: State, entry: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]
) -> Prefixes:
    """Keeps the chunk of a row that begins at position `start` and has just been committed."""

    def kept(chunks: tuple[Block, ...], cache: Cache | None) -> tuple[Block, ...]:
        entries = cache.entries if cache else ()
        fresh = tuple(e.read(row, start, chunks[0].k.shape[2]) for e in entries)
        put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, entry, axis=0)
        return jax.tree.map(put, chunks, fresh)

    return pin_chunks(Prefixes(kept(prefixes.target, state.target_cache), kept(prefixes.draft, state.draft_cache)))


@partial(jax.jit, donate_argnames="state")
def restore(
    state: State,
    prefixes: Prefixes,
    entry: Int[Array, ""],
    row: Int[Array, ""],
    start: Int[Array, ""],
    tokens: Int[Array, " C"],
) -> State:
    """Commits a kept chunk to an idle row, as its prefill would; `tokens` are the chunk's own."""
    count = jnp.asarray(tokens.shape, jnp.int32)

    def restored(cache: Cache | None, chunks: tuple[Block, ...]) -> Cache | None:
        if cache is None:
            return None
        one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, entry, 1), chunks)
        return commit(cache.replace(lengths=cache.lengths.at[row].set(start)), one, count, row=row)

    return pin(
        state.replace(
            target_cache=restored(state.target_cache, prefixes.target),
            draft_cache=restored(state.draft_cache, prefixes.draft),
            history=remember_row(state.history, tokens, row, start, count[0]),
        )
    )
