"""Root-mean-square norms.

On a GPU a step of few positions is a chain of short launches. Where only products read what a norm returns, it leaves
its division to them (`Normed`): `(x / rms) @ W.T = (x @ W.T) / rms`. XLA then sums the squares in the launch that makes
`x`, and divides in the one that reads the product. A norm has no launch of its own.

Shapes: D width of what is normed.
"""

import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dflash_jax.kernels.dispatch import platform
from dflash_jax.kernels.products import FEW_ROWS

# Few positions make few thread blocks. So that XLA sums their squares in the launch that makes `x`, they are summed in
# pieces first: of at most 128 numbers in a single position, and of 256 in several. There are at most 64 pieces, or XLA
# does not add their sums where they are read. From `MANY` positions on XLA never adds them there: a row is one piece.
PIECES, MOST, MANY = (256, 128), 64, 32


class Normed(struct.PyTreeNode):
    """A norm's result before its division.

    Attributes:
        rows: what was normed, times the weight.
        factor: what products of `rows` are multiplied by: one over the root mean square.
        apart: whether the product is kept apart from the multiplication, by a barrier.
    """

    rows: Float[Array, "... D"]
    factor: Float[Array, "... 1"]
    apart: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.rows.dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32, rounded before the product with the weight.

    Attributes:
        wide: whether that product is in float32, too, and rounded afterwards.
        added: what is added to the parameter to make the weight; only where `wide`.
    """

    wide: ClassVar[bool] = False
    added: ClassVar[float] = 0.0

    size: int
    eps: float

    def __call__(self, x: Float[Array, "... D"], divided: Float[Array, "... D"] | None = None) -> Float[Array, "... D"]:
        """The normed `x`; `divided` is `x` over its root mean square in float32, if that is known."""
        wide, weight = self.weighed(x)
        return rms_norm(wide, weight, self.eps, divided).astype(x.dtype)

    def for_products(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"] | Normed, Float[Array, "... D"]]:
        """What products read in the place of the normed `x`, and `x` for those who read it afterwards."""
        if not divides_last(x.dtype, x.shape):
            return self(x), x
        wide, weight = self.weighed(x)
        made = (jnp.expand_dims(weight, range(x.ndim - 1)) * wide).astype(x.dtype), square_sums(x), x
        if x.size == self.size:
            # XLA makes all three of a single position by one launch only behind a barrier; it would make some twice.
            made = jax.lax.optimization_barrier(made)
        rows, sums, x = made
        mean = sum(sums[..., i : i + 1] for i in range(sums.shape[-1])) / self.size
        return Normed(rows, jax.lax.rsqrt(mean + self.eps)), x

    @nn.compact
    def weighed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Float[Array, " D"]]:
        """`x` and the weight, in the dtype of their product."""
        weight = self.param("weight", nn.initializers.constant(1.0 - self.added), (self.size,))
        return (x.astype(jnp.float32), weight.astype(jnp.float32) + self.added) if self.wide else (x, weight)


class Float32RMSNorm(RMSNorm):
    """A root-mean-square norm whose product with the weight is in float32, too, and rounded after that."""

    wide = True


def divides_last(dtype: jnp.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a norm that is followed by products leaves the division to these: on a GPU, for few positions, and in
    bfloat16, whose range is that of float32."""
    few = math.prod(shape[:-1]) <= FEW_ROWS and shape[-1] <= MOST * _piece(shape)
    return platform() == "gpu" and dtype == jnp.bfloat16 and few


def _piece(shape: tuple[int, ...]) -> int:
    size, rows = shape[-1], math.prod(shape[:-1])
    if rows >= MANY:
        return size
    return max(n for n in range(1, PIECES[rows == 1] + 1) if size % n == 0)


def square_sums(x: Float[Array, "... D"]) -> Float[Array, "... P"]:
    """The sums of the squares in each of P pieces of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return jnp.sum((wide * wide).reshape(*x.shape[:-1], -1, _piece(x.shape)), axis=-1)


def inverse_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... 1"]:
    """One over the root mean square along the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"] | None,
    eps: float,
    divided: Float[Array, "... D"] | None = None,
) -> Float[Array, "... D"]:
    """`x` over its root mean square along the last axis, rounded before the product with the weight, if any.

    `divided` is that quotient in float32, if it is known.
    """
    normed = (times(x, inverse_rms(x, eps)) if divided is None else divided).astype(x.dtype)
    return normed if weight is None else jnp.expand_dims(weight, range(x.ndim - 1)) * normed


def times(x: Float[Array, "... D"], factor: Float[Array, "... 1"]) -> Float[Array, "... D"]:
    """The product in float32."""
    return x.astype(jnp.float32) * factor
