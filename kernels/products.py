"""How exact products are, on every device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def precision(x: Array) -> jax.lax.Precision | None:
    """The precision of a product with operands like `x`: float32 as float32, and anything narrower as it is.

    Left to itself, a TPU rounds float32 operands to bfloat16, and a GPU may round them to TF32.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def product(pattern: str, a: Array, b: Array) -> Array:
    """`jnp.einsum`, summed and returned in float32."""
    return jnp.einsum(pattern, a, b, precision=precision(a), preferred_element_type=jnp.float32)
