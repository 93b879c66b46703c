"""The configuration of a drafter: every published spelling of a DFlash `config.json`, and what other kinds share.

Where a field may stand, and what it means, is method sections 2.7, 3 and 7.1.
"""

import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from dflash_jax.config import DecoderConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    WINDOW_FIELDS,
    attention_config,
    check_fields,
    decoder_fields,
    layer_types,
    mapping,
    require,
    token_ids,
)


@dataclass(frozen=True)
class DrafterConfig(DecoderConfig):
    """A drafter that reads the target's features, of any kind.

    Attributes:
        attention_bias: whether the projections of attention have a bias.
        block_size: verified positions of a step, the anchor's among them, unless the kind says otherwise.
        target_layer_ids: tapped target layers, 0-based; tap i is the output of layer i, tap -1 the embedding.
        num_target_layers: depth of the target it was trained for; None if the config does not say.
        target_hidden_size: width of one tapped feature.
        draft_vocab_size: tokens it can propose; `vocab_size` is the target's.
        proposal_sharpness: by depth, how far its scores are to be trusted at first (see `decoding.calibration`).
        own_embedding, own_head: whether the checkpoint carries its own instead of the target's.
        own_vocabulary: whether it says which of the target's tokens its own are, though it may have all of them.
    """

    attention_bias: bool
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    draft_vocab_size: int
    proposal_sharpness: tuple[float, ...] = field(default=(), kw_only=True)
    own_embedding: bool = field(default=False, kw_only=True)
    own_head: bool = field(default=False, kw_only=True)
    own_vocabulary: bool = field(default=False, kw_only=True)

    def proposals(self, block_size: int) -> int:
        """Tokens proposed at this block size; the verify pass is one wider."""
        return block_size - 1

    def with_tensors(self, names: Collection[str]) -> Self:
        """The configuration of a checkpoint that has these tensors.

        Raises:
            ValueError: it lacks the head of its reduced vocabulary.
        """
        own = {"own_embedding": "embed_tokens.weight" in names, "own_head": "lm_head.weight" in names}
        if self.draft_vocab_size != self.vocab_size and not own["own_head"]:
            raise ValueError(f"a drafter with a vocabulary of {self.draft_vocab_size} must have lm_head.weight")
        own["own_vocabulary"] = "d2t" in names
        return replace(self, **own)

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
        wrong += self.wrong_with(target)
        if max(self.target_layer_ids) > target.num_hidden_layers - 2:
            wrong.append(
                f"a target layer {max(self.target_layer_ids)} (target: last usable {target.num_hidden_layers - 2})"
            )
        if wrong:
            raise ValueError(
                f"this drafter was made for another target: it expects {'; '.join(wrong)}. "
                "Load the drafter published for this target."
            )

    def wrong_with(self, target: TargetConfig) -> list[str]:
        """What else of it does not fit the target."""
        return []


@dataclass(frozen=True)
class DFlashConfig(DrafterConfig):
    """A DFlash (v1) drafter.

    Attributes:
        block_size: slots of the draft pass, one anchor and `block_size - 1` masks.
        mask_token_id: token of the masked slots.
        anchor_predicts: slot 0 predicts as well, so slot k predicts position a+k+1 instead of a+k.
        input_embedding_scale: of the embeddings that the pass begins with; None is the target's own.
        output_multiplier, final_logit_softcapping: of the logits; softcap 0 is none.
    """

    mask_token_id: int
    anchor_predicts: bool = False
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    def proposals(self, block_size: int) -> int:
        return block_size if self.anchor_predicts else block_size - 1

    def wrong_with(self, target: TargetConfig) -> list[str]:
        if self.mask_token_id not in target.eos_token_ids:
            return []
        return [f"a mask token {self.mask_token_id} that ends no text (target: one of its end tokens)"]


_REFUSED_FIELDS = {
    "projector_type": "a Domino head",
    "shift_label": "a Domino head",
    "attention_sink_bias": "MiMo",
    "add_swa_attention_sink_bias": "MiMo",
    "attention_value_scale": "MiMo",
    "has_embed_tokens": "Nemotron",
    "has_lm_head": "Nemotron",
    "gating": "Laguna",
    "quantization_config": "quantised weights",
}
# Parts of the names of classes that no kind here has, and what these need.
OTHER_CLASSES = {
    "Domino": "a Domino head",
    "DCOCO": "a corrector of all pairs of candidates",
    "XPress": "a refiner of the whole block",
    "DFly": "a mixture of heads of AngelSpec",
    "PEagle": "parallel passes of EAGLE",
    "MTP": "a multi-token prediction layer of the target",
    "MiMo": "MiMo's sinks and scaled values",
    "Laguna": "Laguna's gates and norms of features",
    "Nemotron": "Nemotron's quantised layers",
    "Gemma": "Gemma layers",
}
_DFLASH_FIELDS = """
    block_size mask_token_id target_layer_ids num_target_layers causal is_causal swa_window_size use_swa
    sample_from_anchor input_embedding_scale output_multiplier logit_scale final_logit_softcapping
    sliding_window_non_causal aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids
    target_hidden_size draft_vocab_size causal_head proposal_sharpness
""".split()
# What training needed of a drafter, written into its config.
_TRAINING_FIELDS = "num_anchors", "target_model_name_or_path", "speculators_version", "speculators_config"


# Drafters of gpt-oss carry their target's type and its experts' fields; their layers are Qwen3's all the same.
_TYPES = (None, "qwen3", "dflash", "gpt_oss")
_GPT_OSS_FIELDS = """
    num_local_experts num_experts_per_tok experts_per_token router_aux_loss_coef output_router_logits swiglu_limit
    swiglu_alpha initial_context_length
""".split()


class Lookup:
    """Finds a drafter field in an object like `dflash_config` or at the top level; a conflict between them raises."""

    def __init__(self, raw: Raw, inside: str = "dflash_config"):
        self.nested, self.raw, self.inside = mapping(raw, inside), raw, inside

    def __call__(self, *names: str, default: Any = None) -> Any:
        found = {
            f"{place}{name}": source[name]
            for name in names
            for place, source in ((f"{self.inside}.", self.nested), ("", self.raw))
            if source.get(name) is not None
        }
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"config.json contradicts itself: {found}")
        return values[0] if values else default


def classes_of(raw: Raw) -> list[str]:
    """The names of `architectures`."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of class names, got {names!r:.80}")
    return names


def is_of(raw: Raw, classes: str, fields: Sequence[str] = ()) -> bool:
    """Whether a config names a class of this pattern, or has one of these fields of a kind's own."""
    get = Lookup(raw)
    return any(re.fullmatch(classes, name) for name in classes_of(raw)) or any(get(name) for name in fields)


def drafter_fields(raw: Raw, get: Lookup, *, block_size: int, taps: Callable[[int], tuple[int, ...]]) -> dict[str, Any]:
    """The fields every drafter's config has, as keyword arguments (all but `layers`).

    Args:
        block_size: where the config names none.
        taps: tapped layers of a target of some depth, where the config names none.
    """
    fields = decoder_fields(raw)
    num_target_layers = get("num_target_layers")
    if num_target_layers is not None:
        require({"num_target_layers": num_target_layers}, "num_target_layers")
    draft = get("draft_vocab_size", default=fields["vocab_size"])
    if require({"draft_vocab_size": draft}, "draft_vocab_size") > fields["vocab_size"]:
        raise ValueError(f"draft_vocab_size must be at most vocab_size {fields['vocab_size']}, got {draft}")
    return fields | {
        "attention_bias": bool(raw.get("attention_bias")),
        "block_size": require({"block_size": get("block_size", default=block_size)}, "block_size"),
        "target_layer_ids": _taps(get, num_target_layers, taps),
        "num_target_layers": num_target_layers,
        "target_hidden_size": require(
            {"target_hidden_size": get("target_hidden_size", default=fields["hidden_size"])}, "target_hidden_size"
        ),
        "draft_vocab_size": draft,
        "proposal_sharpness": _sharpness(get),
    }


def _sharpness(get: Lookup) -> tuple[float, ...]:
    found = get("proposal_sharpness", default=[])
    if not isinstance(found, list) or not all(isinstance(c, int | float) and 0 < c < 1e30 for c in found):
        raise ValueError(f"proposal_sharpness must be a list of positive numbers, got {found!r:.80}")
    return tuple(map(float, found))


def dflash_fields(raw: Raw, own: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a `DFlashConfig` in a `config.json`: every z-lab form of a DFlash checkpoint (old and new places).

    Args:
        own: fields that a kin of DFlash has besides; the caller reads them.

    Raises:
        ValueError: other drafters (by name), unknown `dflash_config` fields and contradictions.
    """
    get = Lookup(raw)
    refuse_others(raw, get)
    if unknown := set(get.nested) - {*_DFLASH_FIELDS, *_REFUSED_FIELDS, *own}:
        raise ValueError(f"dflash_config has unknown fields {sorted(unknown)}; they are not ignored")
    experts = _GPT_OSS_FIELDS if raw.get("model_type") == "gpt_oss" else []
    known = [*DECODER_FIELDS, *WINDOW_FIELDS, *_DFLASH_FIELDS, *_REFUSED_FIELDS, *_TRAINING_FIELDS]
    check_fields(raw, [*known, *own, "dflash_config", *experts], {"hidden_act": "silu", "mlp_bias": False})
    depth = require(raw, "num_hidden_layers")
    taps = partial(default_target_layer_ids, num_draft_layers=depth)
    fields = drafter_fields(raw, get, block_size=16, taps=taps)
    scaled = get("input_embedding_scale") is not None
    mask = get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < fields["vocab_size"]:
        raise ValueError(f"mask_token_id must be a token below vocab_size {fields['vocab_size']}, got {mask!r}")
    if mask in token_ids(raw.get("eos_token_id")):
        raise ValueError(f"mask_token_id {mask} must not be the end token")
    return fields | {
        "layers": _drafter_layers(raw, get, depth),
        "mask_token_id": mask,
        "anchor_predicts": _anchor_predicts(raw, get),
        "input_embedding_scale": number(get, "input_embedding_scale", default=1.0) if scaled else None,
        "output_multiplier": number(get, "output_multiplier", "logit_scale", default=1.0),
        "final_logit_softcapping": max(0.0, number(get, "final_logit_softcapping", default=0.0)),
    }


def flag(get: Lookup, *names: str) -> bool | None:
    """Whether it is on; None where it is not given."""
    value = get(*names)
    if not isinstance(value, bool | None):
        raise ValueError(f"{names[0]} must be true or false, got {value!r:.80}")
    return value


def number(get: Lookup, *names: str, default: float) -> float:
    value = get(*names, default=default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ValueError(f"{names[0]} must be a number, got {value!r:.80}")
    return float(value)


def refuse_others(raw: Raw, get: Lookup) -> None:
    """Raises ValueError naming what a drafter needs that no kind here has."""
    reasons = [f"{what} ({name})" for name, what in _REFUSED_FIELDS.items() if get(name)]
    if reasons:
        raise ValueError(f"this drafter needs {', '.join(reasons)}, which is not supported")
    if raw.get("model_type") not in _TYPES:
        raise ValueError(f"drafter model_type must be one of {_TYPES[1:]}, got {raw['model_type']!r}")


def _anchor_predicts(raw: Raw, get: Lookup) -> bool:
    """Method, section 3: the explicit flag, else DSpark classes predict from the anchor, else masks do."""
    given = flag(get, "sample_from_anchor")
    return any("DSpark" in name for name in classes_of(raw)) if given is None else given


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tap rule of the reference `build_target_layer_ids`: evenly from 1 to N-3, halves rounded to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + j * span / (num_draft_layers - 1)) for j in range(num_draft_layers))


def _taps(get: Lookup, num_target_layers: int | None, rule: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    taps = list(token_ids(get("target_layer_ids"))) or None
    if auxiliary := auxiliary_taps(get):
        if taps is not None and taps != auxiliary:
            raise ValueError(f"target_layer_ids {taps} and the outputs of layers {auxiliary}, as auxiliary, disagree")
        taps = auxiliary
    if taps is None:
        if num_target_layers is None:
            raise ValueError("config.json must give target_layer_ids or num_target_layers, found neither")
        taps = rule(num_target_layers)
    # The last layer's output is published after the final norm, unlike all others.
    last = max(taps, default=0) if num_target_layers is None else num_target_layers - 2
    if not taps or not all(isinstance(i, int) and -1 <= i <= last for i in taps):
        raise ValueError(f"target_layer_ids must lie in -1..{last}, got {list(taps)}")
    return tuple(taps)


def auxiliary_taps(get: Lookup) -> list[int]:
    """The layers tapped by the ids of auxiliary hidden states; none if the config gives none.

    The ids count the embedding as 0, so they are one higher than the layers. Only inside `eagle_config`, where
    SpecForge and ModelOpt write them, they are the layers themselves; then either may stand outside as well.
    """
    names = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
    if get.inside != "eagle_config":
        return [i - 1 for i in token_ids(get(*names))]
    inside, outside = ([list(token_ids(raw.get(name))) for name in names] for raw in (get.nested, get.raw))
    given = [ids for ids in inside if ids] or [[i - 1 for i in ids] for ids in outside if ids]
    layers = given[0] if given else []
    if any(ids not in ([], layers) for ids in inside) or any(
        ids not in ([], layers, [i + 1 for i in layers]) for ids in outside
    ):
        raise ValueError(f"config.json contradicts itself: auxiliary layers {inside} in eagle_config, and {outside}")
    return layers


def _drafter_layers(raw: Raw, get: Lookup, depth: int) -> tuple[LayerConfig, ...]:
    """Method, section 2.7: window and causality of every layer."""
    types = layer_types(raw, depth)
    window = get("swa_window_size", "sliding_window")
    if flag(get, "use_swa") and "sliding_attention" not in types:
        types = ["sliding_attention"] * depth
    causal = flag(get, "is_causal", "causal", "causal_head")
    if flag(get, "sliding_window_non_causal") and causal is None:
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
        own = replace(attention, window=window if sliding else None, causal=sliding if causal is None else causal)
        return LayerConfig(own, inner)

    return tuple(layer(kind == "sliding_attention") for kind in types)
