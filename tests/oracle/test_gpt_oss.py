"""gpt-oss against transformers, on tiny random checkpoints: as published in MXFP4, and unquantized."""

import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dflash_jax import load_target, models  # noqa: E402
from dflash_jax.quantised import FourBit  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
        "rope_theta": 150000.0,
    },
    "dtype": "float32",
}
FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def make(directory, changes, *, mxfp4):
    config = transformers.GptOssConfig(**SHAPE | changes)
    config._attn_implementation = "eager"
    theirs = families.randomise(transformers.GptOssForCausalLM(config), 0).eval()
    packed = pack(theirs) if mxfp4 else {}
    theirs.save_pretrained(directory)
    if mxfp4:
        path = directory / "model.safetensors"
        tensors = {name: x for name, x in load_file(path).items() if not name.endswith(("gate_up_proj", "down_proj"))}
        save_file(tensors | packed, path)
        raw = json.loads((directory / "config.json").read_text())
        raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (directory / "config.json").write_text(json.dumps(raw))
    return theirs


def pack(theirs):
    """Random blocks and scales under the published names; transformers' weights become what they stand for."""
    rng, packed = np.random.default_rng(1), {}
    for name, weight in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, width, outputs = weight.shape
        codes = rng.integers(0, 16, (experts, outputs, width // 32, 32)).astype(np.uint8)
        scales = rng.integers(118, 123, (experts, outputs, width // 32)).astype(np.uint8)
        packed[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        packed[f"{name}_scales"] = scales
        plain = FP4[codes] * 2.0 ** (scales.astype(np.float32) - 127)[..., None]
        with torch.no_grad():
            weight.copy_(torch.tensor(plain.reshape(experts, outputs, width)).transpose(1, 2))
    return packed


@pytest.mark.parametrize("mxfp4", [True, False])
@pytest.mark.parametrize("changes", [{}, {"num_experts_per_tok": 4, "intermediate_size": 96, "num_key_value_heads": 4}])
def test_forward(changes, mxfp4, tmp_path):
    theirs = make(tmp_path, changes, mxfp4=mxfp4)
    ours = load_target(tmp_path)
    families.assert_same_forward(theirs, ours)
    weight = ours.params["layers_0"]["experts"]["gate_up_proj"]
    assert isinstance(weight, FourBit) == mxfp4
    if mxfp4:
        bits = 8 * sum(x.nbytes for x in jax.tree.leaves(weight)) / np.prod(weight.shape)
        assert bits == 4.25
        families.assert_dequantised(tmp_path, ours)


@pytest.mark.slow
def test_generations_saving_speculation_and_mesh(tmp_path):
    theirs = make(tmp_path / "target", {}, mxfp4=True)
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=["model=2", "expert=2,model=2"])


def test_experts_are_never_dequantised_all_at_once(tmp_path):
    """The program of a block holds the plain weights of no more than a few experts."""
    from dflash_jax.models.experts import apply_experts

    experts, inner, width = 32, 256, 128
    spec = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    packed = lambda rows, columns: FourBit(
        spec(experts, rows, columns // 2, dtype="uint8"), spec(experts, rows, columns // 32, dtype="uint8"), code="e2m1"
    )
    arguments = spec(1, 16, width), spec(1, 16, 4), spec(1, 16, 4, dtype="int32")
    program = jax.jit(apply_experts).lower(*arguments, packed(2 * inner, width), None, packed(width, inner)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 6 * 4 * 2 * inner * width


RAW = SHAPE | {"model_type": "gpt_oss", "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "the quantization 'bitsandbytes'"),
        ({"num_experts_per_tok": 7}, "at most the 6 experts"),
        ({"attention_bias": False}, "attention_bias"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)
