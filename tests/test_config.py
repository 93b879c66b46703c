"""What a `config.json` means, and what is refused."""

import json

import pytest

from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.config import check_fields
from dflash_jax.drafters import drafter_config
from dflash_jax.models import target_config
from dflash_jax.models.rope import rope_frequencies
from tests import tiny


def drafter(**changes):
    return drafter_config(tiny.drafter_config(**changes))


def test_target_fields():
    config = target_config(tiny.target_config(eos_token_id=[1, 2], rope_theta=5e5))
    assert (config.num_hidden_layers, config.layers[0].mixer.head_dim, config.layers[0].mixer.rope.theta) == (
        4,
        16,
        5e5,
    )
    assert config.eos_token_ids == (1, 2)
    assert {(layer.mixer.window, layer.mixer.causal) for layer in config.layers} == {(None, True)}
    assert hash(config) == hash(target_config(tiny.target_config(eos_token_id=[1, 2], rope_theta=5e5)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts": 8}, "num_experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "banana": 1}}, "banana"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "twice"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 15}, "even"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding"),
        ({"model_type": []}, "model_type"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 4096"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers must be at most 4096"),
        ({"intermediate_size": 2**40}, "intermediate_size must be at most"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be at most"),
        ({"rope_theta": 1e-300}, "rope_theta must be at least 1"),
        ({"eos_token_id": 2**31}, "ids must be integers below"),
        ({"rope_scaling": {"factor": 2.0}}, "needs a rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "positive float 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "positive float 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "factor must be at most"),
        ({"head_dim": 10**9}, "head_dim must be at most"),
        ({"num_attention_heads": 10**9}, "num_attention_heads must be at most"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"max_window_layers": "a", "use_sliding_window": True, "sliding_window": 4}, "max_window_layers"),
    ],
)
def test_unsupported_targets_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        target_config(tiny.target_config(**change))


def test_inert_and_switched_off_fields_pass():
    plain = target_config(tiny.target_config())
    inert = {"use_cache": True, "initializer_range": 0.02, "pretraining_tp": 1, "attention_dropout": 0.0}
    off = {"num_experts": 0, "pruned_heads": {}, "torchscript": False, "mlp_only_layers": []}
    null = {"some_new_flag": None, "quantization_config": None, "rope_scaling": None}
    assert target_config(tiny.target_config(**inert, **off, **null)) == plain


@pytest.mark.parametrize("name", ["norm_topk_prob", "rope_interleave", "use_qk_norm", "some_new_flag"])
@pytest.mark.parametrize("off", [False, 0, "", [], {}])
def test_unknown_fields_may_change_the_model_by_being_off(name, off):
    """Their default may be on."""
    for config in (target_config, drafter_config):
        with pytest.raises(ValueError, match=f"{name} = .*on or off"):
            config(tiny.drafter_config(**{name: off}))


def test_families_name_fields_that_are_inert_when_off():
    check_fields({"gate": False, "width": None}, (), {}, inert=["gate"])
    with pytest.raises(ValueError, match="gate = True"):
        check_fields({"gate": True}, (), {}, inert=["gate"])


def test_what_transformers_writes_is_read(tmp_path):
    from transformers import Qwen3Config

    raw = tiny.target_config()
    written = Qwen3Config(**raw)
    written.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert target_config(written.to_dict()) == target_config(saved) == target_config(raw)
    target_config(Qwen3Config().to_dict())


def test_window_of_old_targets_starts_at_max_window_layers():
    config = target_config(tiny.target_config(use_sliding_window=True, sliding_window=8, max_window_layers=3))
    assert [layer.mixer.window for layer in config.layers] == [None, None, None, 8]


def test_drafter_fields_in_their_places():
    nested = drafter(dflash_config={"block_size": 8})
    assert nested == drafter()
    moved = tiny.drafter_config(dflash_config={"block_size": 8})
    del moved["block_size"]
    moved["rope_parameters"] = {"rope_theta": moved.pop("rope_theta"), "rope_type": "default"}
    moved["num_target_layers"] = None
    moved["dflash_config"]["num_target_layers"] = 4
    assert drafter_config(moved) == nested
    top = tiny.drafter_config()
    top.update(top.pop("dflash_config"))
    assert drafter_config(top) == nested
    auxiliary = tiny.drafter_config()
    auxiliary["dflash_config"] = {"mask_token_id": tiny.MASK}
    auxiliary["aux_hidden_state_layer_ids"] = [1, 3]
    assert drafter_config(auxiliary) == nested


def test_kimis_drafter_and_the_amplitude_of_its_rotations():
    """By its config it is 1; `attention_factor` sets another for a checkpoint."""
    target, raw = PAIRS["kimi-k2.5"]
    config = drafter_config(raw, 61)
    config.check_pair(target_config(target))
    assert (len(config.layers), config.block_size, config.layers[0].mixer.rope.kind) == (6, 8, "yarn")
    amplitude = lambda raw: rope_frequencies(drafter_config(raw, 61).layers[0].mixer.rope, 128)[1]
    assert amplitude(raw) == 1
    assert amplitude(raw | {"rope_scaling": raw["rope_scaling"] | {"attention_factor": 1.4159}}) == 1.4159


def test_taps_default_to_the_rule():
    raw = tiny.drafter_config(num_target_layers=36, num_hidden_layers=5)
    del raw["dflash_config"]["target_layer_ids"]
    assert drafter_config(raw).target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.filterwarnings("ignore:config.json marks sliding layers")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(None, False)] * 2),
        ({"is_causal": True}, [(None, True)] * 2),
        ({"dflash_config": {"causal": True}}, [(None, True)] * 2),
        ({"dflash_config": {"causal_head": True}}, [(None, True)] * 2),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
            [(7, True), (None, False)],
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": False},
            [(7, False)] * 2,
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9}}, [(9, True)] * 2),
        (
            {"dflash_config": {"use_swa": True, "swa_window_size": 9}, "sliding_window_non_causal": True},
            [(9, False)] * 2,
        ),
    ],
)
def test_window_and_causality_of_every_layer(change, expected):
    assert [(layer.mixer.window, layer.mixer.causal) for layer in drafter(**change).layers] == expected


def test_a_window_that_hugging_face_would_drop_is_kept_with_a_warning():
    with pytest.warns(UserWarning, match="keeping window 7"):
        config = drafter(layer_types=["sliding_attention"] * 2, sliding_window=7, use_sliding_window=False)
    assert config.layers[0].mixer.window == 7


def test_slot_conventions():
    assert drafter().proposals(8) == 7
    assert drafter(sample_from_anchor=True).proposals(8) == 8
    plain = {"markov_rank": 0, "markov_head_type": "gated", "enable_confidence_head": False}
    assert drafter(architectures=["Qwen3DSparkModel"], **plain).proposals(7) == 7
    assert drafter(architectures=["Qwen3DSparkModel"], sample_from_anchor=False).proposals(7) == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size"),
        ({"dflash_config": {"selector_rank": 256}}, "conv_kernel_size"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "markov_head_type": "x"}, "markov_head_type"),
        ({"architectures": ["DCOCODraftModel"]}, "DCOCO"),
        ({"treeflash_config": {"ar_approximation": "gru"}}, "swiglu"),
        ({"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators_model_type"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["MiMoDFlash"]}, "MiMo"),
        ({"dflash_config": {"attention_sink_bias": True}}, "MiMo"),
        ({"architectures": ["LagunaDFlash"]}, "Laguna"),
        ({"has_embed_tokens": True}, "Nemotron"),
        ({"draft_vocab_size": 65}, "draft_vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"dflash_config": {"colour": 1}}, "colour"),
        ({"surprise": 3}, "surprise"),
        ({"dflash_config": {"block_size": 9}}, "contradicts"),
        ({"dflash_config": {"mask_token_id": 64}}, "mask_token_id"),
        ({"eos_token_id": tiny.MASK}, "pad or end"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "-1..2"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"block_size": 0}, "block_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"is_neox_style": False}, "interleaved"),
        ({"architectures": "DFlash2DraftModel"}, "list of class names"),
        ({"dflash_config": {"target_layer_ids": 5}}, "-1..2"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, "integers"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor must be a number"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"model_type": {}}, "model_type"),
        ({"dflash_config": {"input_embedding_scale": [1]}}, "input_embedding_scale must be a number"),
        ({"dflash_config": {"output_multiplier": {}}}, "output_multiplier must be a number"),
        ({"dflash_config": {"final_logit_softcapping": "x"}}, "final_logit_softcapping must be a number"),
    ],
)
def test_unsupported_drafters_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        drafter(**change)


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"hidden_size": 48}, "48.*32"),
        ({"vocab_size": 80}, "80.*64"),
        ({"num_target_layers": 6}, "6.*4"),
        ({"num_target_layers": None, "dflash_config": {"target_layer_ids": [1, 3]}}, "3.*2"),
    ],
)
def test_wrong_pairs_are_refused_with_both_numbers(change, numbers):
    with pytest.raises(ValueError, match=numbers):
        drafter(**change).check_pair(target_config(tiny.target_config()))


def test_a_mask_that_ends_the_targets_texts_is_refused():
    with pytest.raises(ValueError, match="one of its end tokens"):
        drafter().check_pair(target_config(tiny.target_config(eos_token_id=tiny.MASK)))
