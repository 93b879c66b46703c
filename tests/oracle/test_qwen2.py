"""Qwen2 against transformers, on tiny random checkpoints that transformers wrote."""

import json

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dflash_jax import load_target, models, plan  # noqa: E402
from dflash_jax.benchmarks import topologies  # noqa: E402
from dflash_jax.benchmarks.presets import PAIRS  # noqa: E402
from tests import tiny  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
VARIANTS = {
    "untied": {},
    "tied, one key-value head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "windows of the last layers": WINDOWS | {"max_window_layers": 2},
    "windows by layer": WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "no windows after all": {"sliding_window": 5, "max_window_layers": 2},
    "yarn": {"rope_parameters": YARN},
}


def make(directory, changes, without=()):
    """A checkpoint whose `config.json` lacks the fields `without`, as older ones do."""
    config = transformers.Qwen2Config(**SHAPE | changes)
    theirs = families.randomise(transformers.Qwen2ForCausalLM(config), 0).eval()
    theirs.save_pretrained(directory)
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    assert raw["architectures"] == ["Qwen2ForCausalLM"]
    file.write_text(json.dumps({name: value for name, value in raw.items() if name not in without}))
    return theirs


FAST = ["untied", "tied, one key-value head", "windows by layer"]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_forward(name, tmp_path):
    theirs = make(tmp_path, VARIANTS[name])
    ours = load_target(tmp_path)
    attention = ours.params["layers_0"]["self_attn"]
    assert {path: [*weights] for path, weights in attention.items()} == {
        "qkv_proj": ["weight", "bias"],
        "o_proj": ["weight"],
    }
    families.assert_same_forward(theirs, ours)


def test_a_config_without_layer_types(tmp_path):
    """Layers from `max_window_layers` on have the window."""
    theirs = make(tmp_path, VARIANTS["windows of the last layers"], without=["layer_types"])
    ours = load_target(tmp_path)
    assert [layer.attention.window for layer in ours.config.layers] == [None, None, 5, 5]
    families.assert_same_forward(theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows of the last layers", pytest.param("untied", marks=pytest.mark.exhaustive)])
def test_generations_saving_speculation_and_meshes(name, tmp_path):
    theirs = make(tmp_path / "target", VARIANTS[name])
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=("data=2,model=2", "fsdp=2", "model=4"))


RAW = tiny.target_config(model_type="qwen2", **tiny.FAMILIES["qwen2"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias = False"),
        ({"use_sliding_window": True}, "use_sliding_window needs sliding_window"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention layers need use_sliding_window"),
        ({"num_attention_heads": 6}, "not a multiple of 6 heads"),
        ({"rope_theta": None}, "must give rope_theta"),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "dual_chunk_attention_config"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)


@pytest.mark.slow
def test_a_plan_of_its_published_size(tmp_path, monkeypatch):
    monkeypatch.setattr(topologies, "has_compiler", lambda name: False)
    arguments = ["--target", "qwen2.5-7b", "--topology", "h100:2", "--max-length", "1024", "--batch-size", "1"]
    assert plan.main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    depth = PAIRS["qwen2.5-7b"][0]["num_hidden_layers"]
    keys = 2 * 128 * 2  # bytes of a token, a layer and a head
    assert figures["cache_bytes"] == 1024 * keys * (4 // 2 * depth + 8 // 2 * 5)
    weights = 7.62e9 + 1.27e9  # as the target is known to have, and of the drafter: 5 layers and its fusion
    assert figures["weight_bytes"] == pytest.approx(2 * weights / 2, rel=0.01)
