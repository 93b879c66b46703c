"""Qwen3 dense targets (`model_type: qwen3`).

Reference: transformers `models/qwen3/modeling_qwen3.py`.
"""

from dataclasses import replace
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.cache import Fresh
from dflash_jax.checkpoint import Table
from dflash_jax.config import (
    DECODER_FIELDS,
    LayerConfig,
    Raw,
    TargetConfig,
    attention_config,
    check_fields,
    has_fp8,
    layer_types,
    require,
    target_fields,
)
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models import tables
from dflash_jax.models.attention import Attention, Pass
from dflash_jax.models.decoder import Decoder, pre_norm
from dflash_jax.models.layers import MLP


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows follow `layer_types`, and only where `use_sliding_window` is set."""
    check_fields(raw, [*DECODER_FIELDS, "quantization_config"], {"hidden_act": "silu", "mlp_bias": False})
    depth = require(raw, "num_hidden_layers")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    types = layer_types(raw, depth)
    if raw.get("layer_types") is None and window is not None:
        full = raw.get("max_window_layers", 28)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(depth)]
    if window is not None:
        require(raw, "sliding_window")
    if "sliding_attention" in types and window is None:
        raise ValueError("sliding_attention layers need use_sliding_window and sliding_window in config.json")
    attention, inner = attention_config(raw), require(raw, "intermediate_size")
    windows = (window if kind == "sliding_attention" else None for kind in types)
    return TargetConfig(
        **target_fields(raw),
        layers=tuple(LayerConfig(replace(attention, window=each), inner) for each in windows),
        model_type="qwen3",
        attention_bias=bool(raw.get("attention_bias")),
        fp8=has_fp8(raw),
    )


class Layer(nn.Module):
    """Pre-norm decoder layer with a norm of every query and key head."""

    config: TargetConfig
    layer: LayerConfig
    layout: Layout

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: Any, shared: Fresh | None
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        c, layer, D = self.config, self.layer, self.config.hidden_size
        attention = Attention(D, layer.mixer, self.layout, c.attention_bias, c.rms_norm_eps, name="self_attn")
        mlp = MLP(D, layer.intermediate_size, self.layout, name="mlp")
        return pre_norm(c, attention, mlp, x, at, entry, shared)


class Model(Decoder):
    """See `Decoder`."""

    layer = Layer


def tensors(config: TargetConfig, layout: Layout = WHOLE) -> Table:
    """Checkpoint tensors of every parameter."""

    def layer(path: str, prefix: str, each: LayerConfig) -> Table:
        more = {"bias": config.attention_bias, "fp8": config.fp8}
        return tables.decoder_layer(path, prefix, config.hidden_size, each, layout, qk_norm=True, **more)

    return tables.decoder(config, layer)


ignored = tables.ignored
