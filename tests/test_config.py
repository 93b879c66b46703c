"""What a `config.json` means, and what is refused."""

import json

import pytest

from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.config_json import check_fields
from dflash_jax.drafters import drafter_config, kind_of
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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


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
        ({"hidden_size": 10**9}, "hidden_size must be at most 262144"),
        ({"vocab_size": 3 * 10**8}, "vocab_size must be at most 16777216"),
        ({"intermediate_size": 10**9}, "intermediate_size must be at most 1048576"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts": 10**9}, "num_experts must be at most 65536"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 10**9}, "num_experts_per_tok must be at most"),
        ({"model_type": "qwen3_moe", **EXPERTS, "moe_intermediate_size": 10**9}, "moe_intermediate_size must be at"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps must be at least"),
        ({"rope_theta": 1e100}, "rope_theta must be at most"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, "factor must be at least 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor must be positive and below"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor must be positive and below"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": -1}}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 1}}, "beta_slow must be positive and below beta_fast"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "positive attention_factor"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta above 1"),
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


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 1.0}])
def test_large_models_are_read(scaling):
    large = {"hidden_size": 65536, "intermediate_size": 262144, "vocab_size": 2**21, "num_hidden_layers": 512}
    heads = {"num_attention_heads": 512, "num_key_value_heads": 64, "head_dim": 512}
    config = target_config(tiny.target_config(**large, **heads, rope_scaling=scaling, rope_theta=3.6e9))
    assert (config.hidden_size, config.vocab_size) == (65536, 2**21)


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        ({}, 1024),
        ({"max_position_embeddings": None}, 0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": YARN | {"factor": 4.0}}, 2048),
        ({"rope_scaling": LLAMA3}, 1024),
    ],
)
def test_positions_of_a_target(change, positions):
    assert target_config(tiny.target_config(**change)).most_positions == positions


_WRONG = ("7", [], [1], {"a": 1}, True, -1, 0, 1.5, float("inf"), float("nan"), 10**30)
_ROPE = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
_EXTRA = """
    rope_parameters rope_scaling quantization_config layer_types sliding_window max_window_layers eos_token_id
    partial_rotary_factor rotary_dim decoder_sparse_step mlp_only_layers swiglu_limit ttt_length target_hidden_size
    speculators_model_type transformer_layer_config eagle_config treeflash_config proposal_sharpness is_causal use_swa
    swa_window_size sample_from_anchor input_embedding_scale aux_hidden_state_layer_ids fc_norm markov_rank
    draft_vocab_size confidence_head_with_markov
""".split()


@pytest.mark.filterwarnings("ignore:config.json marks sliding layers")
@pytest.mark.parametrize("name", [*tiny.FAMILIES, *tiny.kinds()])
def test_values_of_wrong_types_are_read_or_refused(name):
    """In every field, also those of objects inside; nothing but ValueError is raised."""
    drafting = name not in tiny.FAMILIES
    read = drafter_config if drafting else target_config
    raw = tiny.kinds()[name] if drafting else tiny.target_config(model_type=name, **tiny.FAMILIES[name])
    nested = {key: value for key, value in raw.items() if isinstance(value, dict)} | {"rope_parameters": _ROPE}
    changed = [{field: value} for field in {*raw, *_EXTRA} for value in _WRONG]
    changed += [{at: {**own, field: value}} for at, own in nested.items() for field in own for value in _WRONG]
    refused, without_theta = 0, {key: value for key, value in raw.items() if key != "rope_theta"}
    for change in changed:
        try:
            hash(read({**(without_theta if "rope_parameters" in change else raw), **change}))
        except ValueError:
            refused += 1
    assert refused > len(changed) / 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "minimax_m2", "rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"model_type": "minimax_m2", "partial_rotary_factor": "x"}, "partial_rotary_factor"),
        ({"model_type": "minimax_m2", "partial_rotary_factor": float("inf")}, "partial_rotary_factor"),
        ({"model_type": "gpt_oss", "quantization_config": "mxfp4"}, "quantization_config must be an object"),
        ({"rope_parameters": {"rope_theta": float("nan")}, "rope_theta": None}, "positive float 'rope_theta'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "truncate": 2}, "rope_theta": None}, "truncate"),
    ],
)
def test_targets_with_wrong_types_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        target_config(tiny.target_config(**tiny.FAMILIES.get(change.get("model_type"), {}) | change))


def test_rope_parameters_win_over_the_config_itself():
    """As in transformers, which writes its default of `partial_rotary_factor` beside them."""
    both = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5}
    raw = tiny.target_config(model_type="qwen3_next", **tiny.FAMILIES["qwen3_next"])
    config = target_config({key: value for key, value in raw.items() if key != "rope_theta"} | both)
    rotated = {layer.attention.rope.rotated for layer in config.layers if hasattr(layer.mixer, "rope")}
    assert rotated == {raw["head_dim"]}


def test_a_drafter_is_no_target():
    with pytest.raises(ValueError, match="has dflash_config, so it is a drafter; name the model it was made for"):
        target_config(tiny.drafter_config())


NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama", **NF4}, "asks for the quantization 'bitsandbytes'; load the checkpoint that is not"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fbgemm_fp8"}}, "'fbgemm_fp8'"),
        (NF4, "asks for the quantization 'bitsandbytes'"),
        ({"model_type": "gpt_oss", **tiny.FAMILIES["gpt_oss"], **NF4}, "asks for the quantization 'bitsandbytes'"),
        ({"vision_config": {"depth": 2}}, "needs vision parts"),
        ({"n_group": 4, "topk_group": 2}, "limited to groups of experts.*n_group = 4"),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"index_topk": 2048}, "an indexer"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "the activation 'gelu_pytorch_tanh'"),
        ({"model_type": "glm_moe_dsa"}, "GLM-5's indexer"),
        ({"model_type": "muse_glimmer"}, "Muse's"),
    ],
)
def test_what_is_not_built_is_named(change, named):
    """The message does not advise to remove what the model needs."""
    with pytest.raises(ValueError, match=named) as raised:
        target_config(tiny.target_config(**change))
    assert "remove them" not in str(raised.value)


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
    for read, config in ((target_config, tiny.target_config), (drafter_config, tiny.drafter_config)):
        with pytest.raises(ValueError, match=f"{name} = .*on or off"):
            read(config(**{name: off}))


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


def test_auxiliary_ids_of_eagle3_are_layers_in_its_own_place_and_inputs_outside():
    """SpecForge and ModelOpt write layers into `eagle_config`; `speculators` counts the embedding, too."""
    name, raw = "eagle_aux_hidden_state_layer_ids", tiny.kinds()["eagle3"] | {"num_target_layers": 62}
    del raw["target_layer_ids"]
    read = lambda **change: drafter_config(raw | change).target_layer_ids
    assert read() == read(eagle_config={name: []}) == (1, 30, 58)
    assert read(eagle_config={name: [1, 30, 58], "use_aux_hidden_state": True}) == (1, 30, 58)
    assert read(**{name: [2, 31, 59]}) == (1, 30, 58)
    for outside in ([2, 31, 59], [1, 30, 58]):
        assert read(eagle_config={name: [1, 30, 58]}, **{name: outside}) == (1, 30, 58)
    with pytest.raises(ValueError, match="contradicts itself"):
        read(eagle_config={name: [1, 30, 58]}, **{name: [3, 4, 5]})


def test_what_modelopt_writes_of_eagle3():
    exported = {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    raw = tiny.kinds()["eagle3"]
    assert drafter_config(raw | {"eagle_config": exported}) == drafter_config(raw)
    with pytest.raises(ValueError, match="use_mtp_layernorm.*not supported"):
        drafter_config(raw | {"eagle_config": exported | {"use_mtp_layernorm": True}})


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
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, [(7, True)] * 2),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, [(None, False), (7, True)]),
        ({"use_sliding_window": True, "sliding_window": 7}, [(None, False)] * 2),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [(None, False)] * 2),
        ({"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}, [(None, False)] * 2),
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


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size"),
        ({"dflash_config": {"selector_rank": 256}}, "conv_kernel_size"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "markov_head_type": "x"}, "markov_head_type"),
        ({"architectures": ["DCOCODraftModel"]}, "DCOCO"),
        ({"architectures": ["XPressDraftModel"]}, "XPressDraftModel.*refiner"),
        ({"architectures": ["DFlyDraftModel"]}, "DFlyDraftModel"),
        ({"architectures": ["DominoDFlashDraftModel"]}, "Domino head"),
        ({"architectures": ["SomeDraftModel"], "markov_rank": 6}, "SomeDraftModel.*kinds here are dflash, dflash2"),
        ({"architectures": ["DFlashDraftModel", "SomeDraftModel"]}, "SomeDraftModel"),
        ({"treeflash_config": {"ar_approximation": "gru"}}, "swiglu"),
        ({"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators_model_type"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["MiMoDFlash"]}, "MiMo"),
        ({"dflash_config": {"attention_sink_bias": True}}, "MiMo"),
        ({"architectures": ["LagunaDFlash"]}, "Laguna"),
        ({"has_embed_tokens": True}, "Nemotron"),
        ({"draft_vocab_size": 65}, "draft_vocab_size"),
        ({"quantization_config": {"bits": 4}}, "an unknown quantization"),
        ({"dflash_config": {"colour": 1}}, "colour"),
        ({"surprise": 3}, "surprise"),
        ({"dflash_config": {"block_size": 9}}, "contradicts"),
        ({"dflash_config": {"mask_token_id": 64}}, "mask_token_id"),
        ({"eos_token_id": tiny.MASK}, "must not be the end token"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "-1..2"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 10**9}, "block_size must be at most 1024"),
        ({"hidden_size": 10**9}, "hidden_size must be at most"),
        ({"vocab_size": 10**9}, "vocab_size must be at most"),
        ({"intermediate_size": 10**9}, "intermediate_size must be at most"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 10**9}, "markov_rank must be at most 65536"),
        ({"architectures": ["DFlash2DraftModel"], **SELECTOR, "selector_rank": 10**9}, "selector_rank must be at most"),
        ({"architectures": ["DFlash2DraftModel"], **SELECTOR, "conv_kernel_size": 10**9}, "conv_kernel_size must be"),
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
        ({"target_hidden_size": "64"}, "positive int 'target_hidden_size'"),
        ({"dflash_config": {"mask_token_id": True}}, "mask_token_id"),
        ({"speculators_model_type": []}, "speculators_model_type must be one of"),
        ({"sample_from_anchor": "no"}, "sample_from_anchor must be true or false"),
        ({"dflash_config": {"is_causal": 1}}, "is_causal must be true or false"),
        ({"architectures": ["TreeFlashDraftModel"], "treeflash_config": "swiglu"}, "must be an object"),
    ],
)
def test_unsupported_drafters_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        drafter(**change)


@pytest.mark.parametrize(("length", "named"), [(10**9, "ttt_length must be at most 1024"), ("7", "'ttt_length'")])
def test_a_wrong_number_of_passes_is_refused(length, named):
    with pytest.raises(ValueError, match=named):
        drafter_config(tiny.kinds()["eagle3"] | {"ttt_length": length})


@pytest.mark.parametrize(
    ("classes", "kind"),
    [
        (None, "dflash"),
        ([], "dflash"),
        (["DFlashDraftModel"], "dflash"),
        (["DFlash2DraftModel"], "dflash2"),
        (["Qwen3DSparkModel"], "dspark"),
        (["DSparkDraftModel"], "dspark"),
        (["TreeFlashDraftModel"], "treeflash"),
        (["LiLiCorrDraftModel"], "lilicorr"),
        (["LlamaForCausalLMEagle3"], "eagle3"),
        (["Eagle3LlamaForCausalLM"], "eagle3"),
        (["Qwen3Eagle3Model"], "eagle3"),
    ],
)
def test_published_classes(classes, kind):
    assert kind_of(tiny.drafter_config(architectures=classes)) == kind


def test_fields_of_a_kind_tell_it_where_no_class_is_named():
    for field, kind in (("markov_rank", "dspark"), ("selector_rank", "dflash2"), ("lilicorr_num_heads", "lilicorr")):
        assert kind_of(tiny.drafter_config(architectures=None, **{field: 6})) == kind


def test_an_eagle_drafter_needs_a_number_of_passes():
    for given in ("7", 0, [7]):
        with pytest.raises(ValueError, match="positive int 'ttt_length'"):
            drafter_config(tiny.kinds()["eagle3"] | {"ttt_length": given})


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
    drafter().check_pair(target_config(tiny.target_config(pad_token_id=tiny.MASK)))  # as docs/serving.md says
