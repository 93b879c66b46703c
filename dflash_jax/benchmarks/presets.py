"""Published pairs by their configurations alone, to plan and measure without a download."""

from typing import Any

from dflash_jax.config import Raw
from dflash_jax.drafters.published import TAPS

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


def _qwen2() -> tuple[Raw, Raw]:
    """Qwen2.5-7B-Instruct, and a drafter with five layers whose sizes are assumed."""
    target, drafter = _qwen3(3584, 18944, 28, 28, (1, 7, 13, 19, 25), tied=False)
    shape = {"vocab_size": 152064, "max_position_embeddings": 32768}
    changes = {"model_type": "qwen2", "num_key_value_heads": 4, "head_dim": None, "attention_bias": None}
    return {**target, **shape, **changes}, {**drafter, **shape}


def _llama() -> tuple[Raw, Raw]:
    """Llama-3.1-8B and its drafter with blocks of 10."""
    target, drafter = _qwen3(4096, 14336, 32, 32, TAPS["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"], tied=False)
    shape = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "eos_token_id": 128009}
    ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", "factor": 8.0, **ends}
    own = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": scaling}
    draft: Raw = {"intermediate_size": 12288, "block_size": 10}
    draft["dflash_config"] = {**drafter["dflash_config"], "mask_token_id": 128002}  # which reserved token is assumed
    return {**target, **shape, **own}, {**drafter, **shape, **draft}


def _minimax() -> tuple[Raw, Raw]:
    """MiniMax-M2.5 in FP8, and its drafter, of which the kinds of layers and the mask are known; sizes are assumed."""
    target, drafter = _qwen3(3072, 1536, 62, 48, (1, 16, 30, 45, 59), tied=False)
    shape = {"vocab_size": 200064, "rope_theta": 5000000.0, "max_position_embeddings": 196608, "eos_token_id": 200020}
    experts = {"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    draft: Raw = {
        "intermediate_size": 9216,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "use_sliding_window": True,
        "sliding_window": 2048,
        "dflash_config": {**drafter["dflash_config"], "mask_token_id": 200054},
    }
    return {**target, **shape, **experts, **quantised}, {**drafter, **shape, **draft}


def _coder() -> tuple[Raw, Raw]:
    """Qwen3-Coder-30B-A3B and its drafter with eight layers."""
    target, drafter = _qwen3(2048, 6144, 48, 32, TAPS["z-lab/Qwen3-Coder-30B-A3B-DFlash"], tied=False)
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


def _hybrid(
    hidden: int,
    inner: int,
    depth: int,
    heads: tuple[int, int, int],
    taps: tuple[int, ...],
    *,
    experts: tuple[int, int] | None = None,
    windows: tuple[int, int] = (5, 4096),
    draft_inner: int | None = None,
    **changes: Any,
) -> tuple[Raw, Raw]:
    """A Qwen3.5 and its drafter.

    Args:
        heads: of queries, of keys and values, and of values in linear attention.
        experts: how many, and how many a token goes through; `inner` is then of one.
        windows: the drafter's layers with a window, and its width; a last one has none.
    """
    shape = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": 1e7,
    }
    target = shape | {
        "model_type": "qwen3_5_text" if experts is None else "qwen3_5_moe_text",
        "intermediate_size": inner if experts is None else None,
        "num_hidden_layers": depth,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": heads[2],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "eos_token_id": 248044,
    }
    if experts is not None:
        target |= {"num_experts": experts[0], "num_experts_per_tok": experts[1]}
        target |= {"moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    sliding, window = windows
    drafter = shape | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "intermediate_size": draft_inner or inner,
        "num_hidden_layers": sliding + 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * sliding + ["full_attention"],
        "sliding_window": window if sliding else None,
        "use_sliding_window": bool(sliding),
        "num_target_layers": depth,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248077, "target_layer_ids": list(taps)},
    }
    return target | changes, drafter | {name: changes[name] for name in ("vocab_size", "rope_theta") if name in changes}


def _coder_next() -> tuple[Raw, Raw]:
    """Qwen3-Coder-Next and its drafter with eight layers and no windows."""
    own = {"vocab_size": 151936, "rope_theta": 5e6, "norm_topk_prob": True, "model_type": "qwen3_next"}
    taps = (3, 11, 23, 35, 43)
    target, drafter = _hybrid(2048, 512, 48, (16, 2, 32), taps, experts=(512, 10), windows=(0, 0), **own)
    changes = {
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention"] * 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taps)},
    }
    return {**target, "eos_token_id": 151645}, {**drafter, **changes}


def _gemma4(
    hidden: int,
    depth: int,
    heads: tuple[int, int, int],
    inner: int,
    taps: tuple[int, ...],
    draft_heads: int,
    experts: Raw | None = None,
) -> tuple[Raw, Raw]:
    """A Gemma 4 and its drafter, whose last layer of five is not sliding.

    Args:
        heads: query heads, key-value heads of sliding layers, and of global ones.
    """
    common = {"vocab_size": 262144, "hidden_size": hidden, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144}
    common |= {"final_logit_softcapping": 30.0}
    num_heads, num_kv_heads, num_global_kv_heads = heads
    target = common | {
        "model_type": "gemma4_text",
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_global_key_value_heads": num_global_kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
        **(experts or {}),
    }
    drafter = common | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 5,
        "num_attention_heads": draft_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "rope_theta": 1e6,
        "num_target_layers": depth,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": list(taps)},
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


_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_EIGHT = (1, 5, 9, 13, 17, 21, 25, 29)
PAIRS: dict[str, tuple[Raw, Raw]] = {
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, TAPS["z-lab/Qwen3-4B-DFlash-b16"], tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, TAPS["z-lab/Qwen3-8B-DFlash-b16"], tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, TAPS["deepseek-ai/dflash_qwen3_14b_block7"], tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, (1, 16, 31, 46, 61), tied=False),  # the drafter's shape is assumed
    "qwen2.5-7b": _qwen2(),
    "llama-3.1-8b": _llama(),
    "minimax-m2": _minimax(),
    "qwen3-coder-30b-a3b": _coder(),
    "qwen3-coder-next": _coder_next(),
    "qwen3.5-4b": _hybrid(2560, 9216, 32, (16, 4, 32), _EIGHT, tie_word_embeddings=True),
    "qwen3.5-9b": _hybrid(4096, 12288, 32, (16, 4, 32), _EIGHT),
    "qwen3.5-27b": _hybrid(5120, 17408, 64, (24, 4, 48), (1, 10, 18, 27, 35, 44, 52, 61)),
    "qwen3.5-35b-a3b": _hybrid(
        2048, 512, 40, (16, 2, 32), (1, 6, 11, 16, 22, 27, 32, 37), experts=(256, 8), draft_inner=6144
    ),
    "qwen3.5-122b-a10b": _hybrid(
        3072, 1024, 48, (32, 2, 64), (1, 7, 14, 20, 26, 32, 39, 45), experts=(256, 8), draft_inner=9216
    ),
    "qwen3.5-397b-a17b": _hybrid(  # the inner width of the drafter is assumed
        4096, 1024, 60, (32, 2, 64), (1, 9, 17, 25, 33, 41, 49, 57), experts=(512, 10), draft_inner=12288
    ),
    "qwen3.6-27b": _hybrid(5120, 17408, 64, (24, 4, 48), (1, 16, 31, 46, 61), windows=(4, 2048)),
    "gpt-oss-20b": _gpt_oss(32, 24, TAPS["z-lab/gpt-oss-20b-DFlash"], block=8),
    "gpt-oss-120b": _gpt_oss(128, 36, (1, 9, 17, 25, 33), block=10),
    "gemma-4-31b": _gemma4(5376, 60, (32, 16, 4), 21504, (1, 12, 23, 35, 46, 57), 64),
    "gemma-4-26b-a4b": _gemma4(2816, 30, (16, 8, 2), 2112, (1, 6, 11, 17, 22, 27), 32, _GEMMA4_EXPERTS),
    "kimi-k2.5": _kimi(),
}
