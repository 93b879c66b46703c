"""The only writer of committed keys and values.

Shapes: R cache rows, B block rows, K key-value heads, S slots, T block positions, M pages of a row.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Num, PyTree

from dflash_jax.mesh import current_mesh, local_pages, local_rows, on_each_device, owned_rows, split_cache, split_rows

from ..dispatch import Name, choose, platform
from . import pallas_gpu, pallas_tpu, reference
from .part import Part
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": pallas_gpu}
TILE = 128  # slots that lie side by side in a TPU's memory
Caches = TypeVar("Caches", bound=PyTree[Num[Array, "R K S _"]])


def room(slots: int, widest: int) -> int:
    """The number of slots, `slots` or a few more, for which every implementation writes blocks of up to `widest`
    positions in place. That is whole tiles and whole windows of the widest chunk of a prompt; a small cache, which may
    as well be copied, stays as it is."""
    step = max(TILE, 1 << (widest - 1).bit_length())
    return slots if slots <= TILE // 2 else -(-slots // step) * step


def append(
    caches: Caches,
    blocks: PyTree[Array],
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    *,
    pages: Int[Array, "B M"] | None = None,
    path: Int[Array, "B J"] | None = None,
    ring: bool = False,
    implementation: Name | None = None,
) -> Caches:
    """Writes the first `kept` positions of blocks after `lengths` in caches; what does not fit is dropped.

    Position p goes to slot p, or to slot p modulo S of a ring. Other slots keep what they hold. Where the caches are
    donated, they are updated in place.

    Args:
        caches: keys and values of one layer, or of several that are alike, and scales of codes. They differ in their
            last axis and type alone.
        blocks: what each of them gets: an array [B, K, T, _], or a `Part`.
        rows: cache row of each block row; see `block_attention.attend`.
        pages: of caches in pages, in the place of rows (see there). What is written to lies in pages that no other row
            has. Pages beyond what is written may be any that no row reads: 0, for instance, where that is kept free.
        path: block positions in the order in which they are written; None takes them as they are.
        implementation: "xla", "tpu" or "gpu" (Pallas); see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    arrays, structure = jax.tree.flatten(caches)
    cache_rows, heads = split_cache(*arrays[0].shape[:2])
    news = structure.flatten_up_to(blocks)
    block_rows = cache_rows if rows is None and pages is None else split_rows(lengths.shape[0]) if cache_rows else None

    def local(arrays, news, lengths, kept, rows, pages, path):
        plain = [x.block if isinstance(x, Part) else x for x in news]
        inside = any(isinstance(x, Part) for x in news)
        if path is not None and "gpu" not in (platform(), implementation):  # its kernel alone takes a path
            plain = news = [jnp.take_along_axis(x, path[:, None, :, None], axis=2) for x in plain]
            inside, path = False, None
        of_row = None if pages is None else pages.shape[1]
        trial = Trial.of(arrays, plain, ring, None if path is None else path.shape[1], inside, of_row)
        chosen = choose(IMPLEMENTATIONS, arrays, plain, implementation=implementation, trial=trial, call=append)
        rows, here = local_rows(rows, arrays[0].shape[0], cache_rows)
        if rows is not None and cache_rows != block_rows and current_mesh() is not None:
            at, rows, here = owned_rows(rows, here, arrays[0].shape[0])
            plain, lengths, kept, path = jax.tree.map(lambda x: x[at], (plain, lengths, kept, path))
            news = plain
        if pages is not None:
            pages, here = local_pages(pages, arrays[0].shape[0], cache_rows)
        kept = jnp.where(here, kept, 0)
        if chosen is pallas_gpu:
            flat = lambda x: Part(x, x.reshape(x.shape[0], -1, x.shape[3]), 0, x.shape[2])
            parts = [x if isinstance(x, Part) else flat(x) for x in news]
            return pallas_gpu.append(arrays, parts, lengths, kept, rows, pages, path, ring)
        if path is not None:
            plain = [jnp.take_along_axis(x, path[:, None, :, None], axis=2) for x in plain]
        return chosen.append(arrays, plain, lengths, kept, rows, pages, ring)

    cache, block, by_row = P(cache_rows, heads), P(block_rows, heads), P(block_rows)
    run = on_each_device(local, (cache, block, by_row, by_row, by_row, by_row, by_row), cache)
    return structure.unflatten(run(arrays, news, lengths, kept, rows, pages, path))
