"""Qwen3 with experts against transformers, on tiny random checkpoints that transformers wrote."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dflash_jax import load_target, models  # noqa: E402
from dflash_jax.benchmarks.experts import experts_hit  # noqa: E402
from dflash_jax.checkpoint import Reader  # noqa: E402
from dflash_jax.quantised import EightBit  # noqa: E402
from tests import tiny  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
VARIANTS = {
    "as published": {},
    "weights as they are": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "dense layers between": {"mlp_only_layers": [1], "num_experts_per_tok": 3},
    "every other layer": {"decoder_sparse_step": 2, "attention_bias": True},
    "one expert": {"num_experts_per_tok": 1, "num_experts": 5},
    "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}


def make(directory, changes):
    config = transformers.Qwen3MoeConfig(**SHAPE | changes, experts_implementation="eager")
    theirs = families.randomise(transformers.Qwen3MoeForCausalLM(config), 0).eval()
    theirs.save_pretrained(directory)
    return theirs


FAST = ["as published", "dense layers between", "windows"]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_forward(name, tmp_path):
    theirs = make(tmp_path, VARIANTS[name])
    families.assert_same_forward(theirs, load_target(tmp_path))


def test_windows_are_on_every_layer_or_on_none():
    windows = lambda **changes: {mixer.window for mixer in models.target_config(RAW | changes).mixers}
    assert windows(use_sliding_window=True, sliding_window=5, layer_types=None) == {5}
    assert windows(use_sliding_window=False, sliding_window=5) == {None}
    assert windows(use_sliding_window=True, sliding_window=None) == {None}


def in_fp8(directory, changes, plain):
    """As published in FP8: experts one by one, every layer's weights with block scales but those that are `plain`."""
    theirs, tensors, rng = make(directory, changes), {}, np.random.default_rng(1)
    saved, names = Reader(directory), []

    def stored(name, weight):
        if any(part in name for part in plain):
            tensors[f"{name}.weight"] = weight.numpy().astype(ml_dtypes.bfloat16)
            return torch.tensor(tensors[f"{name}.weight"].astype(np.float32))
        names.append(name)
        return families.stored_in_fp8(tensors, name, weight, rng)

    own = theirs.state_dict()
    with torch.no_grad():
        for name in sorted(saved.names()):
            value = torch.tensor(saved.read(name, (slice(None),) * len(saved.shape(name))))
            module = name.removesuffix(".weight")
            if not re.search(r"(_proj|experts\.\d+\.\w+)\.weight$", name):
                tensors[name] = value.numpy()
            elif found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module):
                prefix, expert, part = found[1], int(found[2]), found[3]
                whole = own[f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"][expert]
                half = whole.shape[0] // 2
                rows = {"gate": slice(0, half), "up": slice(half, None), "down": slice(None)}[part]
                whole[rows] = stored(module, value)
            else:
                own[name].copy_(stored(module, value))
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return theirs, tensors, raw, names


@pytest.mark.parametrize(
    ("listed", "plain", "spelling"),
    [
        # A dense layer of its own, and the router that published lists name, too.
        (["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp"], ["layers.1.mlp"], "modules_to_not_convert"),
        # One of what is joined; the experts of a layer; one expert among others.
        (["k_proj", "model.layers.2.mlp.experts"], ["k_proj", "layers.2.mlp"], "ignored_layers"),
        (["model.layers.3.mlp.experts.2.up_proj"], ["3.mlp.experts.2.up_proj"], "modules_to_not_convert"),
    ],
)
def test_modules_that_are_not_in_fp8(listed, plain, spelling, tmp_path):
    theirs, tensors, raw, packed = in_fp8(tmp_path, {"mlp_only_layers": [1], "intermediate_size": 160}, plain)
    raw["quantization_config"][spelling] = listed
    tiny.write(tmp_path, raw, tensors)
    ours = load_target(tmp_path)
    assert all(map(ours.config.storage.of, packed))
    assert isinstance(ours.params["layers_0"]["experts"]["gate_up_proj"], EightBit)
    mlp = ours.params["layers_1"]["mlp"]["gate_up_proj"]["weight"]
    assert isinstance(mlp, EightBit) == ("model.layers.1.mlp" not in listed)
    families.assert_same_forward(theirs, ours)
    raw["quantization_config"].pop(spelling)
    tiny.write(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match="does not match its config.json"):
        load_target(tmp_path)


def test_experts_hit_by_a_block(tmp_path):
    """Counted from the choices of transformers' router; the prompt's own tokens count for nothing."""
    theirs, ours = make(tmp_path, VARIANTS["dense layers between"]), load_target(tmp_path)
    ids, prompt = families.prompts()[1], 5
    each = next(layer.experts.num_experts_per_tok for layer in ours.config.layers if layer.experts)
    with torch.inference_mode():
        layers = theirs(torch.tensor([ids]), output_router_logits=True).router_logits
    chosen = [torch.topk(layer, each).indices.numpy()[prompt:] for layer in layers]
    blocks = {width: range(0, len(ids) - prompt - width + 1, width) for width in (1, 4, 64)}
    counts = {
        width: [len(np.unique(layer[at : at + width])) for layer in chosen for at in starts]
        for width, starts in blocks.items()
    }
    found = experts_hit(ours, [(ids[:prompt], ids[prompt:])], tuple(blocks))
    assert found == {1: each, 4: pytest.approx(np.mean(counts[4]))}
    assert not counts[64]


@pytest.mark.slow
def test_generations_saving_speculation_and_mesh(tmp_path):
    theirs = make(tmp_path / "target", VARIANTS["dense layers between"])
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    families.assert_saved_again(tmp_path / "target", ours, tmp_path / "saved")
    meshes = "data=2,model=2", "data=2,expert=2,model=2", "fsdp=2,expert=2"
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=meshes)


RAW = SHAPE | {"model_type": "qwen3_moe", "rope_theta": 1e4, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": None}, "must give norm_topk_prob"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 9}, "at most the 8 experts"),
        ({"n_group": 2}, "n_group = 2"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
        ({"use_sliding_window": True}, "needs sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "all full_attention"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)
