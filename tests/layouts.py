"""Configurations of drafters in the layouts of their trainers, and the names and shapes of their tensors; all tiny."""

from typing import Any

from tests import tiny

H, F, V, R = 32, 48, tiny.VOCAB, 6
TAPS = [1, 9, 17, 25, 33]
QWEN3: dict[str, Any] = {  # what transformers writes of a Qwen3 model
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": tiny.EOS,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": F,
    "max_position_embeddings": 4096,
    "max_window_layers": 28,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": V,
}
BLOCK = QWEN3 | {"block_size": 8, "num_target_layers": 36, "layer_types": ["full_attention"] * 2}
YARN = {"factor": 16.0, "original_max_position_embeddings": 65536, "rope_theta": 1e4, "rope_type": "yarn"}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": R, "selector_top_k": 4}
MARKOV = {"markov_rank": R, "markov_head_type": "vanilla"}
CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
LLAMA = {k: v for k, v in QWEN3.items() if not k.endswith(("window", "window_layers"))} | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 40,
}


def inside(**fields):
    """`dflash_config` with a mask and taps."""
    return {"dflash_config": {"mask_token_id": tiny.MASK, "target_layer_ids": TAPS} | fields}


def dflash(**fields):
    return BLOCK | {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.X"}} | inside() | fields


def specforge(*, architectures="DSparkDraftModel", **fields):
    nested = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **MARKOV, **CONFIDENT}
    return BLOCK | {"architectures": [architectures]} | inside(**nested | fields)


def modelopt(projector, **fields):
    raw = {
        k: v for k, v in BLOCK.items() if k not in ("dtype", "eos_token_id", "max_window_layers", "use_sliding_window")
    }
    own = {"projector_type": projector, "causal": False} | fields
    return raw | {"architectures": ["DFlashDraftModel"], "torch_dtype": "bfloat16"} | inside(**own)


def speculators(kind, version, **fields):
    layers = {k: v for k, v in QWEN3.items() if v not in (None, False)} | {"num_hidden_layers": 1 + (kind != "eagle3")}
    about = {"algorithm": kind, "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]}
    taps = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids"
    block = {} if kind == "eagle3" else {"block_size": 8, "mask_token_id": tiny.MASK, "target_hidden_size": None}
    outer = {"speculators_model_type": kind, "speculators_version": version, "speculators_config": about}
    outer |= {"draft_vocab_size": 40, "transformer_layer_config": layers, taps: [2, 18, 33], "dtype": "bfloat16"}
    return outer | block | fields


def deepspec(**fields):
    own = {"mask_token_id": tiny.MASK, "target_layer_ids": TAPS, "num_anchors": 512, "block_size": 7}
    return BLOCK | own | {"architectures": ["Qwen3DSparkModel"]} | fields


def backbone(taps=5, own=False, draft=None):
    """Names and shapes of a DFlash drafter of two layers; `own`: with the target's embedding and head."""
    shapes = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        at, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {f"{at}.{n}_proj.weight": (size, H) for n, size in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {f"{at}.o_proj.weight": (H, 64), f"{at}.q_norm.weight": (16,), f"{at}.k_norm.weight": (16,)}
        shapes |= {
            f"{mlp}.gate_proj.weight": (F, H),
            f"{mlp}.up_proj.weight": (F, H),
            f"{mlp}.down_proj.weight": (H, F),
        }
        shapes |= {f"layers.{i}.{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
    if draft:
        shapes |= {"d2t": (draft,), "t2d": (V,), "lm_head.weight": (draft, H)}
    return shapes | ({"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)} if own else {})


def biased():
    """DFlash for gpt-oss: attention has biases."""
    sizes = (("q", 64), ("k", 32), ("v", 32), ("o", H))
    return backbone() | {f"layers.{i}.self_attn.{n}_proj.bias": (size,) for i in range(2) for n, size in sizes}


def two():
    shapes, dynamic = backbone(), 2 * 2 * H // 8
    for at in (f"layers.{i}.{n}_conv" for i in range(2) for n in ("attention", "mlp")):
        shapes |= {f"{at}.base_kernel": (2, 2, H), f"{at}.kernel_projection.weight": (dynamic, H)}
    codebooks = {f"candidate_selector.{n}_codebook": (V, R) for n in ("predecessor", "successor")}
    return shapes | codebooks | {"candidate_selector.hidden_projection.weight": (R, H)}


LILICORR = {"candidate_topk": 4, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0, "factor_dim": 6}
LILICORR = {f"lilicorr_{name}": value for name, value in LILICORR.items()}
LILICORR |= {"lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0, "lilicorr_hidden_size": 12}


def lilicorr(*, older=False, width=12, slots=7, convolved=False):
    """With the names of ModelOpt's first exports, or of those after them, which SGLang 0.5.23 reads."""
    own = {"slot_embedding": (1, 1, slots, 1, width), "rank_embedding": (1, 1, 1, 4, width)}
    own |= {"relative_slot_bias": (2, 2 * slots + 1), "same_slot_bias": (2,)}
    norms = "feature_mlp.0" if older else "feature_norm"
    own |= {f"{norms}.{kind}": (5,) for kind in ("weight", "bias")}
    up, down = ("0", "2") if older else ("up_proj", "down_proj")
    linear = {"pass_hidden_proj": (width, H), "context_proj": (width, H), "factor_input_proj": (width, 3 * width)}
    linear |= {f"{name}_head": (6, width) for name in ("out", "in", "anchor_out")}
    linear |= {"token_proj": (width, H)} if width != H else {}
    linear |= {
        f"feature_mlp.{'1' if older else up}": (width, 5),
        f"feature_mlp.{'3' if older else down}": (width, width),
    }
    linear |= {f"layers.0.mlp.{up}": (2 * width, width), f"layers.0.mlp.{down}": (width, 2 * width)}
    linear["layers.0.attn.out_proj"] = (width, width)
    own |= {"layers.0.attn.in_proj_weight": (3 * width, width), "layers.0.attn.in_proj_bias": (3 * width,)}
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
        own[f"{name}.weight"] = (width,)
    for name, shape in linear.items():
        own |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    layers = {name: shape for name, shape in (two() if convolved else backbone()).items() if "selector" not in name}
    return layers | {f"lilicorr.{name}": shape for name, shape in own.items()}


def markov(head="markov_head.", confidence="confidence_head.proj", *, seen=H + R, draft=V, gate=False, **given):
    shapes = backbone(**given) | {f"{head}markov_w1.weight": (V, R), f"{head}markov_w2.weight": (draft, R)}
    if gate:
        shapes |= {f"{head}gate_proj.weight": (R, H + R), f"{head}gate_proj.bias": (R,)}
    return shapes | ({f"{confidence}.weight": (1, seen), f"{confidence}.bias": (1,)} if seen else {})


def eagle(layer="midlayer", *, norms=(), own=True, heads="", qk=False):
    """Names and shapes of an EAGLE-3 drafter with three taps and 40 tokens."""
    at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "d2t": (40,), "t2d": (V,), "lm_head.weight": (40, H)}
    shapes |= {f"{at}.{n}_proj.weight": (size, 2 * H) for n, size in (("q", 64), ("k", 32), ("v", 32))}
    shapes |= {f"{at}.o_proj.weight": (H, 64), f"{mlp}.gate_proj.weight": (F, H), f"{mlp}.up_proj.weight": (F, H)}
    shapes |= {f"{mlp}.down_proj.weight": (H, F), f"{layer}.hidden_norm.weight": (H,)}
    shapes |= {f"{layer}.{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
    shapes |= {f"{at}.{n}_norm.weight": (16,) for n in ("q", "k") if qk} | dict.fromkeys(norms, (H,))
    return shapes | ({"embed_tokens.weight": (V, H)} if own else {})


def treeflash():
    at = "ar_approximation"
    own = {
        f"{at}.norm.weight": (H,),
        f"{at}.ug.weight": (2 * F, 2 * H),
        f"{at}.ug.bias": (2 * F,),
        f"{at}.d.weight": (H, F),
    }
    return backbone() | own
