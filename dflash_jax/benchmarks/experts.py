"""How many experts a pass over a block reads: the wider the block, the more of them, and the more it costs."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax import models
from dflash_jax.mesh import entered
from dflash_jax.models.attention import Pass
from dflash_jax.models.experts import Experts, routing
from dflash_jax.target import Target


def experts_hit(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], widths: Sequence[int]
) -> dict[int, float]:
    """Different experts that `width` tokens in a row go through, for each width: the mean over answers and layers.

    A step verifies drafted tokens, too, of which some are wrong; here all are tokens of the answers.

    Args:
        texts: prompt and answer of each request, in tokens.
        widths: answers that are shorter than a width do not count for it; a width without any is left out.

    Returns:
        {width: experts}; empty if the model has none.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    found: dict[int, list[float]] = {width: [] for width in widths}
    for prompt, answer in texts:
        tokens = np.zeros((1, -(-longest // 64) * 64), np.int32)
        tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        with entered(target.mesh):
            chosen = [np.asarray(layer)[0, len(prompt) :][: len(answer)] for layer in _routed(target, tokens)]
        for layer in chosen:
            for width in widths:
                starts = range(0, len(answer) - width + 1, width)
                found[width] += [len(np.unique(layer[start : start + width])) for start in starts]
    return {width: sum(counts) / len(counts) for width, counts in found.items() if counts}


@jax.jit
def _routed(target: Target, tokens: Int[Array, "1 T"]) -> list[Int[Array, "1 T k"]]:
    """Experts of every token, of each layer that has experts: its router once more, on what it reads."""
    config, params = target.config, target.params
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts]
    if not sparse:
        return []
    found, arguments = [], inspect.signature(Experts.__call__)

    def look(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        experts = context.module
        if isinstance(experts, Experts) and context.method_name == "__call__":
            given = arguments.bind(experts, *args, **kwargs).arguments
            read = given["x"] if given.get("routed") is None else given["routed"]
            found.append(routing(experts.config, experts.variables["params"], read)[1])
        return call(*args, **kwargs)

    positions, lengths = jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32)
    cache, taps = target.init_cache(1, tokens.shape[1]), tuple(i - 1 for i in sparse)
    _, inputs, _ = target.forward(tokens, positions, None, cache, lengths, taps=taps)
    for i, x in zip(sparse, jnp.split(inputs, len(sparse), axis=-1), strict=True):
        at = Pass(positions, None, lengths, None)
        at, entry = at.replace(rope=at.tables(config.layers[i].mixer, x.dtype)), cache.entry(i)
        layer = models.family(config.model_type).Model.layer(config, config.layers[i], target.layout)
        with nn.intercept_methods(look):
            layer.apply({"params": params[f"layers_{i}"]}, x, at, entry, None)
    return found
