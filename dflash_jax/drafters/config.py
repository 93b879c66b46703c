"""The configuration of a drafter: every published spelling of a DFlash v1 `config.json`.

Where a field may stand, and what it means, is method sections 2.7, 3 and 7.1.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_jax.config import (
    DECODER_FIELDS,
    WINDOW_FIELDS,
    DecoderConfig,
    LayerConfig,
    Raw,
    TargetConfig,
    attention_config,
    check_fields,
    decoder_fields,
    layer_types,
    require,
    token_ids,
)


@dataclass(frozen=True)
class DrafterConfig(DecoderConfig):
    """A DFlash (v1) drafter.

    Attributes:
        attention_bias: whether the projections of attention have a bias.
        block_size: slots of the draft pass, one anchor and `block_size - 1` masks.
        mask_token_id: token of the masked slots.
        target_layer_ids: tapped target layers, 0-based; tap i is the output of layer i, tap -1 the embedding.
        num_target_layers: depth of the target it was trained for; None if the config does not say.
        target_hidden_size: width of one tapped feature.
        anchor_predicts: slot 0 predicts as well, so slot k predicts position a+k+1 instead of a+k.
        input_embedding_scale, output_multiplier, final_logit_softcapping: scalings; softcap 0 is none.
        own_embedding, own_head: whether the checkpoint carries its own instead of the target's.
    """

    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    anchor_predicts: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    own_embedding: bool = False
    own_head: bool = False

    def proposals(self, block_size: int) -> int:
        """Tokens proposed by a draft pass of `block_size` slots; the verify pass is one wider."""
        return block_size if self.anchor_predicts else block_size - 1

    def check_pair(self, target: TargetConfig) -> None:
        """Raises ValueError if this drafter was not made for `target`."""
        pairs = [
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary size", self.vocab_size, target.vocab_size),
            (
                "number of target layers",
                self.num_target_layers or target.num_hidden_layers,
                target.num_hidden_layers,
            ),
        ]
        wrong = [f"{name} {ours} (target: {theirs})" for name, ours, theirs in pairs if ours != theirs]
        if not (self.own_embedding and self.own_head) and self.hidden_size != target.hidden_size:
            wrong.append(f"draft hidden size {self.hidden_size} (target embedding: {target.hidden_size})")
        if self.mask_token_id in target.eos_token_ids:
            wrong.append(f"a mask token {self.mask_token_id} that ends no text (target: one of its end tokens)")
        if max(self.target_layer_ids) > target.num_hidden_layers - 2:
            wrong.append(
                f"a target layer {max(self.target_layer_ids)} (target: last usable {target.num_hidden_layers - 2})"
            )
        if wrong:
            raise ValueError(
                f"this drafter was made for another target: it expects {'; '.join(wrong)}. "
                "Load the drafter published for this target."
            )


_REFUSED_FIELDS = {
    "conv_kernel_size": "DFlash 2",
    "conv_group_size": "DFlash 2",
    "selector_rank": "DFlash 2",
    "selector_top_k": "DFlash 2",
    "markov_rank": "a DSpark head",
    "enable_confidence_head": "a DSpark head",
    "projector_type": "a Domino head",
    "shift_label": "a Domino head",
    "attention_sink_bias": "MiMo",
    "add_swa_attention_sink_bias": "MiMo",
    "attention_value_scale": "MiMo",
    "has_embed_tokens": "Nemotron",
    "has_lm_head": "Nemotron",
    "speculators_model_type": "the speculators format",
    "transformer_layer_config": "the speculators format",
    "gating": "Laguna",
    "quantization_config": "quantised weights",
}
_REFUSED_CLASSES = {
    "DFlash2": "DFlash 2",
    "Domino": "a Domino head",
    "MiMo": "MiMo",
    "Laguna": "Laguna",
    "Nemotron": "Nemotron",
    "Gemma": "Gemma layers",
    "Speculator": "the speculators format",
}
_DFLASH_FIELDS = """
    block_size mask_token_id target_layer_ids num_target_layers causal is_causal swa_window_size use_swa
    sample_from_anchor input_embedding_scale output_multiplier logit_scale final_logit_softcapping
    sliding_window_non_causal aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids
    target_hidden_size draft_vocab_size causal_head markov_head_type confidence_head_with_markov
""".split()


# Drafters of gpt-oss carry their target's type and its experts' fields; their layers are Qwen3's all the same.
_TYPES = (None, "qwen3", "dflash", "gpt_oss")
_GPT_OSS_FIELDS = """
    num_local_experts num_experts_per_tok experts_per_token router_aux_loss_coef output_router_logits swiglu_limit
    swiglu_alpha initial_context_length
""".split()


class _Lookup:
    """Finds a drafter field in `dflash_config` or at the top level; a conflict between them raises."""

    def __init__(self, raw: Raw):
        self.nested, self.raw = raw.get("dflash_config") or {}, raw
        if not isinstance(self.nested, Mapping):
            raise ValueError(f"dflash_config must be an object, got {self.nested!r}")

    def __call__(self, *names: str, default: Any = None) -> Any:
        found = {
            f"{place}{name}": source[name]
            for name in names
            for place, source in (("dflash_config.", self.nested), ("", self.raw))
            if source.get(name) is not None
        }
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"config.json contradicts itself: {found}")
        return values[0] if values else default


def drafter_config(raw: Raw) -> DrafterConfig:
    """Reads a drafter's `config.json`: every z-lab form of a DFlash v1 checkpoint (old and new places).

    Raises ValueError for other drafters (by name), unknown `dflash_config` fields and contradictions.
    """
    get = _Lookup(raw)
    _refuse_other_drafters(raw, get)
    if unknown := set(get.nested) - set(_DFLASH_FIELDS) - set(_REFUSED_FIELDS):
        raise ValueError(f"dflash_config has unknown fields {sorted(unknown)}; they are not ignored")
    experts = _GPT_OSS_FIELDS if raw.get("model_type") == "gpt_oss" else []
    check_fields(
        raw,
        [*DECODER_FIELDS, *WINDOW_FIELDS, *_DFLASH_FIELDS, *_REFUSED_FIELDS, "dflash_config", *experts],
        {"hidden_act": "silu", "mlp_bias": False},
    )
    fields = decoder_fields(raw)
    depth = require(raw, "num_hidden_layers")
    num_target_layers = get("num_target_layers")
    if num_target_layers is not None:
        require({"num_target_layers": num_target_layers}, "num_target_layers")
    mask = get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < fields["vocab_size"]:
        raise ValueError(f"mask_token_id must be a token below vocab_size {fields['vocab_size']}, got {mask!r}")
    if mask in token_ids(raw.get("eos_token_id")) + token_ids(raw.get("pad_token_id")):
        raise ValueError(f"mask_token_id {mask} must not be the pad or end token")
    return DrafterConfig(
        **fields,
        layers=_drafter_layers(raw, get, depth),
        attention_bias=bool(raw.get("attention_bias")),
        block_size=require({"block_size": get("block_size", default=16)}, "block_size"),
        mask_token_id=mask,
        target_layer_ids=_taps(get, num_target_layers, depth),
        num_target_layers=num_target_layers,
        target_hidden_size=get("target_hidden_size", default=fields["hidden_size"]),
        anchor_predicts=_anchor_predicts(raw, get),
        input_embedding_scale=_number(get, "input_embedding_scale", default=1.0),
        output_multiplier=_number(get, "output_multiplier", "logit_scale", default=1.0),
        final_logit_softcapping=max(0.0, _number(get, "final_logit_softcapping", default=0.0)),
    )


def _number(get: _Lookup, *names: str, default: float) -> float:
    value = get(*names, default=default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ValueError(f"{names[0]} must be a number, got {value!r:.80}")
    return float(value)


def _classes(raw: Raw) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of class names, got {names!r:.80}")
    return " ".join(names)


def _refuse_other_drafters(raw: Raw, get: _Lookup) -> None:
    classes = _classes(raw)
    reasons = [what for name, what in _REFUSED_CLASSES.items() if name in classes]
    reasons += [f"{what} ({name})" for name, what in _REFUSED_FIELDS.items() if get(name)]
    draft_vocab = get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != raw.get("vocab_size"):
        reasons.append(f"a reduced vocabulary (draft_vocab_size {draft_vocab} of {raw.get('vocab_size')})")
    if reasons:
        raise ValueError(
            f"this drafter ({classes or 'no architectures'}) needs {', '.join(dict.fromkeys(reasons))}, which is not "
            "supported yet; expected a DFlash v1 drafter (DFlashDraftModel)"
        )
    if raw.get("model_type") not in _TYPES:
        raise ValueError(f"drafter model_type must be one of {_TYPES[1:]}, got {raw['model_type']!r}")


def _anchor_predicts(raw: Raw, get: _Lookup) -> bool:
    """Method, section 3: the explicit flag, else DSpark classes predict from the anchor, else masks do."""
    flag = get("sample_from_anchor")
    return bool(flag) if flag is not None else "DSpark" in _classes(raw)


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tap rule of the reference `build_target_layer_ids`: evenly from 1 to N-3, halves rounded to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + j * span / (num_draft_layers - 1)) for j in range(num_draft_layers))


def _taps(get: _Lookup, num_target_layers: int | None, depth: int) -> tuple[int, ...]:
    taps = get("target_layer_ids")
    taps = None if taps is None else list(token_ids(taps))
    auxiliary = get("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
    if auxiliary is not None:  # these count the embedding as 0, so they are one higher
        shifted = [i - 1 for i in token_ids(auxiliary)]
        if taps is not None and taps != shifted:
            raise ValueError(f"target_layer_ids {taps} and auxiliary layer ids {auxiliary} disagree")
        taps = shifted
    if taps is None:
        if num_target_layers is None:
            raise ValueError("config.json must give target_layer_ids or num_target_layers, found neither")
        taps = default_target_layer_ids(num_target_layers, depth)
    # The last layer's output is published after the final norm, unlike all others.
    last = max(taps, default=0) if num_target_layers is None else num_target_layers - 2
    if not taps or not all(isinstance(i, int) and -1 <= i <= last for i in taps):
        raise ValueError(f"target_layer_ids must lie in -1..{last}, got {list(taps)}")
    return tuple(taps)


def _drafter_layers(raw: Raw, get: _Lookup, depth: int) -> tuple[LayerConfig, ...]:
    """Method, section 2.7: window and causality of every layer."""
    types = layer_types(raw, depth)
    window = get("swa_window_size", "sliding_window")
    if get("use_swa") and "sliding_attention" not in types:
        types = ["sliding_attention"] * depth
    causal = get("is_causal", "causal", "causal_head")
    if causal is None and get("sliding_window_non_causal"):
        causal = False
    if "sliding_attention" in types:
        if window is None:
            raise ValueError("a sliding_attention layer needs sliding_window, got none")
        require({"sliding_window": window}, "sliding_window")
        if not raw.get("use_sliding_window"):
            warnings.warn(
                f"config.json marks sliding layers but use_sliding_window is not true; keeping window {window} "
                "(Hugging Face's Qwen3Config would drop it and run the layers unbounded)",
                stacklevel=2,
            )
    attention, inner = attention_config(raw), require(raw, "intermediate_size")

    def layer(sliding: bool) -> LayerConfig:
        own = replace(attention, window=window if sliding else None, causal=sliding if causal is None else bool(causal))
        return LayerConfig(own, inner)

    return tuple(layer(kind == "sliding_attention") for kind in types)
