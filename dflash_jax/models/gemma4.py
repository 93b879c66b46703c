"""Gemma 4 targets, dense or with experts beside the MLP (`gemma4`, `gemma4_text`): sliding and global layers have heads
of two shapes and two ropes.

Reference: transformers `models/gemma4/modeling_gemma4.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dflash_jax.checkpoint import Table, copied
from dflash_jax.config import AttentionConfig, ExpertsConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    attention_config,
    check_fields,
    layer_types,
    require,
    target_fields,
    text_config,
)
from dflash_jax.mesh import WHOLE, Layout, on_every_device
from dflash_jax.models import decoder, tables
from dflash_jax.models.attention import Pass
from dflash_jax.models.experts import Experts
from dflash_jax.models.layers import MLP
from dflash_jax.models.norms import Float32RMSNorm, RMSNorm
from dflash_jax.sharding import Rule

ACTIVATION = "gelu_pytorch_tanh"
_FIELDS = """
    layer_types sliding_window global_head_dim num_global_key_value_heads per_layer_config attention_k_eq_v
    enable_moe_block num_experts top_k_experts moe_intermediate_size final_logit_softcapping
    use_bidirectional_attention vocab_size_per_layer_input
""".split()
# What E2B and E4B have.
_REFUSED = {
    "hidden_size_per_layer_input": "inputs of their own for every layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_double_wide_mlp": "an MLP of double width",
}
# Of a config whose text model is one part of several.
_OUTSIDE = """
    vision_config audio_config image_token_id video_token_id audio_token_id boi_token_id eoi_token_id boa_token_id
    eoa_token_id eoa_token_index vision_soft_tokens_per_image
""".split()
_NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_EXPERT_NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
RULES = (Rule(r"\w+_layernorm_[12]/weight", 1, P()), Rule(r"layer_scalar", 1, P()))


@dataclass(frozen=True)
class Gemma4Config(TargetConfig):
    """A Gemma 4. Its layers with experts have an MLP beside them, of `intermediate_size`.

    Attributes:
        final_logit_softcapping: logits become `cap * tanh(logit / cap)`; None leaves them.
        nested: whether the text model's tensors stand inside another model's.
    """

    final_logit_softcapping: float | None = None
    nested: bool = False

    def indivisible(self, layout: Layout) -> str | None:
        inner = next((n for layer in self.layers if (n := layer.intermediate_size) % layout.shards), None)
        return f"an inner width of {inner}" if inner else super().indivisible(layout)


def config(raw: Raw) -> Gemma4Config:
    """Reads `config.json`, of the text model or of one that it is part of."""
    model_type = raw["model_type"]
    raw, nested = text_config(raw, _OUTSIDE)
    if small := [f"{what} ({name})" for name, what in _REFUSED.items() if raw.get(name)]:
        raise ValueError(f"config.json: Gemma 4 with {', '.join(small)}, as in E2B and E4B, is not supported")
    check_fields(
        raw, [*DECODER_FIELDS, *_FIELDS, *_REFUSED], {"hidden_activation": ACTIVATION, "attention_bias": False}
    )
    seen = raw.get("use_bidirectional_attention")
    if seen not in (None, "vision"):  # positions of images see each other, of which there are none
        raise ValueError(f"config.json: use_bidirectional_attention must be null or 'vision', got {seen!r:.80}")
    inner, experts = require(raw, "intermediate_size"), _experts(raw) if raw.get("enable_moe_block") else None
    capped = raw.get("final_logit_softcapping") is not None
    return Gemma4Config(
        **target_fields({**raw, "tie_word_embeddings": raw.get("tie_word_embeddings") is not False}),
        layers=tuple(LayerConfig(mixer, inner, experts) for mixer in _mixers(raw)),
        model_type=model_type,
        embedding_scale=require(raw, "hidden_size") ** 0.5,
        final_logit_softcapping=require(raw, "final_logit_softcapping", float) if capped else None,
        nested=nested,
    )


def _experts(raw: Raw) -> ExpertsConfig:
    sizes = (require(raw, name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return ExpertsConfig(*sizes, norm_topk_prob=True, activation=ACTIVATION, per_expert_scale=True)


def _mixers(raw: Raw) -> list[AttentionConfig]:
    """The attention of every layer; the last one is always global, and so is every sixth by default."""
    depth, ropes = require(raw, "num_hidden_layers"), raw.get("rope_parameters")
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(depth)]
    types = [*layer_types(raw, depth, default=types)[:-1], "full_attention"]
    if not isinstance(ropes, Mapping) or not all(isinstance(ropes.get(kind), Mapping) for kind in types):
        raise ValueError(
            f"config.json: rope_parameters must have one object for each of layer_types, got {ropes!r:.80}"
        )
    mixers, eps = [], require(raw, "rms_norm_eps", float)
    for kind, shape in zip(types, _shapes(raw, types), strict=True):
        window = require(raw, "sliding_window") if kind == "sliding_attention" else None
        # Global layers may have no values of their own.
        how = {"window": window, "values_are_keys": window is None and bool(raw.get("attention_k_eq_v"))}
        of_kind = {**raw, **shape, "rope_parameters": ropes[kind]}
        mixers.append(attention_config(of_kind, scale=1.0, qk_norm=eps, value_norm=eps, **how))
    return mixers


def _shapes(raw: Raw, types: list[str]) -> list[Raw]:
    """What differs in the heads of every layer, as published configs say it (by type), or those that transformers
    saves (by layer).

    Raises:
        ValueError: both do, and differ; or neither; or something else differs.
    """
    shape = {"head_dim": raw.get("global_head_dim")}
    if raw.get("attention_k_eq_v"):
        shape["num_key_value_heads"] = raw.get("num_global_key_value_heads")
    shape = {name: value for name, value in shape.items() if value is not None}
    by_type: list[Raw] = [shape if kind == "full_attention" else {} for kind in types]
    given = raw.get("per_layer_config")
    if given is None:
        require(raw, "global_head_dim")
        return by_type
    by_layer: list[Raw] = [{} for _ in types]
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: per_layer_config must be an object, got {given!r:.80}")
    for layer, shape_of in given.items():
        known = isinstance(shape_of, Mapping) and set(shape_of) <= {"head_dim", "num_key_value_heads"}
        if not known or not str(layer).isdecimal() or int(layer) >= len(types):
            raise ValueError(
                "config.json: per_layer_config must give head_dim and num_key_value_heads of layers "
                f"0..{len(types) - 1}, got {layer!r:.80}: {shape_of!r:.80}"
            )
        by_layer[int(layer)] = {name: value for name, value in shape_of.items() if value is not None}
    if shape and by_layer != by_type:
        raise ValueError(f"config.json gives heads twice: per_layer_config {given!r:.80}, and {shape} of global layers")
    return by_layer


class Layer(decoder.Layer):
    """A layer that also norms what attention and the MLP return, and multiplies its output by a number."""

    norm_class = Float32RMSNorm

    def normed(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """`x` through a new norm of this name."""
        return Float32RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, name=name)(on_every_device(x))

    def feed_forward(self, x: Float[Array, "B T D"], ctx: Pass) -> Float[Array, "B T D"]:
        """The MLP of normed positions, or the sum of MLP and experts, where the layer has both."""
        D, eps, layer = self.config.hidden_size, self.config.rms_norm_eps, self.layer
        mlp = MLP(D, layer.intermediate_size, self.layout, activation=ACTIVATION, name="mlp")
        out = mlp(self.normed("pre_feedforward_layernorm", x))
        if layer.experts is None:
            return out
        experts = Experts(D, layer.experts, self.layout, name="experts")
        routed = RMSNorm(D, eps, name="router_norm")(x) * D**-0.5
        beside = experts(self.normed("pre_feedforward_layernorm_2", x), ctx.valid, routed)
        return self.normed("post_feedforward_layernorm_1", out) + self.normed("post_feedforward_layernorm_2", beside)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t D"], ctx: Pass, entry: Any, shared: Any
    ) -> tuple[Float[Array, "b t D"], Any]:
        h, fresh = self.attention()(self.normed("input_layernorm", x), ctx, entry, shared)
        x = x + self.normed("post_attention_layernorm", h)
        x = x + self.normed("post_feedforward_layernorm", self.feed_forward(x, ctx))
        return on_every_device(x * self.param("layer_scalar", nn.initializers.ones, (1,))[0]), fresh


class Model(decoder.Decoder):
    """A `Decoder` of these layers, with capped logits."""

    layer = Layer

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits, capped."""
        assert isinstance(self.config, Gemma4Config)
        logits, cap = self.head(hidden), self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def tensors(config: Gemma4Config, layout: Layout = WHOLE) -> Table:
    D, formats = config.hidden_size, config.storage.of

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        attention = f"{path}/self_attn", f"{prefix}.self_attn"
        table = tables.attention(*attention, D, layer.attention, layout, formats=formats)
        table |= tables.norms(path, prefix, D, *_NORMS, *(_EXPERT_NORMS if layer.experts else ()))
        table |= tables.swiglu(f"{path}/mlp", f"{prefix}.mlp", D, layer.intermediate_size, layout, formats=formats)
        table[f"{path}/layer_scalar"] = copied(f"{prefix}.layer_scalar", 1)
        if layer.experts is None:
            return table
        E = layer.experts.num_experts
        table |= tables.stored_together(f"{path}/experts", f"{prefix}.experts", D, layer.experts, layout)
        table[f"{path}/experts/router"] = copied(f"{prefix}.router.proj.weight", E, D)
        table[f"{path}/experts/per_expert_scale"] = copied(f"{prefix}.router.per_expert_scale", E)
        table[f"{path}/router_norm/weight"] = copied(f"{prefix}.router.scale", D)
        return table

    return tables.decoder(config, layer_table, "model.language_model" if config.nested else "model")


def ignored(config: Gemma4Config) -> tuple[str, ...]:
    """Vision and audio are not read."""
    return *tables.ignored(config), *(
        f"model.{part}.*" for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    )
