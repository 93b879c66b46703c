"""Drafters as their trainers write them: each layout loads, with tensors of the published names, or says why not.

Sizes are tiny. Names and values of fields are those of configurations that packages, trainers and reports show.
"""

import json
import re

import pytest

from dflash_jax import checkpoint, load_drafter
from dflash_jax.drafters import drafter_config, kind_of, published
from tests import tiny
from tests.layouts import (
    BLOCK,
    CONFIDENT,
    LILICORR,
    LLAMA,
    MARKOV,
    MIXED,
    SELECTOR,
    SLIDING,
    TAPS,
    YARN,
    H,
    R,
    V,
    backbone,
    biased,
    deepspec,
    dflash,
    eagle,
    inside,
    lilicorr,
    markov,
    modelopt,
    specforge,
    speculators,
    treeflash,
    two,
)
from tests.oracle import seeded

QWEN_NEXT = {"linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
ANGELSLIM = LLAMA | {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "max_window_layers": 36}
ANGELSLIM_30B = {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
MROPE = {"rope_type": "default", "type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
OFFICIAL = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "pretraining_tp": 1, "mlp_bias": False}
EIGHT = {"num_target_layers": 36}  # an EAGLE-3 drafter learns the depth from its target
# Name: config.json, tensors, and what comes of it: kind, tokens that a full block proposes, and tapped layers.
LOADS: dict[str, tuple[dict, dict, tuple]] = {
    "z-lab Qwen3-8B-DFlash-b16": (dflash(), backbone(), ("dflash", 7, TAPS)),
    "z-lab Qwen3.6-27B-DFlash, mixed windows": (
        dflash(**MIXED, **inside(block_size=8), rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        backbone(),
        ("dflash", 7, TAPS),
    ),
    "z-lab gpt-oss-20b-DFlash": (
        dflash(
            model_type="gpt_oss", attention_bias=True, num_local_experts=32, rope_scaling=YARN | {"rope_theta": 1e6}
        ),
        biased(),
        ("dflash", 7, TAPS),
    ),
    "z-lab gemma-4-31B-it-DFlash": (dflash(**MIXED, final_logit_softcapping=30.0), backbone(), ("dflash", 7, TAPS)),
    "z-lab Qwen3.8-27B-DFlash2": (
        dflash(architectures=["DFlash2DraftModel"], **SLIDING, is_causal=False, **inside(**SELECTOR)),
        two(),
        ("dflash2", 7, TAPS),
    ),
    "MiniMax-M3 DFlash 2": (
        dflash(architectures=["MiniMaxDFlash2DraftModel"], use_gemma_norm=False, **inside(**SELECTOR)),
        two(),
        ("dflash2", 7, TAPS),
    ),
    "DFlash 2 beam": (
        dflash(architectures=["DFlash2BeamDraftModel"], **inside(**SELECTOR)),
        two(),
        ("dflash2", 7, TAPS),
    ),
    "Muse-Glimmer-30B assistant": (
        dflash(
            architectures=["MuseGlimmerAssistantModel"], **inside(output_multiplier=0.2, final_logit_softcapping=20)
        ),
        backbone(),
        ("dflash", 7, TAPS),
    ),
    "DeepSpec dspark_qwen3_8b_block7": (deepspec(**MARKOV, **CONFIDENT), markov(own=True), ("dspark", 7, TAPS)),
    "DeepSpec dflash_qwen3_8b_block7": (
        deepspec(markov_rank=0, enable_confidence_head=False),
        backbone(own=True),
        ("dspark", 7, TAPS),
    ),
    "Ling-3.0-flash-dspark": (
        deepspec(architectures=["LingDSparkModel"], num_nextn_predict_layers=1, **MARKOV, **CONFIDENT),
        markov(),
        ("dspark", 7, TAPS),
    ),
    "fields of a Qwen3.5 target, copied": (deepspec(**MARKOV, **QWEN_NEXT), markov(seen=0), ("dspark", 7, TAPS)),
    "SpecForge 0.2.0 qwen3-8b-dspark": (specforge(), markov(), ("dspark", 8, TAPS)),
    "SpecForge qwen3-4b-dspark, early class": (
        specforge(architectures="DFlashDraftModel"),
        markov(),
        ("dspark", 8, TAPS),
    ),
    "SpecForge early names of heads": (
        specforge(),
        markov("logit_head.markov_head.", "logit_head.confidence_head.proj"),
        ("dspark", 8, TAPS),
    ),
    "SpecForge glm-5.2-dspark, fields in dspark_config": (
        BLOCK
        | {"architectures": ["DSparkDraftModel"], "dspark_config": MARKOV | CONFIDENT, "target_hidden_size": None}
        | inside(projector_type="dspark", attention_mode="gqa"),
        markov(),
        ("dspark", 8, TAPS),
    ),
    "SpecForge kimi-k3-dspark": (
        specforge() | {"rope_theta": None, "rope_parameters": YARN},
        markov(),
        ("dspark", 8, TAPS),
    ),
    "SpecForge qwen3-8b-dspark-draftvocab32k": (
        specforge() | {"draft_vocab_size": 40},
        markov(draft=40) | {"d2t": (40,), "t2d": (V,), "lm_head.weight": (40, H)},
        ("dspark", 8, TAPS),
    ),
    "SpecForge confidence head without its flag": (
        specforge(enable_confidence_head=None, confidence_head_with_markov=None),
        markov(seen=H),
        ("dspark", 8, TAPS),
    ),
    "SGLang's prefixed fields": (
        {k: v for k, v in BLOCK.items() if k != "block_size"}
        | {"architectures": ["DSparkDraftModel"], "dspark_block_size": 7, "dspark_markov_rank": R}
        | {"dspark_noise_token_id": tiny.MASK, "dspark_target_layer_ids": TAPS},
        markov(),
        ("dspark", 7, TAPS),
    ),
    "SpecForge qwen3.6-27b-dflash2": (
        dflash(architectures=["DFlash2DraftModel"], **SLIDING, is_causal=False, pad_token_id=0, **inside(**SELECTOR)),
        two(),
        ("dflash2", 7, TAPS),
    ),
    "ModelOpt DSpark": (
        modelopt("dspark", shift_label=True, use_confidence_head=True, **MARKOV),
        markov("", "confidence_proj"),
        ("dspark", 8, TAPS),
    ),
    "ModelOpt DSpark, gated": (
        modelopt("dspark", shift_label=True, use_confidence_head=False, **MARKOV | {"markov_head_type": "gated"}),
        markov("", seen=0, gate=True),
        ("dspark", 8, TAPS),
    ),
    "ModelOpt DFlash, windows": (
        modelopt(None, use_swa=True, swa_window_size=2048, causal=True),
        backbone(),
        ("dflash", 7, TAPS),
    ),
    "ModelOpt DFlash 2": (
        modelopt("dflash2", block_size=8, **SELECTOR) | {"architectures": ["DFlash2DraftModel"], "is_causal": False},
        two(),
        ("dflash2", 7, TAPS),
    ),
    "AngelSlim DFlash": (
        dflash(architectures=["QwenDFlashDraftModel"], attention_backend="flex_attention", num_anchors=512),
        backbone(),
        ("dflash", 7, TAPS),
    ),
    "AngelSlim Qwen3-8B_eagle3": (ANGELSLIM, eagle(), ("eagle3", 7, (1, 17, 32))),
    "AngelSlim qwen3-30b-a3b-eagle3": (ANGELSLIM | ANGELSLIM_30B, eagle(), ("eagle3", 7, (1, 17, 32))),
    "AngelSlim qwen3-vl-4b-eagle3-mrope": (
        ANGELSLIM | {"rope_scaling": MROPE, "modal_type": "VLM", "image_token_id": 5, "vision_start_token_id": 6},
        eagle(),
        ("eagle3", 7, (1, 17, 32)),
    ),
    "SafeAILab EAGLE3-LLaMA3.1-Instruct-8B": (OFFICIAL, eagle(own=False), ("eagle3", 7, (1, 17, 32))),
    "SpecForge EAGLE-3 for Qwen3-Next": (
        OFFICIAL | {"decoder_sparse_step": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}},
        eagle(),
        ("eagle3", 7, (1, 17, 32)),
    ),
    "SpecForge qwen3-30B-A3B-eagle3.1": (
        OFFICIAL | {"fc_norm": True, "norm_output": True},
        eagle(norms=[f"fc_norm.{i}.weight" for i in range(3)]),
        ("eagle3", 7, (1, 17, 32)),
    ),
    "SGLang's older names of EAGLE-3.1": (
        OFFICIAL | {"use_aux_norm": True, "num_aux_hidden_states": 3},
        eagle(norms=[f"aux_norm_{name}.weight" for name in ("low", "mid", "high")]),
        ("eagle3", 7, (1, 17, 32)),
    ),
    "speculators 0.3.0 eagle3": (
        speculators("eagle3", "0.3.0", norm_before_residual=True, architectures=["Eagle3Speculator"]),
        eagle("layers.0", qk=True),
        ("eagle3", 7, (1, 17, 32)),
    ),
    "speculators 0.5.0 dflash": (
        speculators("dflash", "0.5.0", max_anchors=256, architectures=["DFlashSpeculator"]),
        backbone(3, draft=40),
        ("dflash", 7, (1, 17, 32)),
    ),
    "speculators 0.9.0 dspark": (
        speculators("dspark", "0.9.0", sample_from_anchor=True, **MARKOV, **CONFIDENT),
        markov(taps=3, draft=40) | {"d2t": (40,), "t2d": (V,), "lm_head.weight": (40, H)},
        ("dspark", 8, (1, 17, 32)),
    ),
    "speculators 0.9.0 dspark of masks": (
        speculators("dspark", "0.9.0", sample_from_anchor=False, draft_vocab_size=V, **MARKOV, **CONFIDENT),
        markov(taps=3),
        ("dspark", 7, (1, 17, 32)),
    ),
    "TreeFlash": (
        dflash(architectures=["TreeFlashDraftModel"], treeflash_config={"ar_approximation": "swiglu"}),
        treeflash(),
        ("treeflash", 7, TAPS),
    ),
    "ModelOpt LiLiCorr": (
        dflash(
            architectures=["LiLiCorrDraftModel"], **inside(projector_type="lilicorr", lilicorr_enabled=True, **LILICORR)
        ),
        lilicorr(older=True),
        ("lilicorr", 7, TAPS),
    ),
    "LiLiCorr with convolutions, as wide as its layers": (
        dflash(
            architectures=["LiLiCorrDraftModel"],
            **inside(**LILICORR | {"lilicorr_hidden_size": 0}, conv_kernel_size=2, conv_group_size=8),
        ),
        lilicorr(width=H, convolved=True),
        ("lilicorr", 7, TAPS),
    ),
    "LiLiCorr of larger blocks": (dflash(**inside(**LILICORR)), lilicorr(slots=15), ("lilicorr", 7, TAPS)),
    "in text_config": (
        {"architectures": ["DFlashDraftModel"], "model_type": "qwen3_5", "text_config": BLOCK} | inside(),
        backbone(),
        ("dflash", 7, TAPS),
    ),
    "a rotary width that is a head's": (
        dflash(rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_dim": 16, "partial_rotary_factor": 0.25}),
        backbone(),
        ("dflash", 7, TAPS),
    ),
}
QUARTER = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}
REFUSED: dict[str, tuple[dict, str]] = {
    "SpecForge qwen3-8b-domino": (
        dflash(**inside(projector_type="domino", shift_label=True), emb_dim=256),
        "a Domino head",
    ),
    "Domino class": (dflash(architectures=["DominoDraftModel"]), "class DominoDraftModel (a Domino head)"),
    "LiLiCorr without a field": (
        dflash(**inside(**LILICORR | {"lilicorr_logit_scale": None})),
        "must have a positive lilicorr_logit_scale, got None",
    ),
    "LiLiCorr without its fields": (
        dflash(architectures=["LiLiCorrDraftModel"], **inside(projector_type="lilicorr")),
        "must have a positive int 'lilicorr_candidate_topk'",
    ),
    "LiLiCorr that is off": (
        dflash(**inside(**LILICORR, lilicorr_enabled=False)),
        "take all fields that begin with lilicorr_ out of config.json and name DFlashDraftModel",
    ),
    "LiLiCorr without a width": (
        dflash(**inside(**LILICORR | {"lilicorr_hidden_size": None})),
        "must have a positive int 'lilicorr_hidden_size', got None",
    ),
    "LiLiCorr of no slots": (dflash(**inside(**LILICORR), block_size=1), "must be at least 2, got 1"),
    "LiLiCorr with half of the convolutions": (dflash(**inside(**LILICORR, conv_kernel_size=2)), "conv_group_size"),
    "LiLiCorr whose anchor predicts": (dflash(**inside(**LILICORR), sample_from_anchor=True), "must be false"),
    "LiLiCorr with more candidates than tokens": (
        dflash(**inside(**LILICORR), draft_vocab_size=3),
        "lilicorr_candidate_topk must be at most the vocabulary's 3, got 4",
    ),
    "LiLiCorr with odd heads": (
        dflash(**inside(**LILICORR | {"lilicorr_num_heads": 5})),
        "lilicorr_num_heads must divide lilicorr_hidden_size, got 5 and 12",
    ),
    "AngelSlim DFlare": (dflash(architectures=["QwenDFlareDraftModel"]), "DFlare's mixtures of tapped layers"),
    "xPress": (dflash(architectures=["XPressDraftModel"]), "a refiner of the whole block"),
    "speculators 0.9.0 xpress": (speculators("xpress", "0.9.0"), "got 'xpress' (a refiner of the whole block)"),
    "SpecForge qwen3-8b-peagle": (OFFICIAL | {"architectures": ["PEagleDraftModel"]}, "parallel passes of EAGLE"),
    "speculators 0.9.0 peagle": (speculators("peagle", "0.9.0"), "got 'peagle' (parallel passes of EAGLE)"),
    "Laguna": (dflash(architectures=["DFlashLagunaForCausalLM"]), "Laguna's gates and norms of features"),
    "MiMo": (
        dflash(**inside(attention_sink_bias=True, attention_value_scale=0.5)),
        "MiMo's sinks (attention_sink_bias)",
    ),
    "Nemotron-3.5": (dflash(has_embed_tokens=True, sample_from_anchor=False), "Nemotron's own embedding"),
    "MiniMax-M3 DSpark": (deepspec(architectures=["DSparkMiniMaxDraftModel"]), "the attention and norms of MiniMax-M3"),
    "norms of Gemma's form": (dflash(use_gemma_norm=True), "norms that scale by one plus their weight"),
    "Gemma 4 DSpark": (deepspec(architectures=["Gemma4DSparkModel"]), "Gemma layers"),
    "LFM2.5 DSpark": (deepspec(architectures=["Lfm2DSparkDraftModel"]), "interleaved rotary embedding"),
    "Kimi EAGLE-3": (OFFICIAL | {"model_type": "kimi_k2"}, "must be that of llama or qwen3, got 'kimi_k2'"),
    "SpecForge longcat-flash-dflash": (dflash(eos_token_id=tiny.MASK), "must not be the end token"),
    "speculators dspark that names no slots": (
        speculators("dspark", "0.7.0.dev64", **MARKOV, **CONFIDENT),
        """'{"sample_from_anchor": false}' (only masks predict) or '{"sample_from_anchor": true}' (the anchor""",
    ),
    "the same in z-lab's layout": (
        deepspec(speculators_version="0.7.0.dev64", **MARKOV),
        "must give sample_from_anchor",
    ),
    "labels that are not shifted": (modelopt("dspark", shift_label=False, **MARKOV), "does not say whether"),
    "shifted labels without DSpark": (modelopt(None, shift_label=True), "does not say whether"),
    "another spelling of the slots": (deepspec(query_zero_predicts_next=True), "query_zero_predicts_next = True"),
    "an unknown projector": (modelopt("gru"), "projector_type must be dflash for a drafter of this kind, got 'gru'"),
    "latent attention": (specforge(attention_mode="mla"), "attention_mode = 'mla' is not supported, expected 'gqa' or"),
    "layers without experts": (ANGELSLIM | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
    "a part of a head in rope_parameters": (
        dflash(rope_theta=None, rope_parameters=QUARTER),
        "partial_rotary_factor = 0.25 is read in two ways. transformers' Qwen3 and Llama",
    ),
    "a part of a head": (deepspec(**MARKOV, partial_rotary_factor=0.25), "SGLang 0.5.23 and vLLM rotate that part"),
    "another rotary width": (dflash(rope_scaling={"rope_dim": 8}), "rope_dim = 8 is read in two ways"),
    "no taps": (
        dflash(dflash_config={"mask_token_id": tiny.MASK}),
        """wrong for 14 of 20 published drafters (z-lab/dflash#156). If this one follows the formula, pass \
--drafter-config '{"target_layer_ids": [1, 33]}'""",
    ),
    "taps twice": (dflash(**inside(target_layer_ids=[1, 9, 9])), "must ascend, each layer once, got [1, 9, 9]"),
    "a number of taps that is another": (OFFICIAL | {"num_aux_hidden_states": 5} | EIGHT, "num_aux_hidden_states is 5"),
    "two sets of Markov fields": (
        specforge() | {"dspark_config": {"markov_rank": 8}},
        "contradicts itself: markov_rank is 6 and 8",
    ),
    "a wrapper with pictures": (
        {"architectures": ["DFlashDraftModel"], "text_config": BLOCK, "vision_config": {"depth": 2}} | inside(),
        """a drafter has no such parts; if these are its target's, pass --drafter-config '{"vision_config": null}'""",
    ),
    "a wrapper that contradicts": (
        {"text_config": BLOCK | {"rope_theta": 1e4}, "rope_theta": 1e6} | inside(),
        "outside and inside text_config: rope_theta = 1000000.0 and 10000.0",
    ),
    "a mask token as text": (
        dflash(dflash_config={"mask_token": "<|MASK|>", "target_layer_ids": TAPS}),
        """'<|MASK|>', and which token that is only its target's tokenizer says""",
    ),
}


@pytest.mark.filterwarnings("ignore:config.json marks sliding layers")
@pytest.mark.parametrize("name", LOADS)
def test_published_drafters_load(name, tmp_path):
    raw, shapes, (kind, proposals, taps) = LOADS[name]
    assert kind_of(raw) == kind
    tiny.write(tmp_path / "drafter", raw, seeded.tensors(shapes, 1))
    drafter = load_drafter(tmp_path / "drafter", num_target_layers=36)
    assert (drafter.depth(drafter.config.block_size), list(drafter.taps)) == (proposals, list(taps))
    confident = next((shape[1] for tensor, shape in shapes.items() if re.search(r"confidence.*weight", tensor)), 0)
    if kind == "dspark":
        informed = drafter.config.confidence_head_with_markov * drafter.config.markov_rank
        assert drafter.config.enable_confidence_head * (H + informed) == confident


def test_a_head_scores_no_more_slots_than_it_was_trained_with(tmp_path):
    """The tensors tell how many these are."""
    raw = dflash(**inside(**LILICORR))
    tiny.write(tmp_path / "drafter", raw, seeded.tensors(lilicorr(slots=3), 1))
    with pytest.raises(ValueError, match="block_size of this drafter must be at most 4, with which its head"):
        load_drafter(tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter", overrides={"block_size": 4}).depth(4) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name):
    raw, reason = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        drafter_config(raw)
    for override in re.findall(r"--drafter-config '(\{[^']*\})'", str(raised.value)):
        if "N}" not in override:
            drafter_config({**raw, **json.loads(override)})


def test_a_mask_token_as_text_is_looked_up_in_the_targets_tokenizer(tmp_path):
    target = tiny.write_tokenizer(tmp_path / "target")
    named = dflash(dflash_config={"mask_token": "<mask>", "target_layer_ids": TAPS})
    tiny.write(tmp_path / "drafter", named, seeded.tensors(backbone(), 1))
    assert load_drafter(tmp_path / "drafter", target=target).config.mask_token_id == tiny.MASK
    both = dflash(**inside(mask_token="<mask>"))
    assert drafter_config(both, 36, target) == drafter_config(both, 36) == drafter_config(dflash())
    with pytest.raises(ValueError, match="mask_token_id is 5, and mask_token '<mask>' is the target's token 63"):
        drafter_config(dflash(**inside(mask_token="<mask>", mask_token_id=5)), 36, target)
    with pytest.raises(ValueError, match='"mask_token_id": 64'):
        drafter_config(dflash(dflash_config={"mask_token": "<|MASK|>", "target_layer_ids": TAPS}), 36, target)


def test_taps_are_not_guessed():
    """The error says what the formula gives, and how to say that it is meant."""
    raw = dflash(dflash_config={"mask_token_id": tiny.MASK}, num_hidden_layers=5, layer_types=None)
    with pytest.raises(
        ValueError, match=r"--drafter-config '\{\"target_layer_ids\": \[1, 9, 17, 25, 33\]\}'"
    ) as raised:
        drafter_config(raw)
    override = json.loads(str(raised.value).split("--drafter-config '")[1].split("'")[0])
    assert drafter_config(raw | override).target_layer_ids == (1, 9, 17, 25, 33)
    with pytest.raises(ValueError, match="depth, which is not known here"):
        drafter_config(raw | {"num_target_layers": None})
    assert drafter_config(published.completed(raw, "z-lab/Qwen3-8B-DFlash-b16")) == drafter_config(raw | override)
    for taps in ([1, 1], [9, 1], [1, 9, 9, 17]):
        with pytest.raises(ValueError, match="must ascend, each layer once, got"):
            drafter_config(raw | {"target_layer_ids": taps})


def test_a_published_drafter_is_known_by_its_hub_id(tmp_path, monkeypatch):
    raw = dflash(dflash_config={"mask_token_id": tiny.MASK})
    place = tiny.write(tmp_path / "drafter", raw, seeded.tensors(backbone(), 1))
    with pytest.raises(ValueError, match="must give target_layer_ids"):
        load_drafter(place)
    monkeypatch.setattr(checkpoint, "resolve", lambda source, what: place)
    assert load_drafter("z-lab/Qwen3-8B-DFlash-b16").taps == (1, 9, 17, 25, 33)
    with pytest.raises(ValueError, match="must give target_layer_ids"):
        load_drafter("somebody/copy")
