"""Building blocks that target families and drafters share: norms, products, the MLP.

Strict Linen: `params` is the only collection; caches are arguments and fresh keys and values are results.
Shapes: B rows, T block positions, D model width, M outputs.
"""

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dflash_jax.kernels.dispatch import platform
from dflash_jax.kernels.products import product
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.quantised import Quantised
from dflash_jax.sharding import gathered

# By the names of `hidden_act` in a config.
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu}
PIECES = 256, 128  # of a row, whose squares are summed at once: in a block, and of a single position
FEW_ROWS = 256  # of a product: the widest block or prompt chunk that is multiplied weight first


Weight = Float[Array, "M D"] | Quantised


class Normed(struct.PyTreeNode):
    """A norm's result whose division comes last: products of `rows` are multiplied by `factor`. So on a GPU the sum of
    squares is a part of the launch that makes what is normed, and no other one divides.

    Attributes:
        rows: times the weight, and not yet over their root mean square.
        factor: one over that.
    """

    rows: Float[Array, "... D"]
    factor: Float[Array, "... 1"]
    source: Float[Array, "... D"]
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
        added: what the parameter lacks of the weight; only where `wide`.
        for_products: whether all that reads the result are products, so that it may be a `Normed`.
    """

    wide: ClassVar[bool] = False
    added: ClassVar[float] = 0.0

    size: int
    eps: float
    for_products: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "... D"], squares: Float[Array, "... 1"] | None = None
    ) -> Float[Array, "... D"] | Normed:
        """The normed `x`; `squares` is its mean square, if that is known."""
        weight, dtype = self.param("weight", nn.initializers.constant(1.0 - self.added), (self.size,)), x.dtype
        source = x
        if self.wide:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32) + self.added
        if self.for_products and divides_last(dtype, x.shape):
            rows = jnp.expand_dims(weight, range(x.ndim - 1)) * x
            made = source, rows.astype(dtype), square_sums(x)
            if x.size == self.size:  # XLA makes all three of a single position at once if it must not make them again
                made = jax.lax.optimization_barrier(made)
            source, rows, sums = made
            mean = sum(sums[..., i : i + 1] for i in range(sums.shape[-1])) / self.size
            return Normed(rows, jax.lax.rsqrt(mean + self.eps), source)
        return rms_norm(x, weight, self.eps, squares).astype(dtype)


class Float32RMSNorm(RMSNorm):
    """A root-mean-square norm whose product with the weight is in float32, too, and rounded after that."""

    wide = True


def divides_last(dtype: jnp.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a norm that is followed by products leaves the division to these: on a GPU, for a block of bfloat16,
    whose range is that of float32."""
    return platform() == "gpu" and dtype == jnp.bfloat16 and math.prod(shape[:-1]) <= FEW_ROWS


def mean_square(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Along the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return jnp.mean(wide * wide, axis=-1, keepdims=True)


def square_sums(x: Float[Array, "... D"]) -> Float[Array, "... P"]:
    """The sums of squares of P pieces of the last axis."""
    size = x.shape[-1]
    wide, piece = x.astype(jnp.float32), max(n for n in range(1, PIECES[x.size == size] + 1) if size % n == 0)
    return jnp.sum((wide * wide).reshape(*x.shape[:-1], -1, piece), axis=-1)


def rms_norm(
    x: Float[Array, "... D"],
    weight: Float[Array, " D"] | None,
    eps: float,
    squares: Float[Array, "... 1"] | None = None,
) -> Float[Array, "... D"]:
    """`x` over its root mean square along the last axis, rounded before the product with the weight, if any."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((mean_square(x) if squares is None else squares) + eps)
    normed = wide.astype(x.dtype)
    return normed if weight is None else jnp.expand_dims(weight, range(x.ndim - 1)) * normed


class Linear(nn.Module):
    """`x @ weight.T + bias`; the weight is [out, in] as in the checkpoint."""

    features: tuple[int, int]
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... D"] | Normed) -> Float[Array, "... M"]:
        inputs, outputs = self.features
        weight = parameter(self, "weight", (outputs, inputs))
        y = matmul(x, weight)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (outputs,))[None, None]
        return y


def parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> Float[Array, "..."] | Quantised:
    """The parameter of this shape, which may be quantised where one is given, gathered for its use."""
    path, found = "/".join((*module.path, name)), None
    if module.has_variable("params", name):
        found = module.get_variable("params", name)
    if not isinstance(found, Quantised):
        found = module.param(name, nn.initializers.normal(0.02), shape)
    elif found.shape != shape:
        raise ValueError(f"{path} must have shape {shape}, got {found.shape}")
    return gathered(found, path)


def unfuse(x: Float[Array, "B T M"], sizes: Sequence[int], shards: int) -> list[Float[Array, "B T _"]]:
    """The outputs of a fused product, whose rows are interleaved in `shards` parts (see `checkpoint.fused`)."""
    if len(sizes) == 1:
        return [x]
    *cuts, _ = itertools.accumulate(size // shards for size in sizes)
    if shards == 1:  # XLA fuses these with what follows
        return jnp.split(x, cuts, axis=-1)
    parts = jnp.split(x.reshape(*x.shape[:2], shards, -1), cuts, axis=-1)
    return [part.reshape(*x.shape[:2], -1) for part in parts]


def matmul(x: Float[Array, "B T D"] | Normed, weight: Weight) -> Float[Array, "B T M"]:
    """`x @ weight.T` in the dtype of `x`; see `project`."""
    return project(x, weight).astype(x.dtype)


def project(x: Float[Array, "B T D"] | Normed, weight: Weight) -> Float[Array, "B T M"]:
    """`x @ weight.T` accumulated and returned in float32.

    For a decoding block the weight stands on the left, because on CPU a [M, D] x [D, 16] product runs up
    to twice as fast as the same product written [16, D] x [D, M]. Beyond `FEW_ROWS` it is the other way round, and on
    GPUs, too, where it spares the kernels that turn what comes out. Products of float32 are exact to float32.
    """
    if isinstance(x, Normed):
        y = project(x.rows, weight)
        return (jax.lax.optimization_barrier(y) if x.apart else y) * x.factor
    if isinstance(weight, Quantised):
        if weight.scale.ndim == 1:  # the products of small numbers are scaled, not the numbers
            return project(x, weight.values.astype(x.dtype)) * weight.scale.astype(jnp.float32)[None, None]
        weight = weight.astype(x.dtype)
    if x.shape[0] * x.shape[1] > FEW_ROWS or platform() == "gpu":
        return product("btd,md->btm", x, weight)
    return jnp.moveaxis(product("md,btd->mbt", weight, x), 0, -1)


class MLP(nn.Module):
    """SwiGLU, or its like with another activation of the gate; gate and up are fused into one weight."""

    width: int
    inner: int
    layout: Layout = WHOLE
    bias: bool = False
    activation: str = "silu"

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"] | Normed) -> Float[Array, "B T D"]:
        width, inner = self.width, self.inner
        if isinstance(x, Normed) and x.factor.size == 1:
            x = x.replace(apart=True)
        both = Linear((width, 2 * inner), self.bias, name="gate_up_proj")(x)
        gate, up = unfuse(both, (inner, inner), self.layout.shards)
        return Linear((inner, width), self.bias, name="down_proj")(ACTIVATIONS[self.activation](gate) * up)
