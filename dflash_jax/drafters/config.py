"""The configuration of a drafter: every published spelling of a DFlash `config.json`, and what other kinds share.

Where a field may stand, and what it means, is method sections 2.7, 3 and 7.1.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from dflash_jax.config import DecoderConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    WINDOW_FIELDS,
    attention_config,
    check_fields,
    decoder_fields,
    qwen3_layer_types,
    require,
    token_ids,
)
from dflash_jax.drafters import known
from dflash_jax.drafters.fields import Lookup, flag, number, size, whole_rotary
from dflash_jax.vocabulary import token_id


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

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """The configuration of a checkpoint that has tensors of these names and shapes.

        Raises:
            ValueError: it lacks the head of its reduced vocabulary.
        """
        parts = {name.rpartition(".")[0] for name in shapes}
        brought = {"own_embedding": "embed_tokens" in parts, "own_head": "lm_head" in parts}
        if self.draft_vocab_size != self.vocab_size and not brought["own_head"]:
            raise ValueError(f"a drafter with a vocabulary of {self.draft_vocab_size} must have lm_head.weight")
        brought["own_vocabulary"] = "d2t" in shapes
        return replace(self, **brought)

    def check_pair(self, target: TargetConfig) -> None:
        """Raises ValueError if this drafter was not made for `target`."""
        depth, last = target.num_hidden_layers, max(self.target_layer_ids)
        pairs = [
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary size", self.vocab_size, target.vocab_size),
            ("number of target layers", self.num_target_layers or depth, depth),
        ]
        wrong = [f"{name} {ours} (target: {theirs})" for name, ours, theirs in pairs if ours != theirs]
        if not (self.own_embedding and self.own_head) and self.hidden_size != target.hidden_size:
            wrong.append(f"draft hidden size {self.hidden_size} (target embedding: {target.hidden_size})")
        wrong += self.wrong_with(target)
        if last > depth - 2:
            wrong.append(f"a target layer {last} (target: last usable {depth - 2})")
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


_DFLASH_FIELDS = """
    block_size mask_token_id mask_token target_layer_ids num_target_layers causal is_causal swa_window_size use_swa
    sample_from_anchor input_embedding_scale output_multiplier logit_scale final_logit_softcapping
    sliding_window_non_causal aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids aux_hidden_states_layer_ids
    target_hidden_size draft_vocab_size causal_head proposal_sharpness projector_type shift_label
""".split()
# What training needed of a drafter, written into its config.
_TRAINING_FIELDS = "num_anchors", "target_model_name_or_path", "speculators_version", "speculators_config"


# Drafters of gpt-oss carry their target's type and its experts' fields; their layers are Qwen3's all the same.
_TYPES = (None, "qwen3", "dflash", "gpt_oss")
_GPT_OSS_FIELDS = """
    num_local_experts num_experts_per_tok experts_per_token router_aux_loss_coef output_router_logits swiglu_limit
    swiglu_alpha initial_context_length
""".split()


def drafter_fields(
    raw: Raw, get: Lookup, *, block_size: int, taps: Callable[[int | None], tuple[int, ...]]
) -> dict[str, Any]:
    """The fields every drafter's config has, as keyword arguments (all but `layers`).

    Args:
        block_size: where the config names none.
        taps: tapped layers of a target of some depth, where the config names none; it may raise ValueError.
    """
    fields = decoder_fields(raw)
    num_target_layers = None if get("num_target_layers") is None else size(get, "num_target_layers")
    draft = size(get, "draft_vocab_size", default=fields["vocab_size"])
    if draft > fields["vocab_size"]:
        raise ValueError(f"draft_vocab_size must be at most vocab_size {fields['vocab_size']}, got {draft}")
    return fields | {
        "attention_bias": bool(raw.get("attention_bias")),
        "block_size": size(get, "block_size", default=block_size),
        "target_layer_ids": _taps(get, num_target_layers, taps),
        "num_target_layers": num_target_layers,
        "target_hidden_size": size(get, "target_hidden_size", default=fields["hidden_size"]),
        "draft_vocab_size": draft,
        "proposal_sharpness": _sharpness(get),
    }


def _sharpness(get: Lookup) -> tuple[float, ...]:
    found = get("proposal_sharpness", default=[])
    if not isinstance(found, list) or not all(isinstance(c, int | float) and 0 < c < 1e30 for c in found):
        raise ValueError(f"proposal_sharpness must be a list of positive numbers, got {found!r:.80}")
    return tuple(map(float, found))


def dflash_fields(
    raw: Raw, more: Sequence[str] = (), *, projectors: tuple[str, ...] = ("dflash",), anchor_predicts: bool = False
) -> dict[str, Any]:
    """The fields of a `DFlashConfig` in a `config.json`: every published form of a DFlash checkpoint, old and new.

    Args:
        own: fields that a kin of DFlash has besides; the caller reads them.
        projectors: what the kind may be called in `projector_type`, the name of what stands behind the backbone.
        anchor_predicts: whether the anchor's slot predicts, where the config does not say so.

    Raises:
        ValueError: other drafters (by name), unknown `dflash_config` fields and contradictions.
    """
    get = Lookup(raw)
    known.refuse_others(get.given, projectors)
    if raw.get("model_type") not in _TYPES:
        raise ValueError(f"drafter model_type must be one of {_TYPES[1:]}, got {raw['model_type']!r}")
    known.check_inert(get.given)
    read = [*_DFLASH_FIELDS, *known.REFUSED_FIELDS, *known.INERT, *more]
    if unknown := set(get.nested) - set(read):
        raise ValueError(f"dflash_config has unknown fields {sorted(unknown)}; they are not ignored")
    experts = _GPT_OSS_FIELDS if raw.get("model_type") == "gpt_oss" else []
    others = [*DECODER_FIELDS, *WINDOW_FIELDS, *_TRAINING_FIELDS, "dflash_config", "partial_rotary_factor", *experts]
    check_fields(raw, [*read, *others], {"hidden_act": "silu", "mlp_bias": False})
    depth = require(raw, "num_hidden_layers")
    fields = drafter_fields(raw, get, block_size=16, taps=partial(_missing_taps, num_draft_layers=depth))
    scaled = get("input_embedding_scale") is not None
    return fields | {
        "layers": _drafter_layers(raw, get, depth),
        "mask_token_id": _mask_token(raw, get, fields["vocab_size"]),
        "anchor_predicts": _anchor_predicts(get, anchor_predicts),
        "input_embedding_scale": number(get, "input_embedding_scale", default=1.0) if scaled else None,
        "output_multiplier": number(get, "output_multiplier", "logit_scale", default=1.0),
        "final_logit_softcapping": max(0.0, number(get, "final_logit_softcapping", default=0.0)),
    }


def _mask_token(raw: Raw, get: Lookup, vocab_size: int) -> int:
    mask, text = get("mask_token_id"), get("mask_token")
    if mask is None and isinstance(text, str):
        raise ValueError(
            f"the drafter's mask token is given as text, {text!r:.80}, and which token that is only its target's "
            "tokenizer says; load the two together, or pass --drafter-config '{\"mask_token_id\": N}'"
        )
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id must be a token below vocab_size {vocab_size}, got {mask!r}")
    if mask in token_ids(raw.get("eos_token_id")):
        raise ValueError(f"mask_token_id {mask} must not be the end token")
    return mask


def with_mask_token(raw: Raw, target: str | Path | None) -> Raw:
    """A config with the id of its mask token, where it has its text only.

    Args:
        target: directory of the target's tokenizer; as it is without one.

    Raises:
        ValueError: the tokenizer has no such token; or the config has text and id, and they are two tokens.
    """
    get = Lookup(raw)
    text, given = get("mask_token"), get("mask_token_id")
    if not isinstance(text, str) or not target:
        return raw
    if given is None:
        return {**raw, "mask_token_id": token_id(Path(target), text)}
    try:
        found = token_id(Path(target), text)
    except ValueError:  # no token of the tokenizer, which may be why the id stands there
        return raw
    if found != given:
        raise ValueError(f"mask_token_id is {given!r:.80}, and mask_token {text!r:.80} is the target's token {found}")
    return raw


def _anchor_predicts(get: Lookup, of_kind: bool) -> bool:
    """Method, section 3: the explicit flag, else what the kind's reference does."""
    given, shifted = flag(get, "sample_from_anchor"), flag(get, "shift_label")
    if given is not None:
        return given
    if shifted is None or (shifted is False and not of_kind):
        return of_kind
    if shifted and of_kind:
        return True
    raise ValueError(
        f"shift_label = {shifted} does not say whether this drafter's anchor predicts: ModelOpt writes true with "
        "DSpark, whose anchor does, and Domino heads have it, too. Say --drafter-config "
        "'{\"sample_from_anchor\": true}' (the anchor predicts, too) or '{\"sample_from_anchor\": false}' (only masks "
        "predict)"
    )


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tap rule of the reference `build_target_layer_ids`: evenly from 1 to N-3, halves rounded to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + j * span / (num_draft_layers - 1)) for j in range(num_draft_layers))


def _missing_taps(num_target_layers: int | None, num_draft_layers: int) -> tuple[int, ...]:
    """Raises ValueError: which layers a DFlash drafter taps was chosen in training."""
    known_depth = num_target_layers is not None
    formula = list(default_target_layer_ids(num_target_layers, num_draft_layers)) if known_depth else "..."
    raise ValueError(
        "config.json must give target_layer_ids, the target's layers that the drafter taps. They are chosen in "
        "training, and the reference's formula is wrong for 14 of 20 published drafters (z-lab/dflash#156). If this "
        f"one follows the formula, pass --drafter-config '{{\"target_layer_ids\": {formula}}}'"
        + ("" if known_depth else " with its values for the target's depth, which is not known here")
    )


def _taps(get: Lookup, num_target_layers: int | None, rule: Callable[[int | None], tuple[int, ...]]) -> tuple[int, ...]:
    taps = list(token_ids(get("target_layer_ids", "aux_hidden_states_layer_ids"))) or None
    if auxiliary := auxiliary_taps(get):
        if taps is not None and taps != auxiliary:
            raise ValueError(f"target_layer_ids {taps} and the outputs of layers {auxiliary}, as auxiliary, disagree")
        taps = auxiliary
    if taps is None:
        taps = rule(num_target_layers)
    # The last layer's output is published after the final norm, unlike all others.
    last = max(taps, default=0) if num_target_layers is None else num_target_layers - 2
    if not taps or not all(isinstance(i, int) and -1 <= i <= last for i in taps):
        raise ValueError(f"target_layer_ids must lie in -1..{last}, got {list(taps)}")
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"target_layer_ids must ascend, each layer once, got {list(taps)}")
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
    types = qwen3_layer_types(raw, depth)
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
    qk_norm, inner = require(raw, "rms_norm_eps", float), require(raw, "intermediate_size")
    attention = attention_config(whole_rotary(raw), qk_norm=qk_norm)

    def layer(sliding: bool) -> LayerConfig:
        mixer = replace(attention, window=window if sliding else None, causal=sliding if causal is None else causal)
        return LayerConfig(mixer, inner)

    return tuple(layer(kind == "sliding_attention") for kind in types)
