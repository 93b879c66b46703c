"""Qwen3-Next and Qwen3.5 targets, dense or with experts (`qwen3_next`, `qwen3_5`, `qwen3_5_moe`): three of four layers
have linear attention.

Reference: transformers `models/qwen3_next/modeling_qwen3_next.py`, `models/qwen3_5/modeling_qwen3_5.py`.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Self

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dflash_jax.checkpoint import Merged, Section, Source, Table, copied, fused, of_product
from dflash_jax.config import ExpertsConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    check_fields,
    layer_types,
    partly_rotated,
    require,
    target_fields,
    text_config,
    token_ids,
)
from dflash_jax.mesh import HEADS, WHOLE, Layout
from dflash_jax.models import decoder, tables
from dflash_jax.models.attention import Pass
from dflash_jax.models.layers import MLP, project
from dflash_jax.models.linear_attention import LinearAttention, LinearAttentionConfig
from dflash_jax.models.norms import RMSNorm
from dflash_jax.models.weights import Outputs, linear, source
from dflash_jax.sharding import Rule

_FIELDS = """
    layer_types full_attention_interval partial_rotary_factor linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
    num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size norm_topk_prob
    decoder_sparse_step mlp_only_layers router_aux_loss_coef
    mtp_num_hidden_layers mtp_use_dedicated_embeddings
""".split()
# What published configs say that the family has anyway; another value is another model.
_FIXED: Raw = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
}
# Of a config whose text model is one part of several; the others are not read.
_OUTSIDE = """
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only
""".split()
RULES = (
    Rule(r"linear_attn/in_proj/weight", 2, P(HEADS, "fsdp")),
    Rule(r"linear_attn/out_proj/weight", 2, P("fsdp", HEADS)),
    Rule(r"linear_attn/conv", 2, P(HEADS)),
    Rule(r"linear_attn/(A_log|dt_bias)", 1, P(HEADS)),
    Rule(r"linear_attn/norm", 1, P()),
    Rule(r"shared_gate", 2, P()),
)


@dataclass(frozen=True)
class Qwen3NextConfig(TargetConfig):
    """A Qwen3-Next or Qwen3.5.

    Attributes:
        shared_inner: inner width of the expert that every token goes through; 0 where there are no experts.
        grouped: whether linear attention's projections are stored by key head, as in Qwen3-Next.
        nested: whether the text model's tensors stand inside another model's.
        apart: whether each expert has tensors of its own, as in Qwen3-Next and in what transformers saves of Qwen3.5.
    """

    shared_inner: int = 0
    grouped: bool = False
    nested: bool = False
    apart: bool = False

    def with_tensors(self, names: Collection[str]) -> Self:
        return replace(self, apart=any(".mlp.experts.0." in name for name in names))


def config(raw: Raw) -> Qwen3NextConfig:
    """Reads `config.json`, of the text model or of one that it is part of."""
    model_type = raw["model_type"]
    raw, nested = text_config(raw, _OUTSIDE)
    check_fields(raw, [*DECODER_FIELDS, *_FIELDS], _FIXED)
    depth, norm = require(raw, "num_hidden_layers"), require(raw, "rms_norm_eps", float)
    attention = replace(partly_rotated(raw, 0.25), qk_norm=norm, gate=True)
    sizes = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    linear = LinearAttentionConfig(*(require(raw, f"linear_{name}") for name in sizes))
    if linear.num_value_heads % linear.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads {linear.num_value_heads} must be a multiple of linear_num_key_heads "
            f"{linear.num_key_heads}"
        )
    every = require({"full_attention_interval": raw.get("full_attention_interval", 4)}, "full_attention_interval")
    kinds = "linear_attention", "full_attention"
    types = layer_types(raw, depth, kinds, [kinds[(i + 1) % every == 0] for i in range(depth)])
    experts = _experts(raw, model_type)
    step = require(raw, "decoder_sparse_step") if raw.get("decoder_sparse_step") is not None else 1
    plain = token_ids(raw.get("mlp_only_layers"))
    inner = require(raw, "intermediate_size") if raw.get("intermediate_size") or not experts else 0

    def layer(i: int, kind: str) -> LayerConfig:
        has = experts is not None and i not in plain and (i + 1) % step == 0
        return LayerConfig(attention if kind == "full_attention" else linear, inner, experts if has else None)

    return Qwen3NextConfig(
        **target_fields(raw),
        layers=tuple(layer(i, kind) for i, kind in enumerate(types)),
        model_type=model_type,
        shared_inner=require(raw, "shared_expert_intermediate_size") if experts else 0,
        grouped=model_type == "qwen3_next",
        nested=nested,
        apart=model_type == "qwen3_next",
    )


def _experts(raw: Raw, model_type: str) -> ExpertsConfig | None:
    if model_type in ("qwen3_5", "qwen3_5_text"):
        return None
    always = model_type != "qwen3_next"  # Qwen3.5 always divides by the sum
    if not always and not isinstance(raw.get("norm_topk_prob"), bool):
        raise ValueError(f"config.json must give norm_topk_prob, true or false, got {raw.get('norm_topk_prob')!r:.80}")
    sizes = (require(raw, name) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    return ExpertsConfig(*sizes, norm_topk_prob=always or raw["norm_topk_prob"])


class Norm(RMSNorm):
    """A root-mean-square norm that multiplies by one plus its weight, and is rounded after that."""

    wide, added = True, 1.0


class Layer(decoder.Layer):
    """A layer with linear or gated attention; experts have one beside them that every token goes through."""

    norm_class = Norm

    def attention(self) -> Callable[..., tuple[Array, Any]]:
        c, mixer = self.config, self.layer.mixer
        if isinstance(mixer, LinearAttentionConfig):
            return LinearAttention(c.hidden_size, mixer, c.rms_norm_eps, self.layout, name="linear_attn")
        return super().attention()

    def mlp(self, ctx: Pass) -> Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]:
        c, D, mlp = self.config, self.config.hidden_size, super().mlp(ctx)
        assert isinstance(c, Qwen3NextConfig)
        if self.layer.experts is None:
            return mlp
        shared = MLP(D, c.shared_inner, self.layout, name="shared_expert")
        gate = self.param("shared_gate", nn.initializers.normal(0.02), (1, D))

        def both(h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
            passes = jax.nn.sigmoid(project(h, gate).astype(h.dtype))
            return mlp(h) + passes * shared(h)

        return both


class Model(decoder.Decoder):
    layer = Layer


def tensors(config: Qwen3NextConfig, layout: Layout = WHOLE) -> Table:
    formats = config.storage.of

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        D = config.hidden_size
        table = tables.norms(path, prefix, D, "input_layernorm", "post_attention_layernorm")
        if isinstance(layer.mixer, LinearAttentionConfig):
            mixing = _linear_attention(f"{prefix}.linear_attn", D, layer.mixer, layout, config)
            table |= {f"{path}/linear_attn/{name}": leaf for name, leaf in mixing.items()}
        else:
            table |= tables.attention(
                f"{path}/self_attn", f"{prefix}.self_attn", D, layer.attention, layout, formats=formats
            )
        mlp = f"{prefix}.mlp"
        if layer.experts is None:
            return table | tables.swiglu(f"{path}/mlp", mlp, D, layer.intermediate_size, layout, formats=formats)
        if config.apart:
            table |= tables.experts(f"{path}/experts", mlp, D, layer.experts, layout, formats=formats)
        else:
            table[f"{path}/experts/router"] = copied(f"{mlp}.gate.weight", layer.experts.num_experts, D)
            table |= tables.stored_together(f"{path}/experts", f"{mlp}.experts", D, layer.experts, layout)
        table[f"{path}/shared_gate"] = copied(f"{mlp}.shared_expert_gate.weight", 1, D)
        return table | tables.swiglu(
            f"{path}/shared_expert", f"{mlp}.shared_expert", D, config.shared_inner, layout, formats=formats
        )

    return tables.decoder(config, layer_table, "model.language_model" if config.nested else "model")


def _linear_attention(
    prefix: str, width: int, c: LinearAttentionConfig, layout: Layout, config: Qwen3NextConfig
) -> Table:
    """Queries, keys, values, gates, betas and decays as one weight. Quantized ones are dequantized as they are read,
    for betas and decays are plain."""
    formats = config.storage.of
    stored = lambda name, size: source(Outputs(f"{prefix}.in_proj_{name}", size), width, formats)
    qkv, heads, channels = [c.key_size, c.key_size, c.value_size], c.num_value_heads, c.channels
    if config.grouped:  # by key head, in two tensors
        groups = ("qkvz", [*qkv, c.value_size]), ("ba", [heads, heads])
        sections = [x for name, sizes in groups for x in _by_key_head(stored(name, sum(sizes)), c.num_key_heads, sizes)]
    else:
        rest = ("z", c.value_size), ("b", heads), ("a", heads)
        sections = _one_after_another(stored("qkv", channels), qkv)
        sections += [Section(stored(name, size)) for name, size in rest]
    # The convolution's channels are always all queries, all keys, all values.
    taps = Merged(f"{prefix}.conv1d.weight", (channels, c.conv_kernel_dim), c.conv_kernel_dim)
    return {
        "in_proj/weight": of_product(fused(sections, layout.shards)),
        "conv": fused(_one_after_another(taps, qkv), layout.shards),
        "A_log": copied(f"{prefix}.A_log", heads, dtype="float32"),
        "dt_bias": copied(f"{prefix}.dt_bias", heads, dtype="float32"),
        "norm": copied(f"{prefix}.norm.weight", c.value_head_dim),
        "out_proj/weight": linear([Outputs(f"{prefix}.out_proj", width)], c.value_size, formats=formats),
    }


def _one_after_another(source: Source, sizes: list[int]) -> list[Section]:
    """Sections of these sizes."""
    return [Section(source, rows) for rows in _stretches(sizes)]


def _by_key_head(source: Source, heads: int, sizes: list[int]) -> list[Section]:
    """Sections of a tensor that has the rows of every section for a key head, then for the next."""
    per_head = sum(sizes) // heads
    of_head = _stretches([size // heads for size in sizes])
    return [Section(source, [per_head * head + row for head in range(heads) for row in rows]) for rows in of_head]


def _stretches(sizes: list[int]) -> list[range]:
    ends = itertools.accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def ignored(config: Qwen3NextConfig) -> tuple[str, ...]:
    """Vision and multi-token prediction are not read."""
    return (*tables.ignored(config), "model.visual.*", "mtp.*")
