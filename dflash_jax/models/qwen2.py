"""Qwen2 and Qwen2.5 targets (`model_type: qwen2`): biases on queries, keys and values, and none on the output.

Reference: transformers `models/qwen2/modeling_qwen2.py`.
"""

from dataclasses import replace

from dflash_jax.config import Raw, TargetConfig
from dflash_jax.config_json import check_fields
from dflash_jax.models import llama, qwen3


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows are as in Qwen3. The head dim may be missing."""
    check_fields(raw, raw, {"attention_bias": True})
    dense = qwen3.config({**raw, "attention_bias": True, "head_dim": llama.head_dim(raw)})
    mixers = (replace(layer.attention, qk_norm=None, output_bias=False) for layer in dense.layers)
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(dense.layers, mixers, strict=True))
    return replace(dense, layers=layers, model_type="qwen2")


Model, tensors, ignored = qwen3.Model, qwen3.tensors, qwen3.ignored
