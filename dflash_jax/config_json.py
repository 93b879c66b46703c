"""Readers of the fields of a Hugging Face `config.json` that families and drafters share.

A field that would change the arithmetic and is not implemented raises; none is silently ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dflash_jax.config import AttentionConfig, Raw, RopeConfig
from dflash_jax.storage import storage
from dflash_jax.unsupported import check_needs

# What no real model exceeds: another number is a mistake, found before memory is asked for.
_MOST = {"num_hidden_layers": 2**12, "num_target_layers": 2**12, "block_size": 2**10}
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok"), 2**16)
_MOST |= dict.fromkeys(("num_experts", "num_local_experts"), 2**16)
_MOST |= {"hidden_size": 2**18, "intermediate_size": 2**20, "moe_intermediate_size": 2**20}
_MOST |= {"vocab_size": 2**24, "draft_vocab_size": 2**24, "rms_norm_eps": 0.1, "rope_theta": 1e12, "factor": 1e6}
_MOST |= {"partial_rotary_factor": 1.0}
_MOST_ANYWHERE = 2**31 - 1
_LEAST = {"rms_norm_eps": 1e-20, "rope_theta": 1.0, "factor": 1.0}

# Fields that are true or false wherever they stand.
_FLAGS = frozenset(
    "tie_word_embeddings attention_bias mlp_bias use_sliding_window attention_k_eq_v enable_moe_block".split()
)

# Fields of `config.json` that describe bookkeeping or training, not the forward pass.
_INERT = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version auto_map _name_or_path _model_name_or_path use_cache
    target_model_name_or_path base_model_name_or_path
    initializer_range attention_dropout max_window_layers max_position_embeddings bos_token_id
    eos_token_id pad_token_id unk_token_id id2label label2id problem_type return_dict return_dict_in_generate
    output_attentions output_hidden_states is_encoder_decoder chunk_size_feed_forward
    _attn_implementation _attn_implementation_autoset attn_implementation _commit_hash num_anchors loss_decay_gamma
    pretraining_tp transformers.js_config
""".split()
)

# Fields of published configs that change nothing while they are off (false, 0 or empty) and may when they are on.
# A field belongs here only if off is how a model without it runs: `norm_topk_prob` or `use_qk_norm` do not.
_INERT_WHEN_OFF = frozenset(
    """
    pruned_heads torchscript use_bfloat16 tf_legacy_loss is_decoder add_cross_attention
    tie_encoder_decoder task_specific_params output_scores output_router_logits remove_invalid_values
    do_sample early_stopping min_length no_repeat_ngram_size encoder_no_repeat_ngram_size diversity_penalty
    hidden_dropout hidden_dropout_prob residual_dropout resid_pdrop embd_pdrop attn_pdrop embedding_dropout
    num_experts num_local_experts num_experts_per_tok mlp_only_layers num_nextn_predict_layers
    use_mrope
""".split()
)


def require(raw: Raw, name: str, kind: type = int, most: float | None = None) -> Any:
    """Returns `raw[name]`, a positive int or a float, of at most `most` (None is what no real model exceeds); raises
    ValueError if it is missing or misshapen."""
    value: Any = raw.get(name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf") or (kind is int and value != int(value)):
        raise ValueError(f"config.json must have a positive {kind.__name__} {name!r}, got {value!r:.80}")
    if value > (most := most or _MOST.get(name, _MOST_ANYWHERE)):
        raise ValueError(f"config.json: {name} must be at most {most}, got {value!r:.80}")
    if value < (least := _LEAST.get(name, 0)):
        raise ValueError(f"config.json: {name} must be at least {least}, got {value!r:.80}")
    return kind(value)


def token_ids(value: Any, file: str = "config.json") -> tuple[int, ...]:
    """Normalizes Hugging Face's None | int | list of ints; raises ValueError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= _MOST_ANYWHERE for i in ids):
        raise ValueError(f"{file}: token and layer ids must be integers below 2**31, got {value!r:.80}")
    return ids


def check_fields(raw: Raw, known: Iterable[str], expected: Raw, *, inert: Iterable[str] = ()) -> None:
    """Raises ValueError for values other than `expected` and for fields nobody reads.

    A field that is null is not set. An unknown one that is off (False, 0, empty) may still change the model, since
    being on may be its default; it passes only if it is known to be inert when off.

    Args:
        known: fields that somebody reads.
        expected: the one value that each of these fields may have.
        inert: fields of a family that change nothing while they are off.
    """
    for name, value in expected.items():
        if name in raw and raw[name] is not None and raw[name] != value:
            raise ValueError(f"config.json: {name} = {raw[name]!r} is not supported, expected {value!r}")
    for name in _FLAGS & raw.keys():
        if not isinstance(raw[name], bool | None):
            raise ValueError(f"config.json: {name} must be true or false, got {raw[name]!r:.80}")
    read, inert = _INERT.union(known, expected), _INERT_WHEN_OFF.union(inert)
    unknown = [k for k, v in raw.items() if v is not None and k not in read and (v or k not in inert)]
    if unknown:
        check_needs(raw, unknown)
        listed = ", ".join(f"{name} = {raw[name]!r}" for name in sorted(unknown))
        raise ValueError(
            f"config.json has fields this model class does not know: {listed}. They may change the model's output, "
            "on or off, so they are not ignored; remove them if they change nothing."
        )


def text_config(raw: Raw, outside: Iterable[str]) -> tuple[Raw, bool]:
    """The config of a text model, and whether it is one part of the model that `raw` describes.

    Args:
        outside: fields that such a model has besides; the other parts are not read.
    """
    if not isinstance(raw.get("text_config"), Mapping):
        return raw, False
    check_fields(raw, ["text_config", "tie_word_embeddings", *outside], {})
    given = lambda *names: {name: raw[name] for name in names if raw.get(name) is not None}
    # The head belongs to the whole model, so what that says of it counts, as in transformers.
    return {**given("eos_token_id", "quantization_config"), **raw["text_config"], **given("tie_word_embeddings")}, True


def mapping(raw: Raw, name: str) -> Raw:
    """Returns `raw[name]`, an object; empty if it is missing or null. Raises ValueError for anything else."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"config.json: {name} must be an object, got {value!r:.80}")
    return value or {}


# What a config must give with each kind of rotary embedding.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}


def rope_config(raw: Raw) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`; a missing theta raises."""
    fields: dict[str, Any] = {}
    for source in (raw.get("rope_scaling"), raw.get("rope_parameters")):
        if source is not None and not isinstance(source, Mapping):
            raise ValueError(f"config.json: rope parameters must be an object, got {source!r}")
        for name, value in (source or {}).items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if name in fields and fields[name] != value:
                raise ValueError(f"config.json gives {name} twice: {fields[name]!r} and {value!r}")
            fields[name] = value
    theta = raw.get("rope_theta")
    if theta is not None and fields.setdefault("rope_theta", theta) != theta:
        raise ValueError(f"config.json gives rope_theta twice: {fields['rope_theta']!r} and {theta!r}")
    for style in ("is_neox_style", "rope_is_neox_style"):
        if raw.get(style) is False:
            raise ValueError(f"config.json: {style} = False (interleaved rotary) is not supported")
    # Sections of multimodal rotary coincide for text positions, which are the only ones here.
    fields.pop("mrope_section", None)
    fields.pop("mrope_interleaved", None)
    if not isinstance(fields.get("truncate", True), bool):
        raise ValueError(f"config.json: rope parameter truncate must be true or false, got {fields['truncate']!r:.80}")
    kind = fields.pop("rope_type", "default")
    if kind != "proportional" and fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial rotary embedding is not supported for this model_type")
    if kind not in [*_ROPE_NEEDS]:
        raise ValueError(f"config.json: rope_type must be one of {', '.join(_ROPE_NEEDS)}, got {kind!r:.80}")
    if "rope_theta" not in fields:
        raise ValueError("config.json must give rope_theta (libraries disagree on a default)")
    if missing := [name for name in _ROPE_NEEDS[kind] if name not in fields]:
        raise ValueError(f"config.json: rope_type {kind!r} must give {', '.join(missing)}")
    theta = require(fields, "rope_theta", float)
    for name, value in fields.items():
        if not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise ValueError(f"config.json: rope parameter {name} must be a number, got {value!r:.80}")
    factor = require({"factor": 1, **fields}, "factor", float)
    require({"partial_rotary_factor": 1, **fields}, "partial_rotary_factor", float)
    if kind == "default" and factor != 1:
        raise ValueError(f"config.json: a rope factor of {factor!r} needs a rope_type, found none")
    del fields["rope_theta"]
    if unknown := set(fields) - (set(RopeConfig.__dataclass_fields__) - {"theta", "kind", "rotated"}):
        raise ValueError(f"config.json: rope parameters {sorted(unknown)} are not supported")
    return _checked(RopeConfig(theta=theta, kind=kind, **fields))


def _checked(rope: RopeConfig) -> RopeConfig:
    """Returns it; raises ValueError for bands of frequencies that cannot be."""
    if rope.kind not in ("llama3", "yarn"):
        return rope
    require(vars(rope), "original_max_position_embeddings")
    low, high = ("low_freq_factor", "high_freq_factor") if rope.kind == "llama3" else ("beta_slow", "beta_fast")
    least, most = getattr(rope, low), getattr(rope, high)
    if not 0 < least < most:
        raise ValueError(f"config.json: {low} must be positive and below {high}, got {least} and {most}")
    if rope.kind == "yarn" and (rope.theta == 1 or not (rope.attention_factor is None or rope.attention_factor > 0)):
        theta, factor = rope.theta, rope.attention_factor
        raise ValueError(
            f"config.json: yarn needs a rope_theta above 1 and a positive attention_factor, got {theta} and {factor}"
        )
    return rope


def partly_rotated(raw: Raw, default: float = 1.0) -> AttentionConfig:
    """`attention_config` of a family that rotates the first dimensions of a head: `rotary_dim` of them, or the share
    `partial_rotary_factor`. Where both `rope_parameters` and the config itself give one, the former counts, as in
    transformers.

    Args:
        default: share where the config gives none.
    """
    place, head_dim = "rope_parameters" if mapping(raw, "rope_parameters") else "rope_scaling", require(raw, "head_dim")
    parameters = dict(mapping(raw, place))
    inside = parameters.pop("partial_rotary_factor", None)
    shares = raw if inside is None else {"partial_rotary_factor": inside}
    sizes = set[int]()
    if shares.get("partial_rotary_factor") is not None:
        sizes.add(int(head_dim * require(shares, "partial_rotary_factor", float)))
    if raw.get("rotary_dim") is not None:
        sizes.add(require(raw, "rotary_dim"))
    rotated = sizes.pop() if sizes else int(head_dim * default)
    if sizes or not 0 < rotated <= head_dim:
        raise ValueError(
            f"config.json must say once how much of a head of {head_dim} is rotated, got {rotated}, {sizes}"
        )
    attention = attention_config({**raw, place: parameters or None})
    assert attention.rope is not None
    return replace(attention, rope=replace(attention.rope, rotated=rotated))


def attention_config(raw: Raw, **fields: Any) -> AttentionConfig:
    """The attention of a config whose layers are all alike but for window and causality; refine it by `replace`.

    Args:
        fields: more of an `AttentionConfig`. `attention_bias` says whether it has biases.
    """
    heads, kv_heads = require(raw, "num_attention_heads"), require(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    head_dim = require(raw, "head_dim")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embedding, got {head_dim}")
    bias = bool(raw.get("attention_bias"))
    return AttentionConfig(heads, kv_heads, head_dim, rope_config(raw), bias=bias, **fields)


def decoder_fields(raw: Raw) -> dict[str, Any]:
    """The fields every decoder config has, as keyword arguments (all but `layers`)."""
    return {
        "vocab_size": require(raw, "vocab_size"),
        "hidden_size": require(raw, "hidden_size"),
        "rms_norm_eps": require(raw, "rms_norm_eps", float),
        "storage": storage(raw.get("quantization_config")),
    }


def target_fields(raw: Raw) -> dict[str, Any]:
    """The fields every target config has, as keyword arguments (all but `layers` and `model_type`)."""
    trained = raw.get("max_position_embeddings")
    return decoder_fields(raw) | {
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings")),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
        "max_position_embeddings": require(raw, "max_position_embeddings") if trained else 0,
    }


DECODER_FIELDS = """
    vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim
    rms_norm_eps num_hidden_layers attention_bias
    tie_word_embeddings rope_theta rope_scaling rope_parameters is_neox_style rope_is_neox_style quantization_config
""".split()

WINDOW_FIELDS = "layer_types", "sliding_window", "use_sliding_window"

KINDS = "full_attention", "sliding_attention"


def layer_types(raw: Raw, layers: int, known: tuple[str, ...] = KINDS, default: list[str] | None = None) -> list[str]:
    """Returns `layer_types`; if absent, the default or all full attention; raises ValueError for a wrong length or
    name."""
    types = raw.get("layer_types")
    if types is None:
        return default or ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"layer_types must name {layers} layers, got {types!r}")
    if bad := [kind for kind in types if kind not in known]:
        raise ValueError(f"layer_types {bad} are not supported")
    return types


def qwen3_layer_types(raw: Raw, layers: int) -> list[str]:
    """Returns `layer_types`; where a config has none, what transformers' Qwen3Config makes of the older fields.

    Then layers from `max_window_layers` on slide, if `use_sliding_window` is set and `sliding_window` is a number.

    Raises:
        ValueError: as `layer_types`, or the older fields are incomplete.
    """
    types = layer_types(raw, layers)
    if raw.get("layer_types") is not None or not raw.get("use_sliding_window"):
        return types
    if "sliding_window" not in raw:
        raise ValueError("config.json: use_sliding_window needs sliding_window, a number or null (no window)")
    if raw["sliding_window"] is None:
        return types
    full = raw.get("max_window_layers", 28)
    if not isinstance(full, int) or isinstance(full, bool):
        raise ValueError(f"config.json: max_window_layers must be an integer, got {full!r:.80}")
    return ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
