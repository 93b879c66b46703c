"""MiniMax-M2 targets (`model_type: minimax_m2`): experts chosen by sigmoids, norms of all heads together, FP8.

Reference: transformers `models/minimax_m2/modeling_minimax_m2.py`.
"""

from dataclasses import replace
from functools import partial

from dflash_jax.config import ExpertsConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import DECODER_FIELDS, check_fields, partly_rotated, require, target_fields
from dflash_jax.models import decoder, tables

_FIELDS = """
    num_local_experts num_experts_per_tok rotary_dim router_aux_loss_coef router_jitter_noise
    mlp_intermediate_size max_model_len use_mtp num_mtp_modules mtp_transformer_layers
""".split()
_SCALED = "full_attention", "linear_attention", "mlp"
# What published configs say that the family has anyway; another value is another model.
_FIXED: Raw = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    **{f"layernorm_{at}_{scale}": 1.0 for at in _SCALED for scale in ("alpha", "beta")},
}


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; `rotary_dim`, or `partial_rotary_factor`, says how much of a head is rotated."""
    depth = require(raw, "num_hidden_layers")
    full = {"attn_type_list": [1] * depth}  # no layer has linear attention
    check_fields(raw, [*DECODER_FIELDS, *_FIELDS, "partial_rotary_factor"], {**_FIXED, **full})
    norm = require(raw, "rms_norm_eps", float)
    attention = replace(partly_rotated(raw), qk_norm=norm, qk_norm_per_head=False)
    sizes = (require(raw, name) for name in ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
    experts = ExpertsConfig(*sizes, norm_topk_prob=True, scores="sigmoid", correction_bias=True)
    return TargetConfig(
        **target_fields(raw),
        layers=(LayerConfig(attention, experts.intermediate_size, experts),) * depth,
        model_type="minimax_m2",
    )


Model, ignored = decoder.Decoder, tables.ignored
tensors = partial(tables.uniform, moe="block_sparse_moe", names=("w1", "w3", "w2"))
