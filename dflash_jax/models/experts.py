"""Mixture of experts in place of an MLP: a router chooses experts for every token.

Shapes: B rows, T block positions, D model width, E experts, k of them per token, I inner width of one.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import ExpertsConfig
from dflash_jax.kernels import active_experts
from dflash_jax.kernels.grouped_matmul import grouped_matmul
from dflash_jax.kernels.products import product
from dflash_jax.mesh import HEADS, WHOLE, Layout, current_mesh, on_each_device, split_rows
from dflash_jax.models.layers import ACTIVATIONS, parameter
from dflash_jax.quantised import Quantised

Weight = Array | Quantised  # of all experts, [E, M, D]
COMPARED = 512  # rows at most whose places are found by comparing all with all
LEAST_SUM = 1e-20  # of the weights of a token's experts: sigmoids may all be zero


class Experts(nn.Module):
    """Experts like `layers.MLP`, each with gate and up fused into one weight; parameters [E, 2I, D] and [E, D, I]."""

    width: int
    config: ExpertsConfig
    layout: Layout = WHOLE

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"] | None = None,
        routed: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the sum of the chosen experts' outputs by their weights.

        Args:
            valid: which positions are; the others give zero. None is all.
            routed: what the router reads; None is `x`.
        """
        c, (E, D) = self.config, (self.config.num_experts, self.width)
        inner = c.intermediate_size

        def bias(name: str, *shape: int) -> Array | None:
            return self.param(name, nn.initializers.zeros, shape) if c.bias else None

        router = self.param("router", nn.initializers.normal(0.02), (E, D))
        gate_up, down = parameter(self, "gate_up_proj", (E, 2 * inner, D)), parameter(self, "down_proj", (E, D, inner))
        gate_up_bias, down_bias = bias("gate_up_bias", E, 2 * inner), bias("down_bias", E, D)
        correction = self.param("correction_bias", nn.initializers.zeros, (E,)) if c.correction_bias else None
        scale = self.param("per_expert_scale", nn.initializers.ones, (E,)) if c.per_expert_scale else None
        params = {"router": router, "router_bias": bias("router_bias", E)}
        params |= {"correction_bias": correction, "per_expert_scale": scale}
        weights, chosen = routing(c, params, x if routed is None else routed)
        if valid is not None:
            weights, chosen = jnp.where(valid[..., None], weights, 0.0), jnp.where(valid[..., None], chosen, E)
        rows = P(split_rows(x.shape[0]))

        def on_device(
            x: Array, weights: Array, chosen: Array, gate_up: Weight, gate_up_bias: Array | None, down: Weight
        ) -> Array:
            settings = c.swiglu_limit, c.activation
            if current_mesh() is None:
                return apply_experts(x, weights, chosen, gate_up, gate_up_bias, down, *settings)
            count = gate_up.shape[0]  # experts of this device
            index = chosen - count * jax.lax.axis_index("expert")
            local = (index >= 0) & (index < count)
            weights, index = jnp.where(local, weights, 0.0), jnp.where(local, index, count)
            return jax.lax.psum(apply_experts(x, weights, index, gate_up, gate_up_bias, down, *settings), HEADS)

        both, inner_last = P("expert", "model"), P("expert", None, "model")
        specs = (rows, rows, rows, both, both, inner_last)
        out = on_each_device(on_device, specs, rows)(x, weights, chosen, gate_up, gate_up_bias, down)
        if down_bias is not None:
            out = out + product("btk,btkd->btd", weights, down_bias[chosen].astype(jnp.float32))
        return out.astype(x.dtype)


def routing(
    config: ExpertsConfig, params: Mapping[str, Array | None], x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and experts of every token, in float32; of equal scores the first expert wins.

    Args:
        params: of `Experts`.
    """

    def wide(name: str) -> Float[Array, " E"] | None:
        return None if (found := params.get(name)) is None else found.astype(jnp.float32)

    router = params["router"]
    assert router is not None
    logits = product("btd,ed->bte", x, router)
    if (bias := wide("router_bias")) is not None:
        logits = logits + bias[None, None]
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "softmax_topk": lambda x: x}
    found = scores[config.scores](logits)
    if (correction := wide("correction_bias")) is None:
        weights, chosen = jax.lax.top_k(found, config.num_experts_per_tok)
    else:
        _, chosen = jax.lax.top_k(found + correction[None, None], config.num_experts_per_tok)
        weights = jnp.take_along_axis(found, chosen, axis=-1)
    if config.scores == "softmax_topk":
        weights = jax.nn.softmax(weights, axis=-1)
    if config.norm_topk_prob:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), LEAST_SUM)
    if (scale := wide("per_expert_scale")) is not None:
        weights = weights * scale[chosen]
    return weights * config.routed_scaling_factor, chosen


def apply_experts(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    gate_up: Float[Array, "E J D"] | Quantised,
    gate_up_bias: Float[Array, "E J"] | None,
    down: Float[Array, "E D I"] | Quantised,
    limit: float | None = None,
    activation: str = "silu",
) -> Float[Array, "B T D"]:
    """Two products with the weights of experts, of all rows or of those that are sorted by expert, and the sum over the
    experts of each token in their order."""
    (B, T, D), k, experts = x.shape, chosen.shape[2], gate_up.shape[0]
    flat, rows = chosen.reshape(-1), x.reshape(B * T, D)

    def between(both: Float[Array, "... J"]) -> Float[Array, "... I"]:
        gate, up = jnp.split(both.astype(x.dtype), 2, axis=-1)
        return ACTIVATIONS[activation](gate) * up if limit is None else clamped_swiglu(gate, up, limit)

    if active_experts.serves(B * T, B * T * k, x.dtype, gate_up, down):
        slots, slot = active_experts.active(flat, experts)
        both = active_experts.multiply(rows[None], gate_up, slots)
        if gate_up_bias is not None:
            both = both + gate_up_bias[slots[:-1], None].astype(jnp.float32)
        out = active_experts.multiply(between(both), down, slots).astype(x.dtype)
        valid, token = flat < experts, jnp.arange(B * T * k) // k
        found = jnp.where(valid[:, None], out[slot[jnp.minimum(flat, experts - 1)], token], 0)
    else:
        order, back, ends = by_expert(flat, experts)
        both = grouped_matmul(rows[order // k], gate_up, ends)
        if gate_up_bias is not None:
            both = both + gate_up_bias[flat[order]].astype(jnp.float32)
        found = grouped_matmul(between(both), down, ends).astype(x.dtype)[back]
    return product("btkd,btk->btd", found.reshape(B, T, k, D).astype(jnp.float32), weights)


def by_expert(chosen: Int[Array, " M"], experts: int) -> tuple[Int[Array, " M"], Int[Array, " M"], Int[Array, " E"]]:
    """The order of rows by expert, where each row went, and where the rows of each expert end, invalid positions left
    out.

    Few rows are compared with each other, which is faster than sorting, and on a GPU fewer kernels.
    """
    M = chosen.shape[0]
    if M > COMPARED:
        order = jnp.argsort(chosen, stable=True)
        ends = jnp.cumsum(jnp.bincount(chosen, length=experts))
        return order, jnp.argsort(order), ends.astype(jnp.int32)
    ends = jnp.sum(chosen[:, None] <= jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    row, mine, other = jnp.arange(M), chosen[:, None], chosen[None]
    before = (other < mine) | ((other == mine) & (row[None] < row[:, None]))
    back = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(back[None] == row[:, None], row[None], 0), axis=1), back, ends


def clamped_swiglu(gate: Float[Array, "... I"], up: Float[Array, "... I"], limit: float) -> Float[Array, "... I"]:
    """gpt-oss's activation."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * nn.sigmoid(1.702 * gate)
