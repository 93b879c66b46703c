"""Gemma 4 against transformers, on tiny random checkpoints: as published, and as transformers saves them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dflash_jax import load_target  # noqa: E402
from tests.oracle import families  # noqa: E402

PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": PROPORTIONAL,
    },
    "max_position_embeddings": 512,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "dtype": "float32",
}
GLOBAL = {"global_head_dim": 32, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# What differs, and whether the checkpoint is a text model inside another, as published.
VARIANTS = {
    "experts": (EXPERTS | TWO, True),
    "dense": (TWO, False),
    "dense, values of their own": ({"attention_k_eq_v": False, "num_key_value_heads": 4}, True),
    "dense, untied, not capped": ({"tie_word_embeddings": False, "final_logit_softcapping": None}, False),
    "seven layers": (EXPERTS | {"num_hidden_layers": 7, "layer_types": None, "top_k_experts": 1}, False),
    "four layers": (EXPERTS, True),
}
FAST = "experts", "dense"


def make(directory, name, **more):
    """A model of transformers', and its checkpoint."""
    changes, published = VARIANTS[name]
    config = transformers.Gemma4TextConfig(**SHAPE | GLOBAL | changes | more, experts_implementation="eager")
    config._attn_implementation = "eager"
    theirs = gentle(transformers.Gemma4ForCausalLM(config), "model.layers")
    theirs.save_pretrained(directory)
    if published:
        nest(directory)
    return theirs


def gentle(theirs, layers):
    """With random weights; scores, which are not scaled, are small enough for float32 not to decide their softmax."""
    families.randomise(theirs, 0).eval()
    with torch.no_grad():
        for layer in theirs.get_submodule(layers):
            layer.layer_scalar.copy_(0.5 + torch.rand(1))
            layer.self_attn.q_norm.weight.mul_(0.5)
    return theirs


def nest(directory):
    """As the text model of one that sees and hears, with the heads of global layers in fields of their own."""
    raw, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    unread = ("vision_tower.patch.weight", "audio_tower.conv.weight", "embed_vision.x", "embed_audio.x")
    published = {f"model.{name}": np.zeros(2, np.float32) for name in unread}
    published |= {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    save_file(published, directory / "model.safetensors")
    assert raw.pop("per_layer_config")
    outside = {"model_type": "gemma4", "vision_config": {"depth": 1}, "audio_config": None, "image_token_id": 5}
    outside["tie_word_embeddings"] = raw.pop("tie_word_embeddings")
    (directory / "config.json").write_text(json.dumps(outside | {"text_config": raw | GLOBAL}))


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_forward(name, tmp_path):
    theirs = make(tmp_path, name)
    families.assert_same_forward(theirs, load_target(tmp_path))


@pytest.mark.slow
def test_a_model_that_sees_and_hears(tmp_path):
    """Everything that transformers saves of it, but the text model, is left aside."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes = {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**SHAPE | GLOBAL | TWO),
        vision_config=transformers.Gemma4VisionConfig(**small | eyes),
        audio_config=transformers.Gemma4AudioConfig(**small, output_proj_dims=32, subsampling_conv_channels=[8, 4]),
    )
    theirs = gentle(transformers.Gemma4ForConditionalGeneration(config), "model.language_model.layers")
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    assert ours.config.model_type == "gemma4"
    families.assert_same_forward(theirs, ours)


def test_embeddings_in_bfloat16(tmp_path):
    """The root of the width is rounded like the weights, and 7.1875 is not 7.2111."""
    theirs, ids = make(tmp_path, "dense", hidden_size=52).to(torch.bfloat16), np.arange(30)[None]
    found = load_target(tmp_path, dtype="bfloat16").embed(jnp.asarray(ids))
    with torch.inference_mode():
        expected = theirs.model.embed_tokens(torch.tensor(ids)).float().numpy()
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four layers", "dense, values of their own"])
def test_generations_saving_speculation_and_mesh(name, tmp_path):
    theirs = make(tmp_path / "target", name)
    families.assert_same_generations(theirs, load_target(tmp_path / "target"))
    meshes = ("data=2,model=2", *(["fsdp=2,expert=2", "model=4"] if name == "four layers" else []))
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=meshes)


@pytest.mark.parametrize("name", FAST)
def test_saved_again(name, tmp_path):
    make(tmp_path, name)
    ours = load_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: x for n, x in tensors.items() if "_tower." not in n and ".embed_" not in n.replace("embed_tokens", "")}
    save_file(kept, tmp_path / "model.safetensors")
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")
