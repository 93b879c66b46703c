"""Products of a few tokens with the weights of those experts that any of them goes to.

All tokens are multiplied with each of these experts, which costs nothing where the weights are what takes time, and
nothing is sorted. A product with an expert that a token does not go to is left unused.

Shapes: X is 1, or one for each slot; T tokens, E experts, S slots for active ones, N outputs, D inputs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.quantised import Quantised

from ..dispatch import Name, choose
from . import mosaic_gpu, reference
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "gpu": mosaic_gpu}
MOST_TOKENS = 64  # beyond which tokens are sorted by expert instead


def serves(tokens: int, chosen: int, dtype: jnp.dtype, first: Array | Quantised, second: Array | Quantised) -> bool:
    """Whether a kernel multiplies so many tokens with the first weights of experts, and the result with the second.
    XLA's loop never does: it is what the kernel is compared with.

    Args:
        chosen: how many experts all tokens choose, counted for each of them.
    """
    if tokens > MOST_TOKENS:
        return False
    found, slots = [], min(first.shape[0], chosen)
    for weight, count in ((first, 1), (second, slots)):
        x = jax.ShapeDtypeStruct((count, tokens, weight.shape[-1]), dtype)
        trial = Trial.of(x, weight, slots)
        found.append(choose(IMPLEMENTATIONS, x, weight, implementation=None, trial=trial, call=multiply))
    return reference not in found


def active(chosen: Int[Array, " M"], experts: int) -> tuple[Int[Array, " S1"], Int[Array, " E"]]:
    """The experts that are chosen, in their order, and after them how many they are; and the slot of each expert.

    Args:
        chosen: those of all tokens; what is no expert counts for nothing.
    """
    index = jnp.arange(experts)
    present = jnp.any(chosen[:, None] == index[None], axis=0)
    slot = jnp.sum(present[None] & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    slots = jnp.arange(min(experts, chosen.shape[0]))
    mine = present[None] & (slot[None] == slots[:, None])
    found = jnp.sum(jnp.where(mine, index[None], 0), axis=1, dtype=jnp.int32)
    return jnp.concatenate([found, jnp.sum(present, dtype=jnp.int32)[None]]), slot


@partial(jax.jit, static_argnames="implementation")  # a call by this name in every trace; see `benchmarks.costs`
def multiply(
    x: Float[Array, "X T D"],
    weights: Float[Array, "E N D"] | Quantised,
    slots: Int[Array, " S1"],
    *,
    implementation: Name | None = None,
) -> Float[Array, "S T N"]:
    """`x[s] @ weights[slots[s]].T`, summed and returned in float32; of slots that are not in use, anything. The kernel
    has no gradient.

    Args:
        slots: see `active`.
        implementation: "xla" or "gpu" (Pallas); see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    trial = Trial.of(x, weights, slots.shape[0] - 1)
    chosen = choose(IMPLEMENTATIONS, x, weights, implementation=implementation, trial=trial, call=multiply)
    return chosen.multiply(x, weights, slots)
