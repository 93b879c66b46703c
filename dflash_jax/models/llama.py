"""Llama targets (`model_type: llama`), and Mistral's (`mistral`), which are Llama with a window on every layer.

Reference: transformers `models/llama/modeling_llama.py` and `models/mistral/modeling_mistral.py`.
"""

from collections.abc import Mapping

from dflash_jax.config import LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import DECODER_FIELDS, attention_config, check_fields, require, target_fields
from dflash_jax.models import decoder, tables

_THETA = 10000.0  # of configs that name none: those of the first Llamas


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`. The head dim, the number of key-value heads and theta may be missing."""
    mistral = raw.get("model_type") == "mistral"
    if mistral:
        if "sliding_window" not in raw:
            raise ValueError("config.json of a mistral must give sliding_window, a number or null (no window)")
        known, fixed = "sliding_window", {"attention_bias": False, "mlp_bias": False}
    else:
        known, fixed = "mlp_bias", {"pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True}
    check_fields(raw, [*DECODER_FIELDS, known], {"hidden_act": "silu"} | fixed)
    window = None if raw.get("sliding_window") is None else require(raw, "sliding_window")
    attention = attention_config(completed(raw), window=window)
    layer = LayerConfig(attention, require(raw, "intermediate_size"), mlp_bias=bool(raw.get("mlp_bias")))
    return TargetConfig(
        **target_fields(raw),
        layers=(layer,) * require(raw, "num_hidden_layers"),
        model_type="mistral" if mistral else "llama",
    )


def completed(raw: Raw) -> Raw:
    """The config with what older ones leave out: transformers' defaults."""
    given = {name: value for name, value in raw.items() if value is not None}
    ropes = [given, given.get("rope_parameters"), given.get("rope_scaling")]
    theta = {} if any("rope_theta" in rope for rope in ropes if isinstance(rope, Mapping)) else {"rope_theta": _THETA}
    return {"head_dim": head_dim(raw), "num_key_value_heads": require(raw, "num_attention_heads")} | theta | given


def head_dim(raw: Raw) -> int:
    """`head_dim` of a config; where it has none, an equal share of the width, as in transformers."""
    if raw.get("head_dim") is not None:
        return require(raw, "head_dim")
    heads, width = require(raw, "num_attention_heads"), require(raw, "hidden_size")
    if width % heads:
        raise ValueError(f"config.json must give head_dim: hidden_size {width} is not a multiple of {heads} heads")
    return width // heads


Model, tensors, ignored = decoder.Decoder, tables.uniform, tables.ignored
