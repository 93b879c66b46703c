"""Names in published `config.json` files of drafters that are not read: what they ask for, or why they change nothing.

A field that stands in no table here or in its kind's file is refused.
"""

import re
from typing import NamedTuple

from dflash_jax.config import Raw

# Fields that ask for something no kind here has, if they are on.
REFUSED_FIELDS = {
    **dict.fromkeys(("pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"), "a Domino head"),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias"), "MiMo's sinks"),
    "attention_value_scale": "MiMo's scaled values",
    "has_embed_tokens": "Nemotron's own embedding",
    "has_lm_head": "Nemotron's own head",
    "gating": "Laguna's gates",
    "use_gemma_norm": "norms that scale by one plus their weight, as MiniMax-M3's drafters have",
}
# Beginnings of the names of such fields.
_REFUSED_PREFIXES = {"dflare_": "DFlare's mixtures of tapped layers"}
# Heads behind the backbone by their names in `projector_type`, which no kind here has.
_PROJECTORS = {"domino": "a Domino head"}
# Parts of the names of classes, and of kinds of `speculators`, that are none here, and what these need; the first that
# fits counts, in small letters or large ones.
OTHER_CLASSES = {
    "Domino": "a Domino head",
    "DCOCO": "a corrector of all pairs of candidates",
    "XPress": "a refiner of the whole block",
    "DFlare": "DFlare's mixtures of tapped layers",
    "DFly": "a mixture of heads of AngelSpec",
    "PEagle": "parallel passes of EAGLE",
    "MTP": "a multi-token prediction layer of the target",
    "MiMo": "MiMo's sinks and scaled values",
    "MiniMax": "the attention and norms of MiniMax-M3",
    "Laguna": "Laguna's gates and norms of features",
    "Nemotron": "Nemotron's quantized layers",
    "Gemma": "Gemma layers",
    "Lfm2": "interleaved rotary embedding",
    "Deepseek": "layers of DeepSeek",
    "CosyVoice": "embeddings of speech tokens",
}


class Inert(NamedTuple):
    """A field that changes nothing of what a drafter computes.

    Attributes:
        source: who writes it, and why it changes nothing.
        values: those that are known to; empty is all.
    """

    source: str
    values: tuple[object, ...] = ()


_ANGELSLIM = "AngelSlim 0.5.0, speculative/train: "
_QWEN35_FIELDS = """
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    full_attention_interval attn_output_gate mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings
""".split()
_COPIED = (
    "copied from a Qwen3.5 target's config by trainers (NeMo Automodel#3605, DeepSpec#71); the layers are Qwen3's, "
    "which do not read it, and other layers would have tensors of other names or shapes"
)
INERT: dict[str, Inert] = {
    "attention_mode": Inert(
        "SpecForge 0.2.0, modeling/draft/dspark.py: compares the numbers of heads, which stand beside it",
        ("gqa", "mha"),
    ),
    "confidence_head_alpha": Inert("SpecForge 0.2.0, modeling/draft/dspark.py: the weight of a loss"),
    "target_model_type": Inert(_ANGELSLIM + "how the target is loaded (models/target/target_model_wrapper.py)"),
    "modal_type": Inert(_ANGELSLIM + "which data loader is taken (trainer/trainer_factory.py)"),
    "attention_backend": Inert(_ANGELSLIM + "which kernel computes attention (trainer/online_dflash_trainer.py)"),
    "embed_weight_key": Inert(_ANGELSLIM + "the name of a tensor of the target (trainer/online_dflash_trainer.py)"),
    "lm_head_key": Inert(_ANGELSLIM + "the name of a tensor of the target (trainer/online_dflash_trainer.py)"),
    "trust_remote_code": Inert(_ANGELSLIM + "how the target is loaded (trainer/online_dflash_trainer.py)"),
    "gamma_warmup": Inert(_ANGELSLIM + "the schedule of a loss (trainer/online_dflash_trainer.py)"),
    "gamma_warmup_step": Inert(_ANGELSLIM + "the schedule of a loss (trainer/online_dflash_trainer.py)"),
    "max_anchors": Inert("speculators 0.5.0 and 0.6.0, models/dflash/config.py: blocks of a row in training"),
    "image_token_id": Inert(_ANGELSLIM + "configs/qwen3-vl-4b-eagle3-mrope.json: where the target's pictures stand"),
    "video_token_id": Inert(_ANGELSLIM + "configs/qwen3-vl-4b-eagle3-mrope.json: where the target's videos stand"),
    "vision_start_token_id": Inert(_ANGELSLIM + "configs/qwen3-vl-4b-eagle3-mrope.json: where they begin"),
    "vision_end_token_id": Inert(_ANGELSLIM + "configs/qwen3-vl-4b-eagle3-mrope.json: where they end"),
    "decoder_sparse_step": Inert(
        "SpecForge 0.2.0 and AngelSlim 0.5.0, configs of EAGLE-3 for targets with experts: every how many layers have "
        "experts; the drafter's class, Llama's, has none",
        (1,),
    ),
    "router_aux_loss_coef": Inert(_ANGELSLIM + "configs/qwen3-30b-a3b-eagle3.json: the weight of a loss"),
    "num_nextn_predict_layers": Inert(
        "SGLang 0.5.23, models/dspark.py: inherited from the target, whose layers for multi-token prediction it counts"
    ),
    **dict.fromkeys(_QWEN35_FIELDS, Inert(_COPIED)),
}


def refuse_others(fields: Raw, projectors: tuple[str, ...]) -> None:
    """Raises ValueError with the reason, if a drafter needs what no kind here has.

    Args:
        fields: those of its config.json, and those inside `dflash_config` and the like.
        projectors: names that `projector_type` may have for its kind; null and empty are those of none.
    """
    found = {name: what for name, what in REFUSED_FIELDS.items() if fields.get(name)}
    for prefix, what in _REFUSED_PREFIXES.items():
        found |= {name: what for name in fields if name.startswith(prefix)}
    projector = fields.get("projector_type") or None
    if isinstance(projector, str) and projector in _PROJECTORS:
        found["projector_type"] = _PROJECTORS[projector]
    if found:
        reasons: dict[str, list[str]] = {}
        for name, what in found.items():
            reasons.setdefault(what, []).append(name)
        listed = "; and ".join(f"{what} ({', '.join(names)})" for what, names in reasons.items())
        raise ValueError(f"this drafter needs {listed}, which is not supported")
    if projector is not None and projector not in projectors:
        raise ValueError(
            f"projector_type must be {' or '.join(projectors)} for a drafter of this kind, got {projector!r:.80}"
        )


def check_inert(fields: Raw) -> None:
    """Raises ValueError for a value of a field in `INERT` that may change something."""
    for name, (source, values) in INERT.items():
        value = fields.get(name)
        if value is not None and values and value not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"{name} = {value!r:.80} is not supported, expected {expected} ({source})")


def needs(name: str) -> str:
    """What a drafter of this class or kind needs, in brackets; empty if that is not known."""
    return next((f" ({what})" for part, what in OTHER_CLASSES.items() if re.search(part, name, re.IGNORECASE)), "")
