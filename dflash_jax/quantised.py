"""Weights in few bits. Shapes: M outputs, D inputs, G groups of inputs that share a scale."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Num


class Quantised(struct.PyTreeNode):
    """A weight in few bits, in the place of a plain one: `values * scale`.

    Attributes:
        values: in the dtype they are stored in.
        scale: of each output, [M], or of each output and group of inputs, [M, G].
    """

    values: Num[Array, "M D"]
    scale: Float[Array, " M"] | Float[Array, "M G"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of what is computed with it."""
        return self.scale.dtype

    def astype(self, dtype: jnp.dtype) -> Float[Array, "M D"]:
        """The plain weight."""
        groups = self.scale.reshape(self.scale.shape[0], -1)
        each = self.values.shape[-1] // groups.shape[1]
        return self.values.astype(dtype) * jnp.repeat(groups.astype(dtype), each, axis=1)
