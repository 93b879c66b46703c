"""Configurations that the `speculators` library writes: the layers' own one lies inside."""

from collections.abc import Iterable

from dflash_jax.config import Raw
from dflash_jax.drafters import known
from dflash_jax.drafters.kind import Kind

_ONLY_OUTSIDE = "speculators_model_type", "transformer_layer_config", "model_type", "architectures"


def flattened(raw: Raw, kinds: Iterable[Kind]) -> Raw:
    """A config as z-lab and others write them; as it is if the library did not write it.

    Of the layers' configuration it writes only what differs from transformers' defaults, which are filled in here.

    Args:
        kinds: those there are.

    Raises:
        ValueError: another kind of drafter, layers of an unknown model, or something that the kind must know.
    """
    kind, layers = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind is None and layers is None:
        return raw
    # Of several kinds of one name, the first.
    named = {one.speculators[0]: (one, one.speculators[1]) for one in reversed([*kinds]) if one.speculators}
    if not isinstance(kind, str) or kind not in named:
        why = known.needs(kind) if isinstance(kind, str) else ""
        raise ValueError(f"speculators_model_type must be one of {sorted(named)}, got {kind!r:.80}{why}")
    if not isinstance(layers, dict) or layers.get("model_type", "qwen3") not in ("qwen3", "llama"):
        raise ValueError(f"transformer_layer_config must be that of a qwen3 or llama, got {layers!r:.200}")
    outer = {name: value for name, value in raw.items() if name not in _ONLY_OUTSIDE}
    ours, name = named[kind]
    outer = {"draft_vocab_size": 32000, **ours.from_speculators(outer)}
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(**{"model_type": "qwen3", **layers}).to_dict()
    return {**defaults, **layers, **outer, "architectures": [name]}
