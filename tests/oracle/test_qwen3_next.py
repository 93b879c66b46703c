"""Qwen3-Next and Qwen3.5 against transformers, on tiny random checkpoints in the published layouts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from dflash_jax import load_target, models  # noqa: E402
from dflash_jax.cache import commit  # noqa: E402
from dflash_jax.cache.recurrent import Recurrent  # noqa: E402
from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
VARIANTS = {
    "next": ("Qwen3Next", EXPERTS | {"norm_topk_prob": True}),
    "next, dense between": ("Qwen3Next", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1, 3]}),
    "dense": ("Qwen3_5", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "dense, tied": ("Qwen3_5", {"tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    "experts": ("Qwen3_5Moe", EXPERTS),
    "experts, as transformers saves them": ("Qwen3_5Moe", EXPERTS | {"full_attention_interval": 2}),
    "dense, an odd part of a head rotated": ("Qwen3_5", {"head_dim": 22}),
}


def make(directory, name):
    """A model of transformers', and its checkpoint as it is published."""
    kind, changes = VARIANTS[name]
    text = "" if kind == "Qwen3Next" else "Text"
    config = getattr(transformers, f"{kind}{text}Config")(**SHAPE | changes, experts_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for path, weight in theirs.named_parameters():
            if "A_log" in path:
                weight.copy_(torch.log(torch.rand_like(weight) * 3 + 0.1))
            elif weight.ndim == 1:  # norms add one, but for those of linear attention
                weight.copy_(0.3 * torch.randn_like(weight) + (1.0 if "linear_attn" in path else 0.0))
            elif "embed" not in path:
                weight.copy_(torch.randn_like(weight) * 1.3 / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(torch.randn_like(weight) * 0.5)
    theirs.save_pretrained(directory)
    if kind != "Qwen3Next" and "saves" not in name:
        nest(directory, SHAPE | changes)
    return theirs


def nest(directory, shape):
    """As the text model of a vision model, with stacked experts."""
    raw, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    published = {
        "model.visual.patch_embed.weight": np.zeros((2, 2), np.float32),
        "mtp.fc.weight": np.zeros(3, np.float32),
    }
    for name, x in tensors.items():
        if "mlp.experts." not in name:
            published[name.replace("model.", "model.language_model.", 1)] = x
    for i in range(shape["num_hidden_layers"]):
        each = [f"model.layers.{i}.mlp.experts.{e}" for e in range(shape.get("num_experts", 0))]
        if each:
            gate, up, down = (
                np.stack([tensors[f"{e}.{name}_proj.weight"] for e in each]) for name in ("gate", "up", "down")
            )
            inside = f"model.language_model.layers.{i}.mlp.experts"
            published |= {f"{inside}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{inside}.down_proj": down}
    save_file(published, directory / "model.safetensors")
    outside = {
        "model_type": raw["model_type"].removesuffix("_text"),
        "vision_config": {"depth": 1},
        "image_token_id": 5,
    }
    outside["tie_word_embeddings"] = raw["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(outside | {"text_config": raw}))


def rounding(theirs):
    """How far transformers in float32 is from itself in float64: decays make some of these models sensitive."""
    ids = torch.tensor([families.prompts()[1]])
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        single = theirs(ids, output_hidden_states=True)
        patch.setattr(torch, "float32", torch.float64)  # linear attention computes in float32 whatever the weights are
        double = theirs.double()(ids, output_hidden_states=True)
    theirs.float()
    pairs = zip([single.logits, *single.hidden_states], [double.logits, *double.hidden_states], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


FAST = ["next", "dense", "experts, as transformers saves them", "dense, an odd part of a head rotated"]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_forward(name, tmp_path):
    theirs = make(tmp_path, name)
    families.assert_same_forward(theirs, load_target(tmp_path), tolerance=max(1e-4, 2.5 * rounding(theirs)))


@pytest.mark.parametrize(("name", "tied"), [("dense", False), ("dense, tied", True)])
def test_the_whole_model_says_whether_the_head_is_tied(name, tied, tmp_path):
    make(tmp_path, name)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["tie_word_embeddings"] is tied
    raw["text_config"]["tie_word_embeddings"] = not tied
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ("lm_head" in load_target(tmp_path).params) is not tied


def test_a_long_prompt_and_every_commit_of_its_end(tmp_path):
    """Prompts by chunks of 100 positions; then a block of which each number of positions is committed: the state itself
    is that of a model that read just these."""
    theirs, ours = make(tmp_path, "dense"), load_target(tmp_path)
    rng = np.random.default_rng(0)
    ids, block = rng.integers(0, families.MASK, 164), rng.integers(0, families.MASK, 8)

    @jax.jit
    def forward(tokens, cache, at, counts):
        positions = at[:, None] + jnp.arange(tokens.shape[1])[None]
        hidden, _, fresh = ours.forward(tokens, positions, None, cache, at, counts=counts)
        return ours.unembed(hidden), fresh

    def read(tokens):
        """All of them, a hundred at a time; their logits and the cache after them."""
        cache, logits = ours.init_cache(1, 256), []
        for at in range(0, len(tokens), 100):
            piece = tokens[at : at + 100]
            padded, count = jnp.asarray(np.pad(piece, (0, 100 - len(piece))))[None], jnp.asarray([len(piece)])
            out, fresh = forward(padded, cache, jnp.asarray([at]), count)
            cache = commit(cache, fresh, jnp.asarray([at]), count)
            logits.append(out[0, : len(piece)])
        return np.concatenate(logits), cache

    logits, cache = read(ids)
    with torch.inference_mode():
        expected = theirs(torch.tensor(ids[None])).logits.numpy()
    np.testing.assert_allclose(logits, expected[0], atol=2e-4)
    at = jnp.asarray([len(ids)])
    _, fresh = forward(jnp.asarray(block[None]), cache, at, jnp.asarray([8]))
    for kept in range(9):
        after = commit(cache, fresh, at, jnp.asarray([kept]))
        _, alone = read(np.concatenate([ids, block[:kept]]))
        for entry, other in zip(after.entries, alone.entries, strict=True):
            if isinstance(entry, Recurrent):
                np.testing.assert_allclose(entry.s, other.s, atol=1e-5)
                np.testing.assert_allclose(entry.inputs, other.inputs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["experts", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("next, dense between", "dense"))]
)
def test_generations_saving_speculation_and_mesh(name, tmp_path):
    theirs = make(tmp_path / "target", name)
    ours = load_target(tmp_path / "target")
    families.assert_same_generations(theirs, ours)
    meshes = ("data=2,model=2", *(["fsdp=2,expert=2"] if name == "experts" else []))
    families.assert_lossless(tmp_path / "target", tmp_path / "drafter", meshes=meshes)


@pytest.mark.parametrize("name", ["next", "experts"])
def test_saved_again(name, tmp_path):
    make(tmp_path, name)
    ours = load_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for unread in ("model.visual.patch_embed.weight", "mtp.fc.weight"):
        tensors.pop(unread, None)
    save_file(tensors, tmp_path / "model.safetensors")
    families.assert_saved_again(tmp_path, ours, tmp_path / "saved")


RAW = {k: v for k, v in SHAPE.items() if k != "dtype"} | {
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "model_type": "qwen3_5_text",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"model_type": "qwen3_next"}, "norm_topk_prob"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    models.target_config(RAW)
    with pytest.raises(ValueError, match=message):
        models.target_config(RAW | changes)
