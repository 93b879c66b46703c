"""Configurations of the `speculators` library: the layers' own one lies inside."""

from collections.abc import Iterable, Sequence

from dflash_jax.config import Raw
from dflash_jax.drafters import known
from dflash_jax.drafters.config import DFlashConfig
from dflash_jax.drafters.kind import Kind

_ONLY_OUTSIDE = "speculators_model_type", "transformer_layer_config", "model_type", "architectures"
# What it knows of the layers of a DFlash drafter.
_OF_LAYERS = """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act rms_norm_eps attention_bias attention_dropout initializer_range layer_types
    use_sliding_window sliding_window max_position_embeddings rope_theta rope_scaling rope_parameters
""".split()


def as_speculators(raw: Raw, config: DFlashConfig, target: str | None, architectures: Sequence[str]) -> Raw:
    """The config of a DFlash drafter as the library writes it. What it does not know is left out.

    Args:
        raw: as z-lab and others write it.
        config: what `raw` says.
        target: the verifier, a directory or id.
        architectures: class names of the target's `config.json`, if they are known.
    """
    size = config.block_size
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": size - 1 + config.anchor_predicts}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": [*architectures]},
        },
        "transformer_layer_config": {name: raw[name] for name in _OF_LAYERS if name in raw} | {"model_type": "qwen3"},
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],  # they count the embedding as 0
        "sample_from_anchor": config.anchor_predicts,
        # Ours, which it keeps and does not read.
        **({"num_target_layers": config.num_target_layers} if config.num_target_layers else {}),
        **({"proposal_sharpness": [*config.proposal_sharpness]} if config.proposal_sharpness else {}),
    }


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
