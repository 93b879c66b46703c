"""Llama targets (`model_type: llama`), and Mistral's (`mistral`), which are Llama with a window on every layer.

Reference: transformers `models/llama/modeling_llama.py` and `models/mistral/modeling_mistral.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    require,
    target_fields,
)
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models import tables
from dflash_jax.models.attention import Attention, Pass
from dflash_jax.models.decoder import Decoder, pre_norm
from dflash_jax.models.layers import MLP

_THETA = 10000.0  # of configs that name none: those of the first Llamas


@dataclass(frozen=True)
class LlamaConfig(TargetConfig):
    """A Llama.

    Attributes:
        mlp_bias: whether the products of the MLP have a bias.
    """

    mlp_bias: bool = False


def config(raw: Raw) -> LlamaConfig:
    """Reads `config.json`. The head dim, the number of key-value heads and theta may be missing."""
    mistral = raw.get("model_type") == "mistral"
    unread = {"layer_types", "use_sliding_window"} | (set() if mistral else {"sliding_window"})
    known = [name for name in DECODER_FIELDS if name not in unread]
    if mistral:
        if "sliding_window" not in raw:
            raise ValueError("config.json of a mistral must give sliding_window, a number or null (no window)")
        fixed: Raw = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    else:
        known, fixed = [*known, "mlp_bias"], {"hidden_act": "silu", "pretraining_tp": 1}
    check_fields(raw, known, fixed)
    window = None if raw.get("sliding_window") is None else require(raw, "sliding_window")
    attention = attention_config(_completed(raw), window=window)
    layer = LayerConfig(attention, require(raw, "intermediate_size"))
    return LlamaConfig(
        **target_fields(raw),
        layers=(layer,) * require(raw, "num_hidden_layers"),
        model_type="mistral" if mistral else "llama",
        attention_bias=bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
    )


def _completed(raw: Raw) -> Raw:
    """The config with what older ones leave out: transformers' defaults."""
    heads, width = require(raw, "num_attention_heads"), require(raw, "hidden_size")
    given = {name: value for name, value in raw.items() if value is not None}
    if "head_dim" not in given and width % heads:
        raise ValueError(f"config.json must give head_dim: hidden_size {width} is no multiple of {heads} heads")
    ropes = [given, given.get("rope_parameters"), given.get("rope_scaling")]
    theta = {} if any("rope_theta" in each for each in ropes if isinstance(each, Mapping)) else {"rope_theta": _THETA}
    return {"head_dim": width // heads, "num_key_value_heads": heads} | theta | given


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    config: LlamaConfig
    layer: LayerConfig
    layout: Layout

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: Any, shared: Fresh | None
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        c, layer, D = self.config, self.layer, self.config.hidden_size
        attention = Attention(D, layer.mixer, self.layout, c.attention_bias, name="self_attn")
        mlp = MLP(D, layer.intermediate_size, self.layout, c.mlp_bias, name="mlp")
        return pre_norm(c, attention, mlp, x, at, entry, shared)


class Model(Decoder):
    """See `Decoder`."""

    layer = Layer


def tensors(config: LlamaConfig, layout: Layout = WHOLE) -> Table:
    """Checkpoint tensors of every parameter."""

    def layer(path: str, prefix: str, each: LayerConfig) -> Table:
        biases = {"bias": config.attention_bias, "mlp_bias": config.mlp_bias}
        return tables.decoder_layer(path, prefix, config.hidden_size, each, layout, qk_norm=False, **biases)

    return tables.decoder(config, layer)


ignored = tables.ignored
