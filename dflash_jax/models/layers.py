"""Building blocks that target families and drafters share: products, the MLP.

Strict Linen: `params` is the only collection; caches are arguments and fresh keys and values are results.
Shapes: B rows, T block positions, D model width, M outputs.
"""

import itertools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.kernels.dispatch import platform
from dflash_jax.kernels.linear import dense, linear
from dflash_jax.kernels.products import FEW_ROWS, product
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.norms import Normed
from dflash_jax.quantised import FourBit, Quantised
from dflash_jax.sharding import gathered

# By the names of `hidden_act` in a config.
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu}


Weight = Float[Array, "M D"] | Quantised


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


def parameter(
    module: nn.Module, name: str, shape: tuple[int, ...], *, gather: bool = True
) -> Float[Array, "..."] | Quantised:
    """The parameter of this shape, which may be quantized where one is given, gathered for its use unless that comes
    later."""
    path, found = "/".join((*module.path, name)), None
    if module.has_variable("params", name):
        found = module.get_variable("params", name)
    if not isinstance(found, Quantised):
        found = module.param(name, nn.initializers.normal(0.02), shape)
    elif found.shape != shape:
        raise ValueError(f"{path} must have shape {shape}, got {found.shape}")
    return gathered(found, path) if gather else found


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
    many = x.shape[0] * x.shape[1] > FEW_ROWS and platform() == "gpu"
    if many and isinstance(x, jax.Array):  # cuBLAS would write float32 otherwise
        plain = weight.astype(x.dtype) if isinstance(weight, Quantised) else weight
        return product("btd,md->btm", x, plain, rounded=True)
    return project(x, weight).astype(x.dtype)


def project(x: Float[Array, "B T D"] | Normed, weight: Weight) -> Float[Array, "B T M"]:
    """`x @ weight.T` accumulated and returned in float32."""
    if isinstance(x, Normed):
        y, apart = project(x.rows, weight), x.apart and not isinstance(weight, FourBit)
        return (jax.lax.optimization_barrier(y) if apart else y) * x.factor
    return linear(x, weight) if isinstance(weight, Quantised) else dense(x, weight)


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
        if isinstance(x, Normed):  # XLA would fold a scalar factor into the product, and compute it in an extra launch
            x = x.replace(apart=x.factor.size == 1)
        both = Linear((width, 2 * inner), self.bias, name="gate_up_proj")(x)
        gate, up = unfuse(both, (inner, inner), self.layout.shards)
        return Linear((inner, width), self.bias, name="down_proj")(ACTIVATIONS[self.activation](gate) * up)
