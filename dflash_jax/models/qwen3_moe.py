"""Qwen3 targets with experts (`model_type: qwen3_moe`).

Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.cache import Fresh
from dflash_jax.checkpoint import Table
from dflash_jax.config import ExpertsConfig, LayerConfig, Raw, TargetConfig, require, token_ids
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models import qwen3, tables
from dflash_jax.models.attention import Attention, Pass
from dflash_jax.models.decoder import Decoder, pre_norm
from dflash_jax.models.experts import Experts
from dflash_jax.models.layers import MLP

_FIELDS = """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers router_aux_loss_coef
""".split()


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`. `norm_topk_prob` must be there: transformers' default is not what checkpoints have."""
    dense = qwen3.config({name: value for name, value in raw.items() if name not in _FIELDS})
    if not isinstance(raw.get("norm_topk_prob"), bool):
        raise ValueError(f"config.json must give norm_topk_prob, true or false, got {raw.get('norm_topk_prob')!r:.80}")
    names = "num_experts", "num_local_experts"  # the second is what transformers 5 writes
    counts = {require(raw, name) for name in names if raw.get(name) is not None}
    if len(counts) != 1:
        raise ValueError(f"config.json must give num_experts, once, got {sorted(counts) or 'none'}")
    (count,) = counts
    experts = ExpertsConfig(
        count,
        require(raw, "num_experts_per_tok"),
        require(raw, "moe_intermediate_size"),
        norm_topk_prob=raw["norm_topk_prob"],
    )
    experts.check()
    step = require(raw, "decoder_sparse_step") if raw.get("decoder_sparse_step") is not None else 1
    plain = token_ids(raw.get("mlp_only_layers"))
    has = lambda i: i not in plain and (i + 1) % step == 0
    layers = tuple(replace(layer, experts=experts) if has(i) else layer for i, layer in enumerate(dense.layers))
    return replace(dense, layers=layers, model_type="qwen3_moe")


class Layer(nn.Module):
    """Qwen3's layer, with experts or an MLP."""

    config: TargetConfig
    layer: LayerConfig
    layout: Layout

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: Any, shared: Fresh | None
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        c, layer, D = self.config, self.layer, self.config.hidden_size
        attention = Attention(D, layer.mixer, self.layout, c.attention_bias, c.rms_norm_eps, name="self_attn")
        if layer.experts:
            mlp = partial(Experts(D, layer.experts, self.layout, name="experts"), counts=at.counts)
        else:
            mlp = MLP(D, layer.intermediate_size, self.layout, name="mlp")
        return pre_norm(c, attention, mlp, x, at, entry, shared)


class Model(Decoder):
    """See `Decoder`."""

    layer = Layer


def tensors(config: TargetConfig, layout: Layout = WHOLE) -> Table:
    """Checkpoint tensors of every parameter."""

    def layer(path: str, prefix: str, each: LayerConfig) -> Table:
        bias, D, fp8 = config.attention_bias, config.hidden_size, config.fp8
        table = tables.decoder_layer(path, prefix, D, each, layout, bias=bias, qk_norm=True, fp8=fp8)
        if each.experts:
            table = {name: leaf for name, leaf in table.items() if "/mlp/" not in name}
            table |= tables.experts(f"{path}/experts", f"{prefix}.mlp", D, each.experts, layout, fp8=fp8)
        return table

    return tables.decoder(config, layer)


ignored = tables.ignored
