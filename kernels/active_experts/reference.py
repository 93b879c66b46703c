"""XLA implementation: expert by expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.quantised import Quantised

from ..products import product


def multiply(
    x: Float[Array, "X T D"], weights: Float[Array, "E N D"] | Quantised, slots: Int[Array, " S1"]
) -> Float[Array, "S T N"]:
    """See `api.multiply`."""

    def one(slot: Int[Array, ""]) -> Float[Array, "T N"]:
        weight = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, slots[slot], keepdims=False), weights)
        return product("td,nd->tn", x[jnp.minimum(slot, x.shape[0] - 1)], weight.astype(x.dtype))

    return jax.lax.map(one, jnp.arange(slots.shape[0] - 1))
