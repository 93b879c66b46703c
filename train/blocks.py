"""Anchored blocks of packed rows: what the drafter sees in training, and what it should say.

The drafter runs the very code it decodes with; only the attention takes many blocks of a row at once.
Shapes: B rows, S tokens of a row, A blocks of a row, P predictions of a block, D width, FD tapped features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.cache import Cache, commit, once_read
from dflash_jax.drafters.base import Blocks
from dflash_jax.kernels.dispatch import platform
from dflash_jax.sharding import gathers
from dflash_jax.target import Target

TARGET_CHUNK = 256  # positions of a target pass
LARGE_CHUNK = 1024  # the same on an accelerator, where every pass reads all weights
WHOLE_ROW = 8192  # there, and on meshes that gather the weights for every pass: a row that is no longer


def draw_blocks(
    keys: Key[Array, " B"],
    tokens: Int[Array, "B S"],
    starts: Int[Array, "B S"],
    supervised: Bool[Array, "B S"],
    begins: Bool[Array, "B S"] | None = None,
    *,
    count: int,
    per_document: int,
    block_size: int,
    predictions: int,
    placement: str = "random",
) -> Blocks:
    """Draws anchors without replacement: up to `per_document`, and up to `count` per row (method, section 8.1).

    An anchor is an answer token followed by an answer token of the same document; with `placement` "fixed", only
    every `block_size`-th answer token of the document, from its first; with "decoded", only one of `begins`. A block
    may reach past the end of its document; such labels do not count. A row's draw follows from its key alone.
    """
    S = tokens.shape[1]
    count = min(count, S)
    follows = jnp.pad(supervised[:, 1:] & (starts[:, 1:] == starts[:, :-1]), ((0, 0), (0, 1)))
    candidates = supervised & follows
    if placement == "fixed":
        before = jnp.pad(jnp.cumsum(supervised, axis=1), ((0, 0), (1, 0)))[:, :-1]
        candidates &= (before - jnp.take_along_axis(before, starts, axis=1)) % block_size == 0
    elif placement == "decoded":
        assert begins is not None
        candidates &= begins
    noise = jnp.where(candidates, jax.vmap(lambda key: jax.random.uniform(key, (S,)))(keys), -1.0)
    # Sorted by document and noise, a document's positions stay within its own stretch of the row.
    order = jnp.lexsort((-noise, starts), axis=1)
    places = jnp.arange(S)[None] - jnp.take_along_axis(starts, order, axis=1)
    rank = jnp.put_along_axis(jnp.zeros_like(starts), order, places, axis=1, inplace=False)
    best, chosen = jax.lax.top_k(jnp.where(rank < per_document, noise, -1.0), count)
    chosen = jnp.sort(jnp.where(best >= 0, chosen, S), axis=1)
    used, anchors = chosen < S, jnp.where(chosen < S, chosen, 0)
    pick = lambda x, at: jnp.take_along_axis(x, at.reshape(at.shape[0], -1), axis=1).reshape(at.shape)
    first = jnp.where(used, pick(starts, anchors), 0)
    positions = anchors[:, :, None] + 1 + jnp.arange(predictions)[None, None]
    at = jnp.minimum(positions, S - 1)
    labelled = used[:, :, None] & (positions < S) & pick(supervised, at) & (pick(starts, at) == first[:, :, None])
    return Blocks(tokens, starts, anchors, first, pick(tokens, anchors), pick(tokens, at), labelled, at)


def target_features(
    target: Target, taps: tuple[int, ...], tokens: Int[Array, "B S"], starts: Int[Array, "B S"]
) -> tuple[Float[Array, "B S FD"], Float[Array, "B S D"]]:
    """Tapped features and final-normed hidden states of packed rows, by the frozen target.

    On an accelerator, and on meshes that gather the weights for every pass, one pass takes a whole row that is not too
    long. Else they are found chunk by chunk.
    """
    B, S = tokens.shape
    whole = gathers() or platform() != "cpu"
    if whole and S <= WHOLE_ROW:
        positions = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
        cache, lengths = target.init_cache(B, 0), jnp.zeros(B, jnp.int32)
        hidden, features, _ = target.forward(tokens, positions, None, cache, lengths, taps=taps, starts=starts)
        return jax.lax.stop_gradient(features), jax.lax.stop_gradient(hidden)
    chunk = min(LARGE_CHUNK if whole else TARGET_CHUNK, S)
    short = -S % chunk
    tokens = jnp.pad(tokens, ((0, 0), (0, short)))
    starts = jnp.concatenate([starts, jnp.broadcast_to(jnp.arange(S, S + short)[None], (B, short))], axis=1)
    split = lambda x: x.reshape(B, -1, chunk).swapaxes(0, 1)

    def one(cache: Cache, xs) -> tuple[Cache, tuple[Array, Array]]:
        tokens, starts, start = xs
        lengths = jnp.full(B, 1, jnp.int32) * start
        positions = lengths[:, None] + jnp.arange(chunk)[None]
        hidden, features, fresh = target.forward(tokens, positions, None, cache, lengths, taps=taps, starts=starts)
        kept = once_read(jnp.full(B, chunk, jnp.int32), hidden)
        return commit(cache, fresh, lengths, kept), (features, hidden)

    begins = jnp.arange(0, S + short, chunk, dtype=jnp.int32)
    cache = target.init_cache(B, S + short, chunk)
    _, outputs = jax.lax.scan(one, cache, (split(tokens), split(starts), begins))
    join = lambda x: x.swapaxes(0, 1).reshape(B, S + short, -1)[:, :S]
    features, hidden = (jax.lax.stop_gradient(join(x)) for x in outputs)
    return features, hidden
