"""XLA implementation: one scatter."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def append(
    cache_k: Float[Array, "R K S H"],
    cache_v: Float[Array, "R K S Hv"] | None,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"] | None,
    lengths: Int[Array, " B"],
    kept: Int[Array, " B"],
    rows: Int[Array, " B"] | None,
    ring: bool,
) -> tuple[Float[Array, "R K S H"], Float[Array, "R K S Hv"] | None]:
    """See `api.append`."""
    S, T = cache_k.shape[2], k.shape[2]
    j = jnp.arange(T)[None]
    slots = lengths[:, None] + j
    written = j < kept[:, None]
    if ring:
        slots = slots % S
        written = written & (j >= kept[:, None] - S)  # of a chunk longer than the ring, the last S
    slots = jnp.where(written, slots, S)
    rows = (jnp.arange(lengths.shape[0]) if rows is None else rows)[:, None]
    put = lambda cache, x: cache if x is None else cache.at[rows, :, slots].set(x.swapaxes(1, 2), mode="drop")
    return put(cache_k, k), put(cache_v, v)
