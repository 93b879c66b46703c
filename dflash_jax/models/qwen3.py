"""Qwen3 dense targets (`model_type: qwen3`).

Reference: transformers `models/qwen3/modeling_qwen3.py`.
"""

from dataclasses import replace
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Cache, Fresh
from dflash_jax.checkpoint import Table, copied
from dflash_jax.config import (
    DECODER_FIELDS,
    LayerConfig,
    Raw,
    TargetConfig,
    attention_config,
    check_fields,
    decoder_fields,
    layer_types,
    require,
    token_ids,
)
from dflash_jax.mesh import WHOLE, Layout, on_every_device
from dflash_jax.models.attention import Attention, Pass, run_layers
from dflash_jax.models.layers import MLP, RMSNorm, project
from dflash_jax.models.tables import decoder_layer
from dflash_jax.sharding import gathered, lookup


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows follow `layer_types`, and only where `use_sliding_window` is set."""
    check_fields(raw, DECODER_FIELDS, {"hidden_act": "silu", "mlp_bias": False})
    depth = require(raw, "num_hidden_layers")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    types = layer_types(raw, depth)
    if raw.get("layer_types") is None and window is not None:
        full = raw.get("max_window_layers", 28)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(depth)]
    if window is not None:
        require(raw, "sliding_window")
    if "sliding_attention" in types and window is None:
        raise ValueError("sliding_attention layers need use_sliding_window and sliding_window in config.json")
    attention, inner = attention_config(raw), require(raw, "intermediate_size")
    windows = (window if kind == "sliding_attention" else None for kind in types)
    return TargetConfig(
        **decoder_fields(raw),
        layers=tuple(LayerConfig(replace(attention, window=each), inner) for each in windows),
        model_type="qwen3",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        attention_bias=bool(raw.get("attention_bias")),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        max_position_embeddings=require(raw, "max_position_embeddings") if raw.get("max_position_embeddings") else 0,
    )


class Layer(nn.Module):
    """Pre-norm decoder layer with a norm of every query and key head."""

    config: TargetConfig
    layer: LayerConfig
    layout: Layout

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: Any, shared: Fresh | None
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        c, layer, D, eps = self.config, self.layer, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(D, layer.mixer, self.layout, c.attention_bias, eps, name="self_attn")
        h, fresh = attention(RMSNorm(D, eps, name="input_layernorm")(x), at, entry, shared)
        x = on_every_device(x + h)
        h = RMSNorm(D, eps, name="post_attention_layernorm")(x)
        return on_every_device(x + MLP(D, layer.intermediate_size, self.layout, name="mlp")(h)), fresh


class Model(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    config: TargetConfig
    layout: Layout

    def setup(self):
        c, table = self.config, (self.config.vocab_size, self.config.hidden_size)
        self.embed_tokens = self.param("embed_tokens", nn.initializers.normal(0.02), table)
        self.layers = [Layer(c, layer, self.layout) for layer in c.layers]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", nn.initializers.normal(0.02), table)

    def table(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding table, as a drafter reads them."""
        return lookup(self.embed_tokens, tokens)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings as the first layer reads them."""
        return self.table(tokens)

    def forward(
        self, tokens: Int[Array, "B T"], at: Pass, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T FD"], tuple[Any, ...]]:
        """Returns normed hidden states, the outputs of the tapped layers side by side, and what is fresh."""
        x, features, fresh = run_layers(self.layers, self.config.layers, self.embed(tokens), at, cache, taps)
        return self.norm(x), features, fresh

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 products with the head, as a drafter reads them."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project(hidden, gathered(head, "lm_head"))

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of the target."""
        return self.head(hidden)


def tensors(config: TargetConfig, layout: Layout = WHOLE) -> Table:
    """Checkpoint tensors of every parameter."""
    D = config.hidden_size
    table: Table = {
        "embed_tokens": copied("model.embed_tokens.weight", config.vocab_size, D),
        "norm/weight": copied("model.norm.weight", D),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = copied("lm_head.weight", config.vocab_size, D)
    for i, layer in enumerate(config.layers):
        bias = config.attention_bias
        table |= decoder_layer(f"layers_{i}", f"model.layers.{i}", D, layer, layout, bias=bias, qk_norm=True)
    return table


def ignored(config: TargetConfig) -> tuple[str, ...]:
    """Endings of tensors that published checkpoints carry and nobody reads."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_word_embeddings else ()))
