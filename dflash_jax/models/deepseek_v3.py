"""DeepSeek-V3 targets (`deepseek_v3`), and the Kimi-K2 that are such (`kimi_k2`, and `kimi_k25` around one): latent
attention, experts chosen by sigmoids beside one that every token goes through.

Reference: transformers `models/deepseek_v3/modeling_deepseek_v3.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dflash_jax.checkpoint import Leaf, QuantisedLeaf, Table
from dflash_jax.config import ExpertsConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    check_fields,
    require,
    rope_config,
    target_fields,
    text_config,
)
from dflash_jax.mesh import HEADS, WHOLE, Layout
from dflash_jax.models import decoder, tables, weights
from dflash_jax.models.attention import Pass
from dflash_jax.models.latent_attention import LatentAttention, LatentAttentionConfig
from dflash_jax.models.layers import MLP
from dflash_jax.sharding import Rule

_FIELDS = """
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave latent_norm_eps
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace norm_topk_prob
    routed_scaling_factor num_nextn_predict_layers num_mtp_layers
    aux_loss_alpha router_aux_loss_coef seq_aux ep_size
""".split()
# What published configs say that the family has anyway; another value is another model.
_FIXED: Raw = {
    "hidden_act": "silu",
    "attention_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
# Of a config whose text model is one part of several; the others are not read.
_OUTSIDE = """
    vision_config quantization_config ignore_index media_placeholder_token_id
    image_token_id video_token_id vision_start_token_id vision_end_token_id video_placeholder use_unified_vision_chunk
    projection_hidden_size projection_layer_norm_eps
""".split()
# Heads are split. What all heads share has its inputs split instead.
RULES = (
    Rule(r"(qkv|kv)_a_proj/weight", 2, P(None, HEADS)),
    Rule(r"q_b_proj/weight", 2, P(HEADS, "fsdp")),
    Rule(r"kv_b_proj", 2, P(HEADS, "fsdp")),
)


@dataclass(frozen=True)
class DeepseekV3Config(TargetConfig):
    """A DeepSeek-V3 or Kimi-K2.

    Attributes:
        shared_inner: inner width of the expert that every token goes through.
        interleaved: whether the rotated dimensions that belong together are stored side by side.
        nested: whether the text model's tensors stand inside another model's.
        predicting: layers after the last that predict further tokens, which are not read.
    """

    shared_inner: int = 0
    interleaved: bool = True
    nested: bool = False
    predicting: int = 0

    def indivisible(self, layout: Layout) -> str | None:
        if why := super().indivisible(layout):
            return why
        last = f"model.layers.{len(self.layers) - 1}"
        outside = [f"{last}.{name}_proj" for name in ("self_attn.q_a", "self_attn.q", "self_attn.o")]
        unit = self.storage.unit_of(*outside, *(f"{last}.mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")))
        for what, size in (("a shared inner width", self.shared_inner), ("a hidden size", self.hidden_size)):
            if layout.shards > 1 and size % (layout.shards * unit):
                return f"{what} of {size}" + (f" in quantized blocks of {unit}" if unit > 1 else "")
        return None


def config(raw: Raw) -> DeepseekV3Config:
    """Reads `config.json`, of the text model or of one that it is part of.

    `latent_norm_eps` is a field of ours: the epsilon of the norms of latents and narrow queries. transformers always
    takes 1e-6, which is the default, whatever `rms_norm_eps` is; other engines take that.
    """
    model_type = raw["model_type"]
    raw, nested = text_config(raw, _OUTSIDE)
    if nested and raw.get("model_type") not in ("deepseek_v3", "kimi_k2"):
        raise ValueError(f"text_config must be a deepseek_v3 or a kimi_k2, got {raw.get('model_type')!r:.80}")
    _check(raw)
    narrow = require(raw, "q_lora_rank") if raw.get("q_lora_rank") is not None else None
    sizes = (require(raw, x) for x in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    eps = require({"latent_norm_eps": 1e-6, **raw}, "latent_norm_eps", float)
    heads, rope = require(raw, "num_attention_heads"), rope_config(raw)
    attention = LatentAttentionConfig(heads, narrow, *sizes, rope=rope, eps=eps)
    if attention.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even for rotary embedding, got {attention.qk_rope_head_dim}")
    experts = ExpertsConfig(
        *(require(raw, name) for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")),
        norm_topk_prob=_flag(raw, "norm_topk_prob"),
        scores="sigmoid",
        correction_bias=True,
        routed_scaling_factor=require(raw, "routed_scaling_factor", float),
    )
    depth, inner = require(raw, "num_hidden_layers"), require(raw, "intermediate_size")
    dense = raw["first_k_dense_replace"]  # layers without experts, the first ones
    return DeepseekV3Config(
        **target_fields(raw),
        layers=tuple(LayerConfig(attention, inner, experts if i >= dense else None) for i in range(depth)),
        model_type=model_type,
        shared_inner=require(raw, "n_shared_experts") * experts.intermediate_size,
        interleaved=_flag(raw, "rope_interleave"),
        nested=nested,
        predicting=raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0,
    )


def _check(raw: Raw) -> None:
    """Raises ValueError for what is unknown or unsupported, and where transformers' default is not what is here."""
    rotated, plain = raw.get("qk_rope_head_dim"), raw.get("qk_nope_head_dim")
    same: Raw = {"num_key_value_heads": raw.get("num_attention_heads"), "head_dim": rotated}
    if isinstance(rotated, int) and isinstance(plain, int):
        same = {**same, "qk_head_dim": rotated + plain}
    check_fields(raw, [*DECODER_FIELDS, *_FIELDS], {**_FIXED, **same})
    for name in ("n_group", "topk_group", "first_k_dense_replace"):
        if raw.get(name) is None:
            raise ValueError(f"config.json must give {name}: transformers' default is that of another model")
    dense = raw["first_k_dense_replace"]
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise ValueError(f"config.json: first_k_dense_replace must be a number of layers, got {dense!r:.80}")


def _flag(raw: Raw, name: str) -> bool:
    """A field that is true unless it is given."""
    value = raw.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"config.json: {name} must be true or false, got {value!r:.80}")
    return value is not False


class Layer(decoder.Layer):
    """A layer with latent attention; experts have one beside them that every token goes through."""

    def attention(self) -> LatentAttention:
        mixer = self.layer.mixer
        assert isinstance(mixer, LatentAttentionConfig)
        return LatentAttention(self.config.hidden_size, mixer, name="self_attn")

    def mlp(self, ctx: Pass) -> Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]:
        c, mlp = self.config, super().mlp(ctx)
        assert isinstance(c, DeepseekV3Config)
        if self.layer.experts is None:
            return mlp
        shared = MLP(c.hidden_size, c.shared_inner, self.layout, name="shared_experts")
        return lambda h: mlp(h) + shared(h)


class Model(decoder.Decoder):
    layer = Layer


def tensors(config: DeepseekV3Config, layout: Layout = WHOLE) -> Table:
    D, formats = config.hidden_size, config.storage.of

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        assert isinstance(layer.mixer, LatentAttentionConfig)
        table = _attention(config, layer.mixer, f"{path}/self_attn", f"{prefix}.self_attn", layout)
        table |= tables.norms(path, prefix, D, "input_layernorm", "post_attention_layernorm")
        mlp = f"{prefix}.mlp"
        if layer.experts is None:
            return table | tables.swiglu(f"{path}/mlp", mlp, D, layer.intermediate_size, layout, formats=formats)
        correction = "gate.e_score_correction_bias"
        table |= tables.experts(
            f"{path}/experts", mlp, D, layer.experts, layout, correction=correction, formats=formats
        )
        shared = f"{path}/shared_experts", f"{mlp}.shared_experts"
        return table | tables.swiglu(*shared, D, config.shared_inner, layout, formats=formats)

    outside = "language_model." if config.nested else ""
    return tables.decoder(config, layer_table, f"{outside}model", f"{outside}lm_head")


def _attention(config: DeepseekV3Config, c: LatentAttentionConfig, path: str, prefix: str, layout: Layout) -> Table:
    """Rotated dimensions that are stored side by side get the order in which they are rotated: halves."""
    D, N, R, shards = config.hidden_size, c.num_heads, c.qk_rope_head_dim, layout.shards
    halves = [*range(0, R, 2), *range(1, R, 2)] if config.interleaved else list(range(R))
    of_head = [*range(c.qk_nope_head_dim), *(c.qk_nope_head_dim + i for i in halves)]
    of_heads = [head * c.head_dim + i for head in range(N) for i in of_head]
    of_vector = [*range(c.kv_lora_rank), *(c.kv_lora_rank + i for i in halves)]

    def weight(shards: int, width: int, *layers: tuple, product: bool = True) -> Leaf | QuantisedLeaf:
        named = [weights.Outputs(f"{prefix}.{name}", *rest) for name, *rest in layers]
        return weights.linear(named, width, shards, formats=config.storage.of, product=product)

    vectors = "kv_a_proj_with_mqa", c.vector, 1, of_vector
    table: Table = {
        **tables.norms(path, prefix, c.kv_lora_rank, "kv_a_layernorm"),
        f"{path}/kv_b_proj": weight(shards, c.kv_lora_rank, ("kv_b_proj", N * c.up_dim), product=False),
        f"{path}/o_proj/weight": weight(1, N * c.v_head_dim, ("o_proj", D)),
    }
    if c.q_lora_rank is None:
        table[f"{path}/q_proj/weight"] = weight(shards, D, ("q_proj", N * c.head_dim, 1, of_heads))
        table[f"{path}/kv_a_proj/weight"] = weight(1, D, vectors)
    else:
        table[f"{path}/qkv_a_proj/weight"] = weight(1, D, ("q_a_proj", c.q_lora_rank), vectors)
        table |= tables.norms(path, prefix, c.q_lora_rank, "q_a_layernorm")
        table[f"{path}/q_b_proj/weight"] = weight(shards, c.q_lora_rank, ("q_b_proj", N * c.head_dim, 1, of_heads))
    return table


def ignored(config: DeepseekV3Config) -> tuple[str, ...]:
    """Vision and multi-token prediction are not read."""
    outside = "language_model." if config.nested else ""
    first = config.num_hidden_layers
    predicting = (f"{outside}model.layers.{first + i}.*" for i in range(config.predicting))
    return (*tables.ignored(config), *predicting, *(("vision_tower.*", "mm_projector.*") if config.nested else ()))
