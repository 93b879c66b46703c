"""Qwen3 dense targets (`model_type: qwen3`).

Reference: transformers `models/qwen3/modeling_qwen3.py`.
"""

from dataclasses import replace

from dflash_jax.config import LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    WINDOW_FIELDS,
    attention_config,
    check_fields,
    qwen3_layer_types,
    require,
    target_fields,
)
from dflash_jax.models import decoder, tables


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows follow `layer_types`, and only where `use_sliding_window` is set."""
    check_fields(raw, [*DECODER_FIELDS, *WINDOW_FIELDS], {"hidden_act": "silu", "mlp_bias": False})
    depth = require(raw, "num_hidden_layers")
    if raw.get("use_sliding_window") and "sliding_window" not in raw:
        raise ValueError("config.json: use_sliding_window needs sliding_window, a number or null (no window)")
    types = qwen3_layer_types(raw, depth)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if window is not None:
        require(raw, "sliding_window")
    if "sliding_attention" in types and window is None:
        raise ValueError("sliding_attention layers need use_sliding_window and sliding_window in config.json")
    attention = attention_config(raw, qk_norm=require(raw, "rms_norm_eps", float))
    inner = require(raw, "intermediate_size")
    windows = (window if kind == "sliding_attention" else None for kind in types)
    return TargetConfig(
        **target_fields(raw),
        layers=tuple(LayerConfig(replace(attention, window=width), inner) for width in windows),
        model_type="qwen3",
    )


Model, tensors, ignored = decoder.Decoder, tables.uniform, tables.ignored
