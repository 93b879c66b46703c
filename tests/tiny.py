"""Tiny random checkpoints in the published formats, made without torch."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dflash_jax import Request, SamplingParams, checkpoint, drafters, models
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.penalties import empty_history, no_penalties
from dflash_jax.decoding.sampling import greedy_rows, gumbel_noise

VOCAB, MASK, EOS = 64, 63, 62


def ask(prompt, max_new_tokens=256, temperature=0.0, *, sample=0, id="", find_stop=None, **given) -> Request:
    """A request with these sampling settings."""
    return Request(prompt, SamplingParams(max_new_tokens, temperature, **given), sample, id, find_stop)


def target_config(**changes) -> dict:
    """`config.json` of a 4-layer Qwen3 with grouped heads whose dim is not hidden / heads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": EOS,
    } | changes


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_HYBRID = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_GEMMA4 = {
    "hidden_act": None,
    "rope_theta": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 5.0,
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 128,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
}
# What makes `target_config()` one of each family, with every kind of parameter that it can have.
FAMILIES = {
    "deepseek_v3": {**_LATENT, "q_lora_rank": None},
    "kimi_k2": {
        **_LATENT,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "kimi_k25": {**_LATENT, "quantization_config": INT4},
    "qwen2": {"attention_bias": None, "head_dim": None},
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_next": {**_LINEAR, **_HYBRID, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_5": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe": {**_LINEAR, **_HYBRID, "num_experts": 4},
    "qwen3_5_moe_text": {**_LINEAR, **_HYBRID, "num_experts": 4},
    "gemma4": {**_GEMMA4, **_GEMMA4_EXPERTS},
    "gemma4_text": {**_GEMMA4, "attention_k_eq_v": False},
    "gpt_oss": {
        **_EXPERTS,
        "attention_bias": True,
        "intermediate_size": 32,
        "sliding_window": 8,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "minimax_m2": {
        **_EXPERTS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 128,
        "rotary_dim": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}


def drafter_config(**changes) -> dict:
    """`config.json` of a 2-layer DFlash drafter for `target_config()`, block 8."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2]} | changes.pop("dflash_config", {})
    return (
        target_config()
        | {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 2,
            "num_target_layers": 4,
            "block_size": 8,
            "eos_token_id": None,
            "dflash_config": nested,
        }
        | changes
    )


LATTICE = {"candidate_topk": 4, "hidden_size": 24, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 12}
LATTICE |= {"vector_eps": 1e-4, "logit_scale": 8.0}


def kinds() -> dict[str, dict]:
    """`config.json` of a drafter of each kind for `target_config()`, block 4 or 5, with every kind of parameter."""
    selector = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    lattice = {f"lilicorr_{name}": value for name, value in LATTICE.items()}
    lattice |= {"conv_kernel_size": 2, "conv_group_size": 8}
    rnn = {"markov_rank": 6, "markov_head_type": "rnn", "enable_confidence_head": True}
    eagle = {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "num_target_layers": 4, "ttt_length": 4}
    return {
        "dflash": drafter_config(block_size=5, attention_bias=True, draft_vocab_size=40),
        "dflash2": drafter_config(block_size=5, architectures=["DFlash2DraftModel"], dflash_config=selector),
        "lilicorr": drafter_config(block_size=5, architectures=["LiLiCorrDraftModel"], dflash_config=lattice),
        "dspark": drafter_config(block_size=4, architectures=["DSparkDraftModel"], **rnn),
        "gated dspark": drafter_config(
            block_size=4, architectures=["DSparkDraftModel"], **rnn | {"markov_head_type": "gated"}
        ),
        "treeflash": drafter_config(
            block_size=5, architectures=["TreeFlashDraftModel"], treeflash_config={"ar_approximation": "swiglu"}
        ),
        "eagle3": target_config(attention_bias=True) | eagle | {"target_layer_ids": [0, 2], "draft_vocab_size": 40},
        "eagle3.1": target_config(model_type="llama")
        | eagle
        | {"target_layer_ids": [0, 1, 2], "fc_norm": True, "norm_output": True},
    }


def random_tensors(table: checkpoint.Table, seed: int) -> dict[str, np.ndarray]:
    """One random float32 tensor per checkpoint name; norms near one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, leaf in sorted(checkpoint.leaves(table)):
        for part in leaf.parts:
            x = rng.standard_normal(part.source.shape).astype(np.float32)
            if path == "d2t":  # all tokens but some of the first
                tensors[path] = np.full(part.source.shape, MASK - part.source.shape[0], np.int32)
                continue
            norm = "norm" in path and x.ndim == 1
            value = 1 + 0.2 * x if norm else x / max(1, x.shape[-1]) ** 0.5
            tensors |= part.source.write(_stored(path, leaf, part, x, value.astype(np.float32)))
    return tensors


def _stored(path: str, leaf: checkpoint.Leaf, part: checkpoint.Part, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What stands for a random array of a quantized weight; `value` for any other."""
    if path.endswith("/values"):
        kind = np.dtype(leaf.dtype)
        return (40 * x).clip(-127, 127).astype(kind) if kind == np.int8 else (40 * np.abs(x)).astype(kind)
    if path.endswith("/scale"):
        size = 0.002 + 0.002 * np.abs(x)
        return np.full(x.shape, 118, np.uint8) if leaf.dtype == "uint8" else size.astype(np.float32)
    return value


def write(directory: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Writes `config.json` and one safetensors file."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_target(directory: Path, raw: dict, seed: int = 0) -> Path:
    config = models.target_config(raw)
    return write(directory, raw, random_tensors(models.family(config.model_type).tensors(config), seed))


def write_drafter(directory: Path, raw: dict, seed: int = 1, *, own: bool = False) -> Path:
    """A drafter of any kind; with `own`, it carries an embedding and a head."""
    kind, config = drafters.KINDS[drafters.kind_of(raw)], drafters.drafter_config(raw)
    reduced = config.draft_vocab_size != config.vocab_size
    config = dataclasses.replace(config, own_embedding=own, own_head=own or reduced)
    return write(directory, raw, random_tensors(kind.tensors(config), seed))


def write_tokenizer(directory: Path, *, chat: bool = True) -> Path:
    """A byte-free tokenizer of single characters: ids 0..61 are characters, EOS and MASK special."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123 .,?!\n"[: VOCAB - 3]
    vocabulary = {c: i for i, c in enumerate(characters)} | {"<unk>": VOCAB - 3, "<end>": EOS, "<mask>": MASK}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", mask_token="<mask>"
    )
    if chat:
        fast.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'tool' or m['role'] > 'x' %}"
            "{{ raise_exception('no role ' + m['role']) }}{% endif %}"
            "{{ m['role'] }}.{{ m['content'] }}<end>{% endfor %}"
        )
    fast.save_pretrained(directory)
    return directory


def choice_of(rows: int, depth: int, vocab_size: int, temperature: float = 0.0) -> Choice:
    """How greedy rows, or sampled ones, choose tokens after a prompt of one token."""
    sampling = greedy_rows(rows).replace(temperature=jnp.full(rows, temperature))
    positions = jnp.ones((rows, 1), jnp.int32) + jnp.arange(depth + 1)[None]
    noise = gumbel_noise(sampling, positions, vocab_size)
    return Choice(sampling, no_penalties(rows), empty_history(rows, 8), jnp.ones(rows, jnp.int32), noise, None)
