"""MiniMax-M2 against transformers, on tiny random checkpoints in the published names: plain, and in FP8."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402

from dflash_jax import load_target, models  # noqa: E402
from dflash_jax.quantised import EightBit  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    "dtype": "float32",
}
LARGE = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 128, "num_local_experts": 4}


def make(directory, changes, *, fp8=False):
    """The model, and its checkpoint: an expert a tensor, under the published names; with `fp8`, as published."""
    config = transformers.MiniMaxM2Config(**SHAPE | changes)
    theirs = families.randomise(transformers.MiniMaxM2ForCausalLM(config), 0).eval()
    rng, tensors = np.random.default_rng(1), {}
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor(rng.standard_normal(buffer.shape)))

    def store(name, weight):
        if not fp8:
            tensors[f"{name}.weight"] = weight.numpy().copy()
            return weight
        return families.stored_in_fp8(tensors, name, weight, rng)

    with torch.no_grad():
        for name, weight in theirs.state_dict().items():
            name = name.replace(".mlp.", ".block_sparse_moe.")
            if re.search(r"[qkvo]_proj\.weight$", name):
                weight.copy_(store(name.removesuffix(".weight"), weight))
            elif name.endswith("experts.gate_up_proj"):
                for e, both in enumerate(weight):
                    gate, up = both.chunk(2)
                    expert = f"{name.removesuffix('.gate_up_proj')}.{e}"
                    weight[e].copy_(torch.cat([store(f"{expert}.w1", gate), store(f"{expert}.w3", up)]))
            elif name.endswith("experts.down_proj"):
                for e, down in enumerate(weight):
                    weight[e].copy_(store(f"{name.removesuffix('.down_proj')}.{e}.w2", down))
            else:
                tensors[name] = weight.numpy().copy()
    raw = config.to_dict() | {"architectures": ["MiniMaxM2ForCausalLM"]}
    if fp8:
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "float8_e4m3fn"}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return theirs


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"num_experts_per_tok": 3, "num_key_value_heads": 4}, marks=pytest.mark.slow)]
)
def test_forward(changes, tmp_path):
    theirs = make(tmp_path, changes)
    families.assert_same_forward(theirs, load_target(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        LARGE,
        {},  # blocks of 128 end in the middle of what is joined: queries, keys and values; gate and up
        pytest.param({"hidden_size": 192, "intermediate_size": 160, "head_dim": 40}, marks=pytest.mark.slow),
    ],
    ids=["whole blocks", "ragged", "ragged and larger"],
)
def test_forward_in_fp8(changes, tmp_path):
    theirs = make(tmp_path, changes, fp8=True)
    ours = load_target(tmp_path)
    assert isinstance(ours.params["layers_0"]["self_attn"]["qkv_proj"]["weight"], EightBit)
    assert ours.params["layers_0"]["experts"]["gate_up_proj"].values.dtype == ml_dtypes.float8_e4m3fn
    families.assert_same_forward(theirs, ours)
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")
    families.assert_dequantised(tmp_path, ours, divisible=changes is LARGE)


@pytest.mark.slow
def test_generations_saving_speculation_and_mesh(tmp_path):
    theirs = make(tmp_path / "target", {})
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["expert=4", "model=2"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_same_in_fp8(tmp_path):
    wide = LARGE | {"intermediate_size": 256}
    theirs = make(tmp_path / "target", wide, fp8=True)
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["data=2", "expert=2"])
    with pytest.raises(ValueError, match="in quantized blocks of 128"):
        families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["model=4"])


RAW = SHAPE | {"model_type": "minimax_m2", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"rotary_dim": 4}, "how much of a head"),
        ({"num_experts_per_tok": 9}, "at most the 8 experts"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)


def test_a_drafter_for_it_rotates_whole_heads(tmp_path):
    from dflash_jax.train.config import TrainConfig
    from dflash_jax.train.drafters import new_drafter

    make(tmp_path, {})
    drafter, raw = new_drafter(load_target(tmp_path), TrainConfig(num_layers=2, block_size=8), families.MASK)
    assert drafter.config.mixers[0].rope.rotated == 0
    assert "rotated" not in raw["rope_parameters"]
