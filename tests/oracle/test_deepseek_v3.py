"""DeepSeek-V3 and Kimi-K2 against transformers, on tiny random checkpoints in the published layouts: plain, in FP8, and
as the text model of a Kimi-K2.5 with experts in INT4."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dflash_jax import load_target, models  # noqa: E402
from dflash_jax.cache import commit  # noqa: E402
from dflash_jax.quantised import EightBit, FourBit  # noqa: E402
from tests.oracle import families  # noqa: E402

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": YARN,
    "dtype": "float32",
}
# Blocks of 128 hold whole parts of heads, and halves of a mesh whole blocks.
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
}
VARIANTS = {
    "kimi": {},
    "narrow rope": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "q_lora_rank": None,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "v_head_dim": 12,
    },
    "stretched in part": {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
        "rope_interleave": False,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
    },
}
STORED_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
}


def make(directory, changes, store=None):
    """The model, and its checkpoint. `store(name, weight)` gives the tensors that a weight is published as, and what
    they stand for, or None for those that are stored as they are."""
    config = transformers.DeepseekV3Config(**SHAPE | changes, experts_implementation="eager")
    theirs = families.randomise(transformers.DeepseekV3ForCausalLM(config), 0).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
    directory.mkdir(exist_ok=True)
    if store is not None:
        published = {}
        with torch.no_grad():
            for name, weight in list(theirs.state_dict().items()):
                if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                    for e, each in enumerate(weight):
                        names = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                        for part, kind in zip(each.chunk(len(names)), names, strict=True):
                            keep(published, f"{name.rsplit('.', 1)[0]}.{e}.{kind}.weight", part, store)
                else:
                    keep(published, name, weight, store)
        save_file(published, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config.to_dict()))
    else:
        theirs.save_pretrained(directory)
    return theirs


def keep(published, name, weight, store):
    found = store(name, weight.numpy())
    if found is None:
        published[name] = weight.numpy().copy()
        return
    tensors, plain = found
    published |= tensors
    weight.copy_(torch.tensor(plain))


def in_fp8(name, weight):
    """Every product of a layer but the router's."""
    if not re.search(r"layers\.\d+\.(self_attn|mlp)\..*(_proj|_with_mqa)\.weight$", name):
        return None
    rows, columns = weight.shape
    rng = np.random.default_rng(len(name) + rows)
    scale = (0.5 + rng.random((-(-rows // 128), -(-columns // 128)))).astype(np.float32) * 1e-3
    each = np.kron(scale, np.ones((128, 128), np.float32))[:rows, :columns]
    values = np.clip(weight / each, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scale}, values.astype(np.float32) * each


def in_int4(name, weight):
    """The routed experts."""
    if ".experts." not in name:
        return None
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // 32, 32)
    scale = (np.abs(groups).max(axis=2) / 7).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)[..., None]
    numbers = np.clip(np.rint(groups / wide), -8, 7).astype(np.int64)
    numbers[:, 0, 0] = -8  # which a scale from the largest number does not reach by itself
    nibbles = (numbers + 8).reshape(rows, columns // 8, 8)
    words = sum(nibbles[..., i] << 4 * i for i in range(8)).astype(np.uint32).view(np.int32)
    shape = np.asarray([rows, columns], np.int32)
    stored = {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
    return stored, (numbers * wide).astype(np.float32).reshape(rows, columns)


def make_kimi(directory, *, experts=in_int4):
    """As published: the text model of a Kimi-K2.5, with experts in INT4."""
    theirs = make(directory, {}, lambda name, weight: experts(name, weight))
    raw, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    tensors = {f"language_model.{name}": x for name, x in tensors.items()}
    tensors |= {
        "vision_tower.patch_embed.proj.bias": np.zeros(2, np.float32),
        "mm_projector.proj.0.bias": np.zeros(2, np.float32),
    }
    save_file(tensors, directory / "model.safetensors")
    outside = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "ignore_index": -100,
        "media_placeholder_token_id": 98,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"patch_size": 14},
        "quantization_config": STORED_INT4,
    }
    raw["rope_parameters"]["type"] = raw["rope_parameters"]["rope_type"]
    (directory / "config.json").write_text(json.dumps(outside | {"text_config": raw}))
    return theirs


def drop_unread(directory):
    """Without the tensors that are not read, which are not saved again either."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.startswith(("vision_tower", "mm_projector"))}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", [n if n == "kimi" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_forward(name, tmp_path):
    theirs = make(tmp_path, VARIANTS[name])
    ours = load_target(tmp_path)
    families.assert_same_forward(theirs, ours)
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")


def test_long_prompts_and_short_blocks(tmp_path):
    """Chunks of 300 positions attend expanded, the second of them after committed positions; blocks of 10 absorbed."""
    theirs, ours = make(tmp_path, {"num_hidden_layers": 2}), load_target(tmp_path)
    ids = np.random.default_rng(0).integers(0, families.MASK, 620)

    @jax.jit
    def forward(tokens, cache, at):
        positions = at[:, None] + jnp.arange(tokens.shape[1])[None]
        hidden, _, fresh = ours.forward(tokens, positions, None, cache, at)
        return ours.unembed(hidden), commit(cache, fresh, at, jnp.full(1, tokens.shape[1], jnp.int32))

    cache, logits, at = ours.init_cache(1, 640), [], 0
    assert 10 <= ours.config.layers[0].mixer.absorbed < 300
    for size in (300, 300, 10, 10):
        out, cache = forward(jnp.asarray(ids[None, at : at + size]), cache, jnp.asarray([at]))
        logits.append(out[0])
        at += size
    with torch.inference_mode():
        expected = theirs(torch.tensor(ids[None])).logits[0].numpy()
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=1e-4)


def test_when_long_blocks_attend_expanded(tmp_path):
    """About 170 queries with DeepSeek's sizes, and 400 with GLM-5's."""
    raw = RAW | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert 170 < models.target_config(raw).layers[0].mixer.absorbed < 171
    raw |= {"qk_nope_head_dim": 192, "v_head_dim": 256}
    assert 398 < models.target_config(raw).layers[0].mixer.absorbed < 399
    raw |= {"kv_lora_rank": 128}  # latents as wide as what is made of them: never
    assert models.target_config(raw).layers[0].mixer.absorbed == float("inf")


@pytest.mark.slow
def test_kimi_as_published(tmp_path):
    theirs = make_kimi(tmp_path)
    ours = load_target(tmp_path)
    families.assert_same_forward(theirs, ours)
    weight = ours.params["layers_1"]["experts"]["gate_up_proj"]
    assert isinstance(weight, FourBit)
    assert weight.values.nbytes * 8 == 4 * np.prod(weight.shape)
    assert not isinstance(ours.params["layers_1"]["shared_experts"]["gate_up_proj"]["weight"], FourBit)
    drop_unread(tmp_path)
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")
    families.assert_dequantised(tmp_path, ours)


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"q_lora_rank": None, "qk_nope_head_dim": 96}, marks=pytest.mark.slow)],
    ids=["whole", "moved"],
)
def test_forward_in_fp8(changes, tmp_path):
    """Also where rotated dimensions stand in two blocks, and are put in another order."""
    theirs = make(tmp_path, LARGE | changes, in_fp8)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = load_target(tmp_path)
    attention = ours.params["layers_0"]["self_attn"]
    names = ("q_proj", "kv_a_proj") if changes else ("qkv_a_proj", "q_b_proj")
    for weight in (attention["kv_b_proj"], *(attention[name]["weight"] for name in names)):
        assert isinstance(weight, EightBit)
    families.assert_same_forward(theirs, ours)
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(VARIANTS)[1:])])
def test_generations_speculation_and_mesh(name, tmp_path):
    theirs = make(tmp_path / "target", VARIANTS[name])
    families.assert_same_generations(theirs, load_target(tmp_path / "target"))
    meshes = {"kimi": ("data=2,model=2", "model=4", "fsdp=2,expert=2"), "narrow rope": ("expert=2,model=2",)}
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=meshes.get(name, ("data=4",)))


@pytest.mark.slow
def test_the_same_of_kimi_as_published(tmp_path):
    theirs = make_kimi(tmp_path / "target")
    families.assert_same_generations(theirs, load_target(tmp_path / "target"))
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["model=2", "expert=2,model=2"])
    with pytest.raises(ValueError, match="64 outputs in quantized blocks of 32"):
        families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["model=4"])


RAW = {k: v for k, v in SHAPE.items() if k != "dtype"} | {"model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "glm_moe_dsa"}, "glm_moe_dsa', which needs GLM-5's indexer"),
        ({"n_group": 8}, "n_group = 8 is not supported, expected 1"),
        ({"topk_group": 4}, "topk_group = 4 is not supported"),
        ({"n_group": None}, "must give n_group"),
        ({"first_k_dense_replace": None}, "must give first_k_dense_replace"),
        ({"first_k_dense_replace": -1}, "must be a number of layers"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"head_dim": 24}, "head_dim = 24 is not supported, expected 8"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"index_topk": 2048}, "index_topk"),
        ({"num_experts_per_tok": 9}, "at most the 8 experts"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"quantization_config": STORED_INT4 | {"format": "nvfp4-pack-quantized"}}, "'nvfp4-pack-quantized'"),
        ({"quantization_config": STORED_INT4 | {"config_groups": {}}}, "must have config_groups"),
        ({"text_config": {"model_type": "llama"}, "model_type": "kimi_k25"}, "needs latent attention"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    models.target_config(RAW)
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)


def test_other_text_models_are_refused():
    raw = {"model_type": "kimi_k25", "text_config": RAW | {"model_type": "kimi_linear"}}
    with pytest.raises(ValueError, match="must be a deepseek_v3 or a kimi_k2, got 'kimi_linear'"):
        models.target_config(raw)


def test_the_epsilon_of_latent_norms():
    """transformers' whatever `rms_norm_eps` is, unless the config gives another."""
    assert models.target_config(RAW).layers[0].mixer.eps == 1e-6
    assert models.target_config(RAW | {"latent_norm_eps": 1e-5}).layers[0].mixer.eps == 1e-5
