"""Published pairs by their configurations alone: shapes to plan with and random weights to time, without a download."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax import checkpoint, drafters, models, sharding
from dflash_jax.config import Raw
from dflash_jax.drafters.base import Drafter
from dflash_jax.mesh import AnyMesh
from dflash_jax.target import Target

MASK = 151669


def _qwen3(hidden: int, inner: int, depth: int, heads: int, taps: tuple[int, ...], *, tied: bool) -> tuple[Raw, Raw]:
    """`config.json` of a dense Qwen3 and of its drafter with five layers and blocks of 16."""
    target = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "eos_token_id": 151645,
    }
    drafter = target | {
        "architectures": ["DFlashDraftModel"],
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_target_layers": depth,
        "block_size": 16,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taps)},
    }
    return target, drafter


def _coder() -> tuple[Raw, Raw]:
    """Qwen3-Coder-30B-A3B and its drafter with eight layers."""
    target, drafter = _qwen3(2048, 6144, 48, 32, (1, 12, 23, 34, 45), tied=False)
    shape = {"num_key_value_heads": 4, "rope_theta": 1e7, "max_position_embeddings": 262144}
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {**target, **shape, **experts}, {**drafter, **shape, "num_hidden_layers": 8}


def _gpt_oss(experts: int, depth: int, taps: tuple[int, ...], block: int) -> tuple[Raw, Raw]:
    """A gpt-oss with its experts in MXFP4, and its drafter with eight layers."""
    shape = {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    target = shape | {
        "intermediate_size": 2880,
        "num_hidden_layers": depth,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 200002,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    drafter = shape | {
        "architectures": ["DFlashDraftModel"],
        "intermediate_size": 7680,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-6,
        "num_target_layers": depth,
        "block_size": block,
        "dflash_config": {"mask_token_id": 200000, "target_layer_ids": list(taps)},
    }
    return target, drafter


def _kimi() -> tuple[Raw, Raw]:
    """Kimi-K2.5 with its experts in INT4, and its drafter with six layers."""
    shape = {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    text = shape | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "n_group": 1,
        "topk_group": 1,
        "eos_token_id": 163586,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": numbers}},
        },
    }
    drafter = shape | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": 61,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    }
    return {"model_type": "kimi_k25", "text_config": text}, drafter


PAIRS: dict[str, tuple[Raw, Raw]] = {
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, (1, 9, 17, 25, 33), tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, (1, 9, 17, 25, 33), tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, (1, 10, 19, 28, 37), tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, (1, 16, 31, 46, 61), tied=False),  # the drafter's shape is assumed
    "qwen3-coder-30b-a3b": _coder(),
    "gpt-oss-20b": _gpt_oss(32, 24, (1, 6, 11, 16, 21), block=8),
    "gpt-oss-120b": _gpt_oss(128, 36, (1, 9, 17, 25, 33), block=10),
    "kimi-k2.5": _kimi(),
}


def random_pair(
    target: Raw, drafter: Raw, dtype: Any = jnp.bfloat16, mesh: AnyMesh | None = None
) -> tuple[Target, Drafter]:
    """A pair of these configurations with random weights, in the shapes they have on a mesh; `jax.eval_shape` of it
    gives the shapes alone.

    Raises:
        ValueError: a configuration is unsupported, or the two do not belong together.
    """
    target_config = models.target_config(target)
    draft_config = drafters.drafter_config(drafter, target_config.num_hidden_layers)
    if draft_config.draft_vocab_size != draft_config.vocab_size:
        draft_config = dataclasses.replace(draft_config, own_head=True)
    draft_config.check_pair(target_config)
    layout, _ = (sharding.check_layout(config, mesh) for config in (target_config, draft_config))
    family = models.family(target_config.model_type)
    kind = drafters.KINDS[drafters.kind_of(drafter)]
    tables = family.tensors(target_config, layout), kind.tensors(draft_config, layout)
    first, second = (_random(table, dtype) for table in tables)
    where = {"layout": layout, "mesh": mesh}
    return Target(first, config=target_config, **where), kind.Drafter(second, draft_config, **where)


def _random(table: checkpoint.Table, dtype: Any) -> dict[str, Any]:
    """Matrices N(0, 1 / width), norms one. Quantised ones are about as large, whatever their bits."""
    params: dict[str, Any] = {}
    for seed, (path, leaf) in enumerate(checkpoint.leaves(table)):
        key, kind = jax.random.key(seed), jnp.dtype(leaf.dtype or dtype)
        scale = leaf.shape[-1] ** -0.5
        if "norm" in path:
            params[path] = jnp.ones(leaf.shape, kind)
        elif jnp.issubdtype(kind, jnp.integer):  # of MXFP4 and INT4: several numbers, or exponents
            bits = jax.random.bits(key, leaf.shape, jnp.dtype(f"uint{8 * kind.itemsize}"))
            exponents = path.endswith("/scale")
            params[path] = jnp.full(leaf.shape, 120, kind) if exponents else jax.lax.bitcast_convert_type(bits, kind)
        elif path.endswith("/scale"):
            params[path] = jnp.full(leaf.shape, scale, kind)
        else:
            plain = not path.endswith("/values")
            params[path] = (jax.random.normal(key, leaf.shape, dtype) * (scale if plain else 1.0)).astype(kind)
    return checkpoint.nested(params, table)
