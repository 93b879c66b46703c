"""Llama and Mistral against transformers, on tiny random checkpoints that transformers wrote."""

import json

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dflash_jax import load_target, models  # noqa: E402
from tests import gguf_files  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}
VARIANTS = {
    "as Llama 3": {"rope_parameters": LLAMA3},
    "tied, its own head dim": {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 4},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "one key-value head": {"num_key_value_heads": 1},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e4,
        }
    },
}
MISTRAL = {"window": {"sliding_window": 6}, "no window": {"sliding_window": None, "head_dim": 32}}


def make(directory, model_type, changes):
    config = getattr(transformers, f"{model_type}Config")(**SHAPE | changes)
    theirs = families.randomise(getattr(transformers, f"{model_type}ForCausalLM")(config), 0).eval()
    theirs.save_pretrained(directory)
    return theirs


FAST = ["as Llama 3", "tied, its own head dim", "biases everywhere"]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_llama_forward(name, tmp_path):
    theirs = make(tmp_path, "Llama", VARIANTS[name])
    families.assert_same_forward(theirs, load_target(tmp_path))


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral_forward(name, tmp_path):
    theirs = make(tmp_path, "Mistral", MISTRAL[name])
    families.assert_same_forward(theirs, load_target(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["Llama", pytest.param("Mistral", marks=pytest.mark.slow)])
def test_generations_saving_speculation_and_mesh(model_type, tmp_path):
    changes = VARIANTS["biases everywhere"] if model_type == "Llama" else MISTRAL["window"]
    theirs = make(tmp_path / "target", model_type, changes)
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter")


def test_what_an_old_config_leaves_out(tmp_path):
    """The first Llamas name no theta, no head dim and no key-value heads."""
    theirs = make(tmp_path, "Llama", {"num_key_value_heads": 4})
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for name in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_theta"):
        raw.pop(name, None)
    path.write_text(json.dumps(raw))
    families.assert_same_forward(theirs, load_target(tmp_path))


RAW = SHAPE | {"model_type": "llama", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "not a multiple of 7 heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral"}, "must give sliding_window"),
        ({"model_type": "mistral", "sliding_window": 4, "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "mixtral"}, "mixtral"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)


def test_gguf_equals_transformers_own_reading(tmp_path, monkeypatch):
    """The same numbers from the same four and eight bits, and the same tokens and prompts."""
    import numpy as np
    import torch

    from dflash_jax.infer.text import Text

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf_files.write(tmp_path / "model.gguf", tied=False)
    given = {"gguf_file": "model.gguf"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given).eval()
    ours = load_target(tmp_path / "model.gguf")
    families.assert_same_forward(theirs, ours, ids=np.arange(23) * 7 % gguf_files.VOCAB)
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(tmp_path, **given), Text(ours.directory)
    for words in ("abcab", "xyzabcccba<end>ab", "aabbcc"):
        assert text.encode(words) == tokenizer(words)["input_ids"]
        assert text.decode(text.encode(words)) == tokenizer.decode(
            tokenizer(words)["input_ids"], skip_special_tokens=True
        )
