"""Products of sorted rows with the weights of their groups.

Shapes: M rows, E groups, N outputs, D inputs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from dflash_jax.quantised import EightBit, Quantised

from ..dispatch import Name, choose
from . import pallas_gpu, pallas_tpu, reference
from .trial import Trial

IMPLEMENTATIONS = {"xla": reference, "tpu": pallas_tpu, "gpu": pallas_gpu}


@partial(jax.jit, static_argnames="implementation")  # a call by this name in every trace; see `benchmarks.costs`
def grouped_matmul(
    x: Float[Array, "M D"],
    weights: Num[Array, "E N D"] | Quantised,
    ends: Int[Array, " E"],
    *,
    implementation: Name | None = None,
) -> Float[Array, "M N"]:
    """`x[i] @ weights[e].T` for every row i of group e, summed and returned in float32.

    The rows of a group lie side by side, and the groups in order. Rows after the last group are zero, and a group
    without rows costs nothing: its weights are not read.

    Args:
        weights: quantized ones are dequantized group by group, where they are multiplied; of a scale for each output,
            the sums are multiplied instead.
        ends: where the rows of each group end, and those of the next begin; at most M.
        implementation: "xla", "tpu" or "gpu" (Pallas); see `dispatch`.

    Raises:
        ValueError: the named implementation does not support this case; the message says why.
    """
    row, scale = jnp.arange(x.shape[0]), None
    if isinstance(weights, EightBit) and weights.block is None:
        weights, scale = weights.values, weights.scale.astype(jnp.float32)
    trial = Trial.of(x, weights)
    chosen = choose(IMPLEMENTATIONS, x, weights, implementation=implementation, trial=trial, call=grouped_matmul)
    out = chosen.grouped_matmul(x, weights, ends)
    if scale is not None:
        group = jnp.sum(ends[None] <= row[:, None], axis=1)
        out = out * scale[jnp.minimum(group, scale.shape[0] - 1)]
    return jnp.where((row < ends[-1])[:, None], out, 0.0)
