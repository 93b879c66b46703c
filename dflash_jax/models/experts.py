"""Experts in place of an MLP: a router sends every token through some of many.

Shapes: B rows, T block positions, D model width, E experts, k of them per token, I inner width of one.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dflash_jax.config import ExpertsConfig
from dflash_jax.kernels.grouped_matmul import grouped_matmul
from dflash_jax.kernels.products import product
from dflash_jax.mesh import HEADS, WHOLE, Layout, current_mesh, on_each_device, split_rows
from dflash_jax.sharding import gathered


class Experts(nn.Module):
    """SwiGLU experts, each with gate and up fused into one weight; parameters [E, 2I, D] and [E, D, I]."""

    width: int
    config: ExpertsConfig
    layout: Layout = WHOLE

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], counts: Int[Array, " B"] | None = None) -> Float[Array, "B T D"]:
        """Returns the sum of the chosen experts' outputs by their weights.

        Args:
            counts: how many of each row's positions go through experts; the others give zero. None is all.
        """
        c, D = self.config, self.width
        draw = nn.initializers.normal(0.02)
        router = self.param("router", draw, (c.num_experts, D))
        gate_up = self.param("gate_up_proj", draw, (c.num_experts, 2 * c.intermediate_size, D))
        down = self.param("down_proj", draw, (c.num_experts, D, c.intermediate_size))
        weights, chosen = route(c, product("btd,ed->bte", x, router))
        if counts is not None:
            read = jnp.arange(x.shape[1])[None] < counts[:, None]
            chosen = jnp.where(read[..., None], chosen, c.num_experts)
        path = "/".join(self.path)
        gate_up, down = gathered(gate_up, f"{path}/gate_up_proj"), gathered(down, f"{path}/down_proj")
        rows = P(split_rows(x.shape[0]))

        def local(x, weights, chosen, gate_up, down):
            out = _apply(x, weights, chosen, gate_up, down)
            return out if current_mesh() is None else jax.lax.psum(out, HEADS)

        specs = (rows, rows, rows, P(None, HEADS), P(None, None, HEADS))
        return on_each_device(local, specs, rows)(x, weights, chosen, gate_up, down).astype(x.dtype)


def route(config: ExpertsConfig, logits: Float[Array, "B T E"]) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and experts of every token, in float32; of equal scores the first expert wins."""
    scores = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(scores, config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def _apply(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    gate_up: Float[Array, "E J D"],
    down: Float[Array, "E D I"],
) -> Float[Array, "B T D"]:
    """Rows sorted by expert, two grouped products, and the sum over the experts of each token in their order."""
    (B, T, D), k, experts = x.shape, chosen.shape[2], gate_up.shape[0]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)  # of those that go nowhere, none is counted
    rows = x.reshape(B * T, D)[order // k]
    gate, up = jnp.split(grouped_matmul(rows, gate_up, sizes).astype(x.dtype), 2, axis=-1)
    out = grouped_matmul(nn.silu(gate) * up, down, sizes).astype(x.dtype)
    back = jnp.argsort(order)
    return jnp.einsum("btkd,btk->btd", out[back].reshape(B, T, k, D).astype(jnp.float32), weights)
