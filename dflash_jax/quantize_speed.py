"""Whether products with quantized weights are slower than with plain ones on the device at hand."""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.layers import project
from dflash_jax.quantised import Quantised
from dflash_jax.target import Target

TIMES = 7  # each is timed, of which the median counts
SLOWER = 1.1  # than this is worth a word


def slower_than_plain(target: Target, quantize: Mapping[str, str]) -> str | None:
    """Says so if a product of one position is slower with a quantized weight; None if not, or where devices share one.

    Args:
        quantize: what was quantized as the target was loaded.
    """
    if target.mesh is not None:
        return None
    leaves = jax.tree.leaves(target.params, is_leaf=lambda x: isinstance(x, Quantised))
    matrices = [x for x in leaves if isinstance(x, Quantised) and x.ndim == 2]
    found = {}
    for weight in {x.form: x for x in sorted(matrices, key=lambda x: x.values.nbytes)}.values():  # the largest of each
        times = seconds(weight, target.dtype)
        if times[0] > SLOWER * times[1]:
            found[weight.form] = times[0] / times[1]
    if not found:
        return None
    listed = ", ".join(f"{form} {ratio:.1f} times" for form, ratio in found.items())
    return (
        f"note: here, a product with a quantized weight takes longer than with a plain one ({listed} as long): "
        f"--quantize {','.join(f'{key}={how}' for key, how in quantize.items())} saves memory and costs time"
    )


def seconds(weight: Quantised, dtype: jnp.dtype) -> tuple[float, float]:
    """Of a product of one position with this weight, and with the plain one that it stands for."""
    x = jnp.ones((1, 1, weight.shape[1]), dtype)
    plain = jax.jit(lambda w: w.astype(dtype))(weight)
    multiply: Callable[..., jax.Array] = jax.jit(project)
    times: list[list[float]] = [[], []]
    for i in range(TIMES + 1):
        for one, w in zip(times, (weight, plain), strict=True):
            began = time.perf_counter()
            jax.block_until_ready(multiply(x, w))
            if i:  # the first one is compiled
                one.append(time.perf_counter() - began)
    return float(np.median(times[0])), float(np.median(times[1]))
