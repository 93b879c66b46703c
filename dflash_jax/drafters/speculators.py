"""Configurations that the `speculators` library writes: the layers' own one lies inside."""

from typing import Any

from dflash_jax.config import Raw

_KINDS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "eagle3": "Eagle3",
}
_ONLY_OUTSIDE = "speculators_model_type", "transformer_layer_config", "model_type", "architectures"


def flattened(raw: Raw) -> Raw:
    """A config as z-lab and others write them; as it is if the library did not write it.

    Of the layers' configuration it writes only what differs from transformers' defaults, which are filled in here.

    Raises:
        ValueError: another kind of drafter, or layers of an unknown model.
    """
    kind, layers = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind is None and layers is None:
        return raw
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"speculators_model_type must be one of {sorted(_KINDS)}, got {kind!r:.80}")
    if not isinstance(layers, dict) or layers.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise ValueError(f"transformer_layer_config must be that of a qwen3 or llama, got {layers!r:.200}")
    outer = {name: value for name, value in raw.items() if name not in _ONLY_OUTSIDE}
    if kind in ("dflash", "dspark"):  # defaults of the library
        outer.setdefault("sample_from_anchor", kind == "dspark")
    if kind == "dflash2":
        outer.setdefault("sliding_window_non_causal", True)
    if kind != "eagle3":
        outer.setdefault("block_size", 8)
    outer.setdefault("draft_vocab_size", 32000)
    return {**_defaults(layers), **layers, **outer, "architectures": [_KINDS[kind]]}


def _defaults(layers: Raw) -> dict[str, Any]:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{"model_type": "qwen3", **layers}).to_dict()
