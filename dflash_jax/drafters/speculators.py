"""Configurations that the `speculators` library writes: the layers' own one lies inside."""

from typing import Any

from dflash_jax.config import Raw
from dflash_jax.drafters import known

_KINDS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "eagle3": "Eagle3",
}
# Every release that has DSpark, 0.7.0 to 0.9.0, writes the field, true unless it was set otherwise. Between #677
# (2026-06-29) and #760 (2026-07-13) the sources had DSpark without it, and only masks predicted; such files do not say
# of which day they are, and others have lost the field. Readers differ, too: SGLang, vLLM and the library itself take
# its absence as true, llama.cpp as false (vllm#56792, sglang#30982).
WHICH_SLOTS = (
    "config.json of a DSpark drafter by speculators must give sample_from_anchor, found none, and there are two kinds: "
    "releases from 0.7.0 on train the anchor's slot to predict, too, and write true; versions between #677 and #760 "
    "wrote nothing and trained the masks' slots only. Acceptance is near 0 if the wrong one is taken. Say "
    "--drafter-config '{\"sample_from_anchor\": false}' (only masks predict) or '{\"sample_from_anchor\": true}' (the "
    "anchor predicts, too)"
)
_ONLY_OUTSIDE = "speculators_model_type", "transformer_layer_config", "model_type", "architectures"


def flattened(raw: Raw) -> Raw:
    """A config as z-lab and others write them; as it is if the library did not write it.

    Of the layers' configuration it writes only what differs from transformers' defaults, which are filled in here.

    Raises:
        ValueError: another kind of drafter, layers of an unknown model, or a DSpark drafter of which it is not known
            which slots predict.
    """
    kind, layers = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind is None and layers is None:
        return raw
    if not isinstance(kind, str) or kind not in _KINDS:
        why = known.needs(kind) if isinstance(kind, str) else ""
        raise ValueError(f"speculators_model_type must be one of {sorted(_KINDS)}, got {kind!r:.80}{why}")
    if not isinstance(layers, dict) or layers.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise ValueError(f"transformer_layer_config must be that of a qwen3 or llama, got {layers!r:.200}")
    outer = {name: value for name, value in raw.items() if name not in _ONLY_OUTSIDE}
    if kind == "dspark" and outer.get("sample_from_anchor") is None:
        raise ValueError(WHICH_SLOTS)
    if kind == "dflash2":
        outer.setdefault("sliding_window_non_causal", True)
    if kind != "eagle3":
        outer.setdefault("block_size", 8)
    outer.setdefault("draft_vocab_size", 32000)
    return {**_defaults(layers), **layers, **outer, "architectures": [_KINDS[kind]]}


def _defaults(layers: Raw) -> dict[str, Any]:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{"model_type": "qwen3", **layers}).to_dict()
