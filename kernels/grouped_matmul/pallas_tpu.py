"""TPU implementation: jax's own megablox kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.quantised import Quantised

LANES = 128
MOST = 512  # of a tile, along inputs and outputs


def declines(x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised) -> str | None:
    """Why these shapes are not served, or None."""
    if isinstance(weights, Quantised):
        return "weights in few bits"
    if x.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        return f"rows in {x.dtype}, weights in {weights.dtype}; it serves bfloat16, and rounds float32 to it"
    if weights.shape[1] % LANES or weights.shape[2] % LANES:
        return f"weights of {weights.shape[1]} x {weights.shape[2]}; it serves multiples of {LANES}"
    return None


def grouped_matmul(
    x: Float[Array, "M D"], weights: Float[Array, "E N D"] | Quantised, sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    (M, D), (E, N, _) = x.shape, weights.shape
    height = min(LANES, max(16, 1 << (2 * M // E).bit_length()))
    padded = jnp.pad(x, ((0, -M % height), (0, 0)))
    tiling = height, _tile(D), _tile(N)
    out = gmm(padded, weights, sizes, jnp.float32, tiling, transpose_rhs=True)
    return out[:M]


def _tile(size: int) -> int:
    """The largest multiple of 128 up to `MOST` that divides `size`."""
    return next(tile for tile in range(MOST, 0, -LANES) if size % tile == 0)
