"""Convolutions over a block's slots around every sublayer of a drafter (reference `dflash/model.py`).

DFlash 2 has them, and LiLiCorr may. Shapes: B rows, T block slots, D width, K taps, G groups.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from dflash_jax import checkpoint
from dflash_jax.drafters import dflash
from dflash_jax.drafters.config import DFlashConfig
from dflash_jax.drafters.fields import Lookup, size
from dflash_jax.models.layers import Linear
from dflash_jax.sharding import Rule

FIELDS = "conv_kernel_size", "conv_group_size"
ZEROS = "base_kernel", "kernel_projection/weight"
RULES = (Rule(r"\w+_conv/base_kernel", 3, P()), Rule(r"kernel_projection/weight", 2, P()))


@dataclass(frozen=True)
class ConvolvedConfig(DFlashConfig):
    """A drafter that may have convolutions.

    Attributes:
        conv_kernel_size: slots that a convolution reads: a slot's own and those before it; 0 has none.
        conv_group_size: channels that share a dynamic coefficient.
    """

    conv_kernel_size: int = 0
    conv_group_size: int = 0


def read(get: Lookup, hidden_size: int) -> dict[str, int]:
    """Their fields in a `config.json`, as keyword arguments.

    Raises:
        ValueError: groups do not divide the width, or a field is missing.
    """
    fields = {name: size(get, name, most=2**16) for name in FIELDS}
    if hidden_size % fields["conv_group_size"]:
        raise ValueError(f"conv_group_size must divide hidden_size {hidden_size}, got {fields['conv_group_size']}")
    return fields


class Convolution(nn.Module):
    """A causal convolution over a block's slots, whose coefficients depend on the sublayer's input.

    One before the sublayer and one after it. A channel's coefficients are its own plus those that its group has at
    this slot. Slots before the anchor are zeros; the committed context is not read.
    """

    width: int
    taps: int
    group: int

    def setup(self):
        identity = lambda _, shape: jnp.zeros(shape).at[:, 0].set(1.0)
        self.base_kernel = self.param("base_kernel", identity, (2, self.taps, self.width))
        self.kernel_projection = Linear((self.width, 2 * self.taps * self.width // self.group))

    def coefficients(self, h: Float[Array, "B T D"]) -> Float[Array, "B T 2 K G"]:
        """Of both convolutions, for each group."""
        return self.kernel_projection(h).reshape(*h.shape[:2], 2, self.taps, -1)

    def __call__(self, x: Float[Array, "B T D"], dynamic: Float[Array, "B T 2 K G"], which: int) -> Array:
        B, T, D = x.shape
        groups = x.reshape(B, T, -1, self.group)
        base = self.base_kernel[which].reshape(1, 1, self.taps, -1, self.group)
        out = jnp.zeros_like(groups)
        for tap in range(self.taps):
            before = jnp.pad(groups, ((0, 0), (tap, 0), (0, 0), (0, 0)))[:, :T]
            out = out + (base[:, :, tap] + dynamic[:, :, which, tap, :, None]) * before
        return out.reshape(B, T, D)


class Layer(dflash.Layer):
    """A layer of DFlash with convolutions around attention and MLP."""

    def before(self, name: str, h: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], PyTree]:
        c = self.config
        assert isinstance(c, ConvolvedConfig)
        convolve = Convolution(c.hidden_size, c.conv_kernel_size, c.conv_group_size, name=f"{name}_conv")
        dynamic = convolve.coefficients(h)
        return convolve(h, dynamic, 0), (convolve, dynamic)

    def after(self, out: Float[Array, "B T D"], context: PyTree) -> Float[Array, "B T D"]:
        convolve, dynamic = context
        return convolve(out, dynamic, 1)


def initial(path: str, value: np.ndarray | None) -> np.ndarray | None:
    """A new parameter: convolutions hand on what they get.

    Args:
        value: zeros for those in `ZEROS`.
    """
    if value is not None and path.endswith("base_kernel"):
        value[:, 0] = 1
    return value


def tensors(config: ConvolvedConfig) -> checkpoint.Table:
    """Method, section 6."""
    D, K = config.hidden_size, config.conv_kernel_size
    table: checkpoint.Table = {}
    for i in range(config.num_hidden_layers):
        for name in ("attention_conv", "mlp_conv"):
            path, prefix = f"layers_{i}/{name}", f"layers.{i}.{name}"
            table[f"{path}/base_kernel"] = checkpoint.copied(f"{prefix}.base_kernel", 2, K, D)
            table[f"{path}/kernel_projection/weight"] = checkpoint.copied(
                f"{prefix}.kernel_projection.weight", 2 * K * D // config.conv_group_size, D
            )
    return table
