"""Qwen2 and Qwen2.5 targets (`model_type: qwen2`): biases on queries, keys and values, and none on the output.

Reference: transformers `models/qwen2/modeling_qwen2.py`.
"""

from dataclasses import replace
from functools import partial

from dflash_jax.config import Raw, TargetConfig
from dflash_jax.config_json import check_fields
from dflash_jax.models import decoder, llama, qwen3, tables
from dflash_jax.models.attention import Attention


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows are as in Qwen3. The head dim may be missing."""
    check_fields(raw, raw, {"attention_bias": True})
    return replace(qwen3.config({**raw, "attention_bias": True, "head_dim": llama.head_dim(raw)}), model_type="qwen2")


class Layer(decoder.Layer):
    """A layer without a bias of the output of attention."""

    def attention(self) -> Attention:
        return self.grouped_query(output_bias=False)


class Model(decoder.Decoder):
    """A `Decoder` of these layers."""

    layer = Layer


tensors = partial(tables.uniform, qk_norm=False, output_bias=False)
ignored = tables.ignored
