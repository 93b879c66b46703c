"""The only writer of committed keys and values.

Shapes: R cache rows, B block rows, K key-value heads, S slots, T block positions, H head dim (Hv of values).
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dflash_jax.mesh import current_mesh, local_rows, on_each_device, owned_rows, split_cache, split_rows

from ..dispatch import Name, choose
from . import pallas_tpu, reference
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu}
TILE = 128  # slots that lie side by side in a TPU's memory


def room(slots: int, widest: int) -> int:
    """The number of slots, `slots` or a few more, for which every implementation writes blocks of up to `widest`
    positions in place. That is whole tiles and whole windows of the widest chunk of a prompt; a small cache, which may
    as well be copied, stays as it is."""
    step = max(TILE, 1 << (widest - 1).bit_length())
    return slots if slots <= TILE // 2 else -(-slots // step) * step


def append(
    cache_k: Float[Array, "R K S H"],
    cache_v: Float[Array, "R K S Hv"] | None,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"] | None,
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    rows: Int[Array, " B"] | None = None,
    *,
    ring: bool = False,
    implementation: Name | None = None,
) -> tuple[Float[Array, "R K S H"], Float[Array, "R K S Hv"] | None]:
    """Writes the first `kept` block positions after `lengths`; what does not fit is dropped.

    Position p goes to slot p, or to slot p modulo S of a ring. Other slots keep what they hold. Where the caches are
    donated, they are updated in place.

    Args:
        cache_v, v: None where there are no values (latent attention).
        rows: cache row of each block row; see `block_attention.attend`.
        implementation: "xla" or "tpu" (Pallas); see `dispatch`.

    Raises:
        ValueError: the named implementation does not serve this case; the message says why.
    """
    cache_rows, heads = split_cache(*cache_k.shape[:2])
    block_rows = cache_rows if rows is None else split_rows(k.shape[0]) if cache_rows else None

    def local(cache_k, cache_v, k, v, lengths, kept, rows):
        trial = Trial.of(cache_k, cache_v, k, ring)
        chosen = choose(IMPLEMENTATIONS, cache_k, cache_v, k, implementation=implementation, trial=trial, call=append)
        rows, here = local_rows(rows, cache_k.shape[0], cache_rows)
        if rows is not None and cache_rows != block_rows and current_mesh() is not None:
            at, rows, here = owned_rows(rows, here, cache_k.shape[0])
            k, v, lengths, kept = jax.tree.map(lambda x: x[at], (k, v, lengths, kept))
        return chosen.append(cache_k, cache_v, k, v, lengths, jnp.where(here, kept, 0), rows, ring)

    cache, block, by_row = P(cache_rows, heads), P(block_rows, heads), P(block_rows)
    run = on_each_device(local, (cache, cache, block, block, by_row, by_row, by_row), (cache, cache))
    return run(cache_k, cache_v, k, v, lengths, kept, rows)
