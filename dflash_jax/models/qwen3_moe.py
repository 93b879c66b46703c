"""Qwen3 targets with experts (`model_type: qwen3_moe`).

Reference: transformers `models/qwen3_moe/modeling_qwen3_moe.py`.
"""

from dataclasses import replace

from dflash_jax.config import ExpertsConfig, Raw, TargetConfig
from dflash_jax.config_json import check_fields, require, token_ids
from dflash_jax.models import qwen3

_FIELDS = frozenset(
    """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
    mlp_only_layers router_aux_loss_coef
""".split()
)
# What published configs say that the family has anyway; another value is another model.
_FIXED: Raw = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`. `norm_topk_prob` must be there: transformers' default is not what checkpoints have.

    Where `use_sliding_window` is set, every layer has the window, whatever `max_window_layers` says.
    """
    check_fields(raw, raw, _FIXED)
    known = _FIELDS.union(_FIXED)
    depth, windowed = require(raw, "num_hidden_layers"), raw.get("use_sliding_window") and raw.get("sliding_window")
    types = ["sliding_attention" if windowed else "full_attention"] * depth
    if (given := raw.get("layer_types")) not in (None, types):
        raise ValueError(f"config.json: layers of qwen3_moe are all {types[0]} here, got layer_types {given!r:.200}")
    dense = qwen3.config({name: value for name, value in raw.items() if name not in known} | {"layer_types": types})
    if not isinstance(raw.get("norm_topk_prob"), bool):
        raise ValueError(f"config.json must give norm_topk_prob, true or false, got {raw.get('norm_topk_prob')!r:.80}")
    names = "num_experts", "num_local_experts"  # the second is what transformers 5 writes
    counts = {require(raw, name) for name in names if raw.get(name) is not None}
    if len(counts) != 1:
        raise ValueError(f"config.json must give num_experts, once, got {sorted(counts) or 'none'}")
    (count,) = counts
    sizes = (require(raw, name) for name in ("num_experts_per_tok", "moe_intermediate_size"))
    experts = ExpertsConfig(count, *sizes, norm_topk_prob=raw["norm_topk_prob"])
    step = require(raw, "decoder_sparse_step") if raw.get("decoder_sparse_step") is not None else 1
    plain = token_ids(raw.get("mlp_only_layers"))
    has = lambda i: i not in plain and (i + 1) % step == 0
    layers = tuple(replace(layer, experts=experts) if has(i) else layer for i, layer in enumerate(dense.layers))
    return replace(dense, layers=layers, model_type="qwen3_moe")


Model, tensors, ignored = qwen3.Model, qwen3.tensors, qwen3.ignored
