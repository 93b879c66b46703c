"""Parity with transformers and with the official `dflash` 0.1.0, on tiny random checkpoints written by
them and read by the real loader."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
model = pytest.importorskip("dflash.model")
transformers = pytest.importorskip("transformers")

from dflash_jax import checkpoint, generate, load_drafter, load_target, models, spec_generate  # noqa: E402
from dflash_jax.cache import commit  # noqa: E402
from dflash_jax.models.attention import Pass  # noqa: E402
from tests.oracle.families import MASK, VOCAB, assert_same_forward, prompts, randomise  # noqa: E402

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 6}


def make_target(directory, **changes):
    raw = SHAPE | {"num_hidden_layers": 4, "rope_theta": 10000.0, "tie_word_embeddings": True} | changes
    config = transformers.Qwen3Config(**raw)
    target = randomise(transformers.Qwen3ForCausalLM(config), 0).eval()
    target.save_pretrained(directory)
    return target


def make_drafter(directory, *, without=(), **changes):
    """An official drafter, and its directory; its `config.json` lacks the fields `without`, as older ones do."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2]} | changes.pop("dflash_config", {})
    raw = SHAPE | {"num_hidden_layers": 3, "rope_theta": 10000.0} | changes
    config = transformers.Qwen3Config(**raw)
    config.num_target_layers, config.block_size, config.dflash_config = 4, 8, nested
    for name in ("is_causal",):
        if name in raw:
            setattr(config, name, raw[name])
    kind = model.DFlash2DraftModel if "selector_rank" in nested else model.DFlashDraftModel
    drafter = randomise(kind(config), 1).eval()
    drafter.save_pretrained(directory)
    assert drafter.config.architectures == [kind.__name__]
    file = directory / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in written.items() if name not in without}))
    return drafter


TARGETS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "one key-value head": {"num_key_value_heads": 1},
    "window": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    },
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("untied", "linear rope") else name for name in TARGETS],
)
def test_target_logits_and_features_equal_transformers(name, tmp_path):
    theirs = make_target(tmp_path, **TARGETS[name])
    assert_same_forward(theirs, load_target(tmp_path))


def test_saved_target_is_what_was_loaded(tmp_path):
    theirs = make_target(tmp_path / "theirs", attention_bias=True)
    ours = load_target(tmp_path / "theirs")
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    checkpoint.save(tmp_path / "ours", ours.params, models.qwen3.tensors(ours.config), raw)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.tensor([prompts()[1]])
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits)


DRAFTERS = {
    "full": {},
    "full causal": {"is_causal": True},
    "bias": {"attention_bias": True},
    "scaled": {
        "dflash_config": {
            "output_multiplier": 0.5,
            "final_logit_softcapping": 3.0,
            "input_embedding_scale": 2.0,
        }
    },
    "mixed windows": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "use_sliding_window": True,
    },
    "windows of older fields": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "without": ["layer_types"],
    },
    "windows, not causal": {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 11,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
    "the embedding as a tap": {"dflash_config": {"target_layer_ids": [-1, 2]}},
    "DFlash 2": {"dflash_config": DFLASH2},
    "DFlash 2, windows, not causal, scaled": {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 11,
        "use_sliding_window": True,
        "is_causal": False,
        "dflash_config": {**DFLASH2, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    },
}


RARER = "bias", "scaled", "mixed windows", "DFlash 2"  # a part of others that run every day, or like them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARER else name for name in DRAFTERS]
)
def test_drafter_hidden_states_equal_the_official_ones_over_rounds(name, tmp_path):
    """The official drafter with its own cache, against ours with context written once per round."""
    theirs = make_drafter(tmp_path, **DRAFTERS[name])
    ours = load_drafter(tmp_path)
    rng = np.random.default_rng(0)
    their_cache, cache = model._make_cache(theirs.config), ours.init_state(1, 64)

    @jax.jit
    def draft(cache, lengths, features, kept, embedded):
        positions = lengths[:, None] + jnp.arange(features.shape[1])[None]
        cache, lengths = commit(cache, ours.context(features, positions), lengths, kept), lengths + kept
        positions = lengths[:, None] + jnp.arange(embedded.shape[1])[None]
        return cache, ours.forward(embedded, Pass(positions, None, lengths, None), cache)[0]

    committed = 0
    for count in (13, 1, 8, 3, 8, 5, 2):
        features = rng.standard_normal((1, count, 64)).astype(np.float32)
        embedded = rng.standard_normal((1, 8, 32)).astype(np.float32)
        positions = torch.arange(committed, committed + count + 8)[None]
        with torch.inference_mode():
            expected = theirs(
                position_ids=positions,
                noise_embedding=torch.tensor(embedded),
                target_hidden=torch.tensor(features),
                past_key_values=their_cache,
                use_cache=True,
            )
        before, committed = committed, committed + count
        model._crop_to(their_cache, committed)
        padded = np.concatenate([features, np.full((1, 13 - count, 64), 7.0, np.float32)], axis=1)
        cache, got = draft(cache, jnp.asarray([before]), padded, jnp.asarray([count]), embedded)
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)


def test_a_drafter_of_gpt_oss_has_qwen3_layers(tmp_path):
    """Its config has gpt-oss's type and fields, biases, heads of 64, YaRN without truncation, and blocks of 10."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "truncate": False}
    theirs = make_drafter(tmp_path, attention_bias=True, head_dim=64, rope_scaling=yarn)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
    path.write_text(json.dumps(raw | {"block_size": 10}))
    ours = load_drafter(tmp_path)
    assert ours.config.block_size == 10
    rng = np.random.default_rng(0)
    features, embedded = (rng.standard_normal((1, n, w)).astype(np.float32) for n, w in ((13, 64), (10, 32)))
    with torch.inference_mode():
        expected = theirs(
            position_ids=torch.arange(23)[None],
            noise_embedding=torch.tensor(embedded),
            target_hidden=torch.tensor(features),
        )
    positions = jnp.arange(23)[None]
    lengths, kept = jnp.zeros(1, jnp.int32), jnp.full(1, 13, jnp.int32)
    cache = commit(ours.init_state(1, 64), ours.context(jnp.asarray(features), positions[:, :13]), lengths, kept)
    got = ours.forward(jnp.asarray(embedded), Pass(positions[:, 13:], None, kept, None), cache)[0]
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)


SLOW = ["DFlash 2", "mixed windows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in SLOW else pytest.param(name, marks=pytest.mark.exhaustive) for name in DRAFTERS]
)
def test_generations_equal_the_official_loop(name, tmp_path):
    """Tokens always; acceptance lengths for rounds that begin at least a block before the budget's end."""
    their_target = make_target(tmp_path / "target")
    their_drafter = make_drafter(tmp_path / "drafter", **DRAFTERS[name])
    target, drafter = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    budget, stop = 40, [11, 50]
    plain = generate(target, prompts(), max_new_tokens=budget, stop_token_ids=stop)
    for block_size in (8, 3):
        ours = spec_generate(
            target, drafter, prompts(), max_new_tokens=budget, stop_token_ids=stop, block_size=block_size
        )
        assert ours.tokens == plain.tokens
        for row, prompt in enumerate(prompts()):
            expected = model.dflash_generate(
                their_drafter,
                their_target,
                torch.tensor([prompt]),
                budget,
                stop,
                block_size=block_size,
                return_stats=_on_cpu(),
            )
            assert ours.tokens[row] == expected.output_ids[0, len(prompt) :].tolist()
            begins = 1 + np.cumsum([0, *expected.acceptance_lengths[:-1]])
            whole = int(np.sum(begins + block_size <= budget))
            assert ours.acceptance_lengths[row][:whole] == expected.acceptance_lengths[:whole]
            assert whole > 1


def _on_cpu() -> bool:
    """Statistics are wanted; the official clock synchronizes a GPU that is not there."""
    import time

    model._cuda_time = time.perf_counter
    return True


def test_default_taps_equal_the_official_rule():
    from dflash_jax.drafters.config import default_target_layer_ids

    for depth in range(6, 80):
        for layers in (1, 2, 3, 5, 6, 8):
            assert list(default_target_layer_ids(depth, layers)) == model.build_target_layer_ids(depth, layers)
