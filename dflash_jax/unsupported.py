"""What published configurations need that no model class here has, by name: an error says that instead of a field."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Raw = Mapping[str, Any]

# Families that are known and not built, by `model_type`.
MODEL_TYPES = {
    "deepseek_v32": "DeepSeek-V3.2's indexer, which chooses the keys that attention reads",
    "glm_moe_dsa": "GLM-5's indexer, which chooses the keys that attention reads",
    "muse_glimmer": "Muse's normed embeddings, output gates and layers without rotary embedding",
}
# Fields that say so, and what is needed where they have such a value.
FIELDS: dict[str, Callable[[Any], str | None]] = {
    "vision_config": lambda value: "vision parts",
    "audio_config": lambda value: "audio parts",
    "text_config": lambda value: "the parts around a text model",
    "n_group": lambda value: "routing that is limited to groups of experts" if value != 1 else None,
    "topk_group": lambda value: "routing that is limited to groups of experts" if value != 1 else None,
    "use_bidirectional_attention": lambda value: "attention to later tokens",
    "index_topk": lambda value: "an indexer, which chooses the keys that attention reads",
    "index_n_heads": lambda value: "an indexer, which chooses the keys that attention reads",
    "kv_lora_rank": lambda value: "latent attention",
    "linear_num_value_heads": lambda value: "gated delta rule layers",
    "hidden_activation": lambda value: f"the activation {value!r:.40}",
}


def check_needs(raw: Raw, unknown: Iterable[str]) -> None:
    """Raises ValueError with the reasons, if fields that a model class does not know are known here.

    Args:
        unknown: fields that are set, and that nobody reads.
    """
    given = {name: FIELDS[name](raw[name]) for name in unknown if name in FIELDS and raw[name]}
    if reasons := {f"{what} ({name} = {raw[name]!r:.80})": None for name, what in given.items() if what}:
        raise ValueError(f"config.json: this model needs {'; and '.join(reasons)}. That is not supported")
