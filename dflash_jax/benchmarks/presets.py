"""Published pairs by their configurations alone, to plan and measure without a download."""

from collections.abc import Sequence
from typing import Any

from dflash_jax.config import Raw
from dflash_jax.drafters.published import TAPS

MASK = 151669


def _text(vocab_size: int, hidden: int, positions: int) -> Raw:
    return {"vocab_size": vocab_size, "hidden_size": hidden, "max_position_embeddings": positions}


def _layers(count: int, inner: int | None, heads: int, kv_heads: int, head_dim: int) -> Raw:
    """Fields of so many layers."""
    return {
        "num_hidden_layers": count,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _drafter(fields: Raw, depth: int, taps: Sequence[int], mask: int = MASK, block: int = 16) -> Raw:
    """`config.json` of a drafter with these fields, for a target of this depth."""
    return {
        **fields,
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": depth,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(taps)},
    }


def _windows(count: int, width: int | None, others: int = 1) -> Raw:
    """Fields of layers of which so many have a window, and the last ones none."""
    kinds = ["sliding_attention"] * count + ["full_attention"] * others
    return {"layer_types": kinds, "sliding_window": width, "use_sliding_window": bool(count)}


def _yarn(factor: float, **more: float) -> Raw:
    shape = {"rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0}
    return shape | {"original_max_position_embeddings": 4096, **more}


def _qwen3(hidden: int, inner: int, depth: int, heads: int, taps: Sequence[int], *, tied: bool) -> tuple[Raw, Raw]:
    """`config.json` of a dense Qwen3 and of its drafter with five layers and blocks of 16."""
    target = {
        **_text(151936, hidden, 40960),
        **_layers(depth, inner, heads, 8, 128),
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "eos_token_id": 151645,
    }
    return target, _drafter({**target, **_layers(5, inner, 32, 8, 128)}, depth, taps)


def _qwen2() -> tuple[Raw, Raw]:
    """Qwen2.5-7B-Instruct, and a drafter with five layers whose sizes are assumed."""
    target, drafter = _qwen3(3584, 18944, 28, 28, (1, 7, 13, 19, 25), tied=False)
    shape = {"vocab_size": 152064, "max_position_embeddings": 32768}
    changes = {"model_type": "qwen2", "num_key_value_heads": 4, "head_dim": None, "attention_bias": None}
    return {**target, **shape, **changes}, {**drafter, **shape}


def _llama() -> tuple[Raw, Raw]:
    """Llama-3.1-8B and its drafter with blocks of 10."""
    taps = TAPS["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"]
    target, drafter = _qwen3(4096, 14336, 32, 32, taps, tied=False)
    shape = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "eos_token_id": 128009}
    ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", "factor": 8.0, **ends}
    changes = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": scaling}
    fields = {**drafter, **shape, "intermediate_size": 12288}
    return {**target, **shape, **changes}, _drafter(
        fields, 32, taps, 128002, block=10
    )  # which reserved token is assumed


def _minimax() -> tuple[Raw, Raw]:
    """MiniMax-M2.5 in FP8, and its drafter, of which the kinds of layers and the mask are known; sizes are assumed."""
    taps = (1, 16, 30, 45, 59)
    target, drafter = _qwen3(3072, 1536, 62, 48, taps, tied=False)
    shape = {"vocab_size": 200064, "rope_theta": 5000000.0, "max_position_embeddings": 196608, "eos_token_id": 200020}
    experts = {"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    fields = {**drafter, **shape, **_windows(4, 2048), "intermediate_size": 9216}
    return {**target, **shape, **experts, **quantised}, _drafter(fields, 62, taps, 200054)


def _coder() -> tuple[Raw, Raw]:
    """Qwen3-Coder-30B-A3B and its drafter with eight layers."""
    target, drafter = _qwen3(2048, 6144, 48, 32, TAPS["z-lab/Qwen3-Coder-30B-A3B-DFlash"], tied=False)
    shape = {"num_key_value_heads": 4, "rope_theta": 1e7, "max_position_embeddings": 262144}
    experts = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    experts |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**target, **shape, **experts}, {**drafter, **shape, "num_hidden_layers": 8}


def _gpt_oss(experts: int, depth: int, taps: Sequence[int], block: int) -> tuple[Raw, Raw]:
    """A gpt-oss with its experts in MXFP4, and its drafter with eight layers."""
    shape = {
        **_text(201088, 2880, 131072),
        "model_type": "gpt_oss",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_theta": 150000.0,
        "rope_scaling": _yarn(32.0, truncate=False),
    }
    target = {
        **shape,
        **_layers(depth, 2880, 64, 8, 64),
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 200002,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    fields = {**shape, **_layers(8, 7680, 64, 8, 64), "rms_norm_eps": 1e-6}
    return target, _drafter(fields, depth, taps, 200000, block)


def _hybrid(
    hidden: int,
    inner: int,
    depth: int,
    heads: tuple[int, int, int],
    taps: Sequence[int],
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
        **_text(248320, hidden, 262144),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": 1e7,
    }
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": heads[2], "linear_conv_kernel_dim": 4}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    target = {
        **shape,
        **linear,
        **_layers(depth, inner if experts is None else None, heads[0], heads[1], 256),
        "model_type": "qwen3_5_text" if experts is None else "qwen3_5_moe_text",
        "partial_rotary_factor": 0.25,
        "eos_token_id": 248044,
    }
    if experts is not None:
        target |= {"num_experts": experts[0], "num_experts_per_tok": experts[1]}
        target |= {"moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    fields = {**shape, **_layers(windows[0] + 1, draft_inner or inner, 32, 8, 128), **_windows(*windows)}
    fields |= {"model_type": "qwen3"} | {
        name: changes[name] for name in ("vocab_size", "rope_theta") if name in changes
    }
    return target | changes, _drafter(fields, depth, taps, 248077)


def _coder_next() -> tuple[Raw, Raw]:
    """Qwen3-Coder-Next and its drafter with eight layers and no windows."""
    changes = {"vocab_size": 151936, "rope_theta": 5e6, "norm_topk_prob": True, "model_type": "qwen3_next"}
    changes |= {"eos_token_id": 151645}
    taps = (3, 11, 23, 35, 43)
    target, drafter = _hybrid(2048, 512, 48, (16, 2, 32), taps, experts=(512, 10), **changes)
    fields = {**drafter, **_layers(8, 6144, 32, 4, 128), **_windows(0, None, 8)}
    return target, _drafter(fields, 48, taps)


def _gemma4(
    hidden: int,
    depth: int,
    heads: tuple[int, int, int],
    inner: int,
    taps: Sequence[int],
    draft_heads: int,
    experts: Raw | None = None,
) -> tuple[Raw, Raw]:
    """A Gemma 4 and its drafter, whose last layer of five is not sliding. Heads are query heads, key-value heads of
    sliding layers, and of global ones."""
    common = {**_text(262144, hidden, 262144), "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0}
    target = {
        **common,
        **_layers(depth, inner, heads[0], heads[1], 256),
        "model_type": "gemma4_text",
        "num_global_key_value_heads": heads[2],
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
    fields = {**common, **_layers(5, 2 * hidden, draft_heads, 8, 128), **_windows(4, 2048)}
    return target, _drafter(fields | {"model_type": "qwen3", "rope_theta": 1e6}, depth, taps, 4)


def _kimi() -> tuple[Raw, Raw]:
    """Kimi-K2.5 with its experts in INT4, and its drafter with six layers."""
    shape = {
        **_text(163840, 7168, 262144),
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(64.0, mscale=1.0, mscale_all_dim=1.0),
    }
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    heads = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    heads |= {"num_key_value_heads": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    experts |= {"routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    text = {
        **shape,
        **heads,
        **experts,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "eos_token_id": 163586,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
        },
    }
    fields = {**shape, **_layers(6, 18432, 64, 8, 128), "model_type": "qwen3"}
    drafter = _drafter(fields, 61, (1, 12, 24, 35, 47, 58), 163838, block=8)
    return {"model_type": "kimi_k25", "text_config": text}, drafter


_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_EIGHT = (1, 5, 9, 13, 17, 21, 25, 29)
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
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
for _name, _stored in (("fp8", _FP8), ("awq", _AWQ)):  # Qwen's own files
    PAIRS[f"qwen3-8b-{_name}"] = {**PAIRS["qwen3-8b"][0], "quantization_config": _stored}, PAIRS["qwen3-8b"][1]

_TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}


def reduced(target: Raw, drafter: Raw) -> tuple[Raw, Raw]:
    """The same pair in toy sizes, three layers and one: of Qwen3, with or without experts, or gpt-oss."""
    small = [
        dict(config) | {key: value for key, value in _TOY.items() if key in config} for config in (target, drafter)
    ]
    reads = {"dflash_config": drafter["dflash_config"] | {"mask_token_id": 511, "target_layer_ids": [0, 1]}}
    return small[0] | {"num_hidden_layers": 3}, small[1] | {"num_hidden_layers": 1, "num_target_layers": 3} | reads
