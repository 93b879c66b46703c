"""Gemma 4: its configurations, and the drafters that are published for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter, load_target, models
from dflash_jax.benchmarks import planning
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.cache import size_in_bytes
from dflash_jax.config import RopeConfig
from dflash_jax.decoding.state import Query, Seen
from dflash_jax.drafters import drafter_config
from dflash_jax.mesh import AXES, Layout
from dflash_jax.models.attention import Pass
from dflash_jax.models.rope import rope_tables
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.drafters import new_drafter
from tests import tiny

# google/gemma-4-26B-A4B-it, without what its other parts are
PUBLISHED = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "video_token_id": 258884,
    "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
TEXT = PUBLISHED["text_config"]
SAVED = {"global_head_dim": None, "num_global_key_value_heads": None}  # where transformers writes each layer
LAYERS = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}


def test_the_published_config_in_every_form():
    config = models.target_config(PUBLISHED)
    assert config.nested
    assert config.eos_token_ids == (1, 106)
    by_layer = {name: x for name, x in TEXT.items() if x is not None} | SAVED | {"per_layer_config": LAYERS}
    for raw in (TEXT, by_layer, PAIRS["gemma-4-26b-a4b"][0], TEXT | {"layer_types": None}):
        assert models.target_config(raw).layers == config.layers
    sliding, full = config.layers[4].attention, config.layers[5].attention
    shape = lambda mixer: (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window, mixer.scale)
    assert shape(sliding) == (16, 8, 256, 1024, 1.0)
    assert shape(full) == (16, 2, 512, None, 1.0)
    assert full.values_are_keys
    assert not sliding.values_are_keys
    assert config.embedding_scale == 2816**0.5


def test_proportional_rope():
    """Exponents over the whole head, and pairs that stand still, each with its partner half a head away."""
    full = models.target_config(PUBLISHED).layers[5].attention
    positions = jnp.asarray([[0, 3, 8]])
    cos, sin = (np.asarray(x[0], np.float64) for x in rope_tables(*full.rotary, positions, jnp.dtype("float32")))
    pairs = np.arange(256)
    angles = np.asarray([0, 3, 8])[:, None] * np.where(pairs < 64, 1e6 ** (-2.0 * pairs / 512), 0)
    np.testing.assert_allclose(cos, np.cos(np.tile(angles, 2)), atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(np.tile(angles, 2)), atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "E2B and E4B"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or 'vision', got 'all'"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"global_head_dim": None}, "global_head_dim"),
        ({"rope_parameters": None}, "one object for each of layer_types, got None"),
        ({"rope_parameters": TEXT["rope_parameters"]["full_attention"]}, "one object for each of layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"top_k_experts": 129}, "at most the 128 experts"),
        ({"layer_types": ["chunked_attention"] * 30}, "chunked_attention"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "gives heads twice"),
        ({**SAVED, "per_layer_config": {"30": {"head_dim": 512}}}, "layers 0..29, got '30'"),
        ({**SAVED, "per_layer_config": {"5": {"sliding_window": 7}}}, "sliding_window"),
        ({**SAVED, "per_layer_config": [512]}, "must be an object"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ],
)
def test_configs_that_are_refused_by_name(changes, message):
    for raw in (TEXT | changes, PUBLISHED | {"text_config": TEXT | changes}):
        with pytest.raises(ValueError, match=message):
            models.target_config(raw)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "proportional", "rope_theta": 1e6}, "must give partial_rotary_factor"),
        ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5}, "at most 1.0"),
        ({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, "partial rotary"),
    ],
)
def test_ropes_that_are_refused(parameters, message):
    ropes = TEXT["rope_parameters"] | {"full_attention": parameters}
    with pytest.raises(ValueError, match=message):
        models.target_config(TEXT | {"rope_parameters": ropes})


def test_a_mesh_that_does_not_divide_the_mlp_beside_the_experts():
    raw = TEXT | {"num_attention_heads": 64, "num_key_value_heads": 64}
    assert models.target_config(raw).indivisible(Layout(32)) is None
    assert models.target_config(raw).indivisible(Layout(64, 64)) is None
    assert (
        models.target_config(raw | {"intermediate_size": 2100}).indivisible(Layout(64, 64)) == "an inner width of 2100"
    )


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b"])
def test_published_drafters_are_read(name):
    target, drafter = (
        parse(raw) for parse, raw in zip((models.target_config, drafter_config), PAIRS[name], strict=True)
    )
    drafter.check_pair(target)
    assert [layer.attention.window for layer in drafter.layers] == [2048] * 4 + [None]
    assert [layer.attention.causal for layer in drafter.layers] == [True] * 4 + [False]
    assert drafter.final_logit_softcapping == 30.0
    assert drafter.input_embedding_scale is None
    assert drafter.target_layer_ids[-1] == target.num_hidden_layers - 3
    with pytest.raises(ValueError, match="Gemma layers"):  # DeepSpec's are of another kind
        drafter_config(PAIRS[name][1] | {"architectures": ["Gemma4DSparkModel"]})


@pytest.mark.parametrize(
    ("name", "weights", "per_token", "read"),
    [
        pytest.param("gemma-4-31b", 61.4, 80, 69.0, marks=pytest.mark.slow),
        ("gemma-4-26b-a4b", 50.5, 20, 36.5),
    ],
)
def test_plans(name, weights, per_token, read):
    """GB of the target, KiB of a token in its global layers, and GB that a step reads: what is known of the target, and
    the drafter with another reading of the head."""
    drafter = PAIRS[name][1]
    D, heads, inner = drafter["hidden_size"], drafter["num_attention_heads"] * 128, drafter["intermediate_size"]
    draft = 2 * (5 * (2 * D * heads + 2 * D * 1024 + 3 * D * inner) + 6 * D * D) / 1e9
    figures = planning.traced(PAIRS[name], dict.fromkeys(AXES, 1), 1, 1024, None)
    assert figures["weight_bytes"] / 1e9 == pytest.approx(weights + draft, rel=0.01)
    assert figures["bytes_accessed"] / 1e9 == pytest.approx(read, rel=0.02)
    long, short = (size_in_bytes(planning.shapes(PAIRS[name], None, 1, n)[2].target_cache) for n in (8192, 4096))
    assert long - short == 4096 * 1024 * per_token


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    raw = tiny.target_config(model_type="gemma4_text", **tiny.FAMILIES["gemma4"])
    return load_target(tiny.write_target(tmp_path_factory.mktemp("target"), raw))


def load(directory, target, **changes):
    """A drafter in the published form."""
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    raw = tiny.drafter_config(final_logit_softcapping=2.0, **types, **changes)
    drafter = load_drafter(tiny.write_drafter(directory, raw))
    drafter.config.check_pair(target.config)
    return drafter


def draft(target, drafter):
    """Logits of four slots after a context of random features."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((1, 9, 64)), jnp.float32)
    at, nothing = jnp.arange(9)[None], jnp.zeros(1, jnp.int32)
    tokens = jnp.zeros((1, 9), jnp.int32)
    lengths = jnp.asarray([9])

    @jax.jit
    def run(target, drafter):
        seen = Seen(tokens, features, at, nothing, lengths)
        state = drafter.commit(target, drafter.init_state(1, 32), seen)
        return drafter.logits(target, state, Query(jnp.asarray([7]), lengths, 4)), state

    return run(target, drafter)


def test_drafters_embed_like_their_target(target, tmp_path):
    """Their config gives no scale: it is the target's. Against plain arithmetic, with the cap of their logits."""
    drafter = load(tmp_path / "d", target)
    logits, state = draft(target, drafter)
    table = np.asarray(target.params["embed_tokens"])
    x = jnp.asarray(table[[7, tiny.MASK, tiny.MASK, tiny.MASK]] * 32**0.5)[None]
    hidden, _ = jax.jit(type(drafter).forward)(
        drafter, x, Pass(9 + jnp.arange(4)[None], None, jnp.asarray([9]), None), state
    )
    expected = 2 * np.tanh(np.asarray(hidden)[:, 1:] @ table.T / 2)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    # A scale of their own goes before, and so does an embedding of their own.
    raw, _ = draft(target, load(tmp_path / "raw", target, dflash_config={"input_embedding_scale": 1.0}))
    assert np.abs(raw - logits).max() > 1e-2
    own = drafter.replace(
        params={**drafter.params, "embed_tokens": target.params["embed_tokens"]},
        config=dataclasses.replace(drafter.config, own_embedding=True),
    )
    np.testing.assert_allclose(draft(target, own)[0], raw, atol=1e-6)


def test_a_new_drafter_rotates_whole_heads(target):
    config = TrainConfig(drafter="dflash", num_layers=2, block_size=4)
    drafter, raw = new_drafter(target, config, tiny.MASK)
    assert raw["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}
    assert drafter.config.layers[0].attention.rope == RopeConfig(1e6)
