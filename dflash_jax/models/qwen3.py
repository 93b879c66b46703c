"""Qwen3 dense targets (`model_type: qwen3`).

Reference: transformers `models/qwen3/modeling_qwen3.py`.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import checkpoint
from dflash_jax.cache import Block, Cache
from dflash_jax.config import (
    DECODER_FIELDS,
    LayerConfig,
    Raw,
    TargetConfig,
    check_fields,
    decoder_fields,
    layer_types,
    require,
    token_ids,
)
from dflash_jax.models.layers import DecoderLayer, Pass, RMSNorm, apply_layer, project
from dflash_jax.sharding import lookup, whole


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
    return TargetConfig(
        **decoder_fields(raw),
        layers=tuple(LayerConfig(window if kind == "sliding_attention" else None) for kind in types),
        model_type="qwen3",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        max_position_embeddings=require(raw, "max_position_embeddings") if raw.get("max_position_embeddings") else 0,
    )


class Model(nn.Module):
    """Embedding, decoder layers, final norm and head."""

    config: TargetConfig

    def setup(self):
        c, table = self.config, (self.config.vocab_size, self.config.hidden_size)
        self.embed_tokens = self.param("embed_tokens", nn.initializers.normal(0.02), table)
        self.layers = [DecoderLayer(c, layer) for layer in c.layers]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", nn.initializers.normal(0.02), table)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return lookup(self.embed_tokens, tokens)

    def forward(
        self, tokens: Int[Array, "B T"], at: Pass, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T FD"], tuple[Block, ...]]:
        """Returns normed hidden states, the outputs of the tapped layers side by side, and fresh keys and values."""
        x = self.embed(tokens)
        blocks, outputs = [], {-1: x}
        for i, layer in enumerate(self.layers):
            x, block = apply_layer(layer, x, at, cache.entries[i])
            blocks.append(block)
            if i in taps:
                outputs[i] = x
        features = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else x[..., :0]
        return self.norm(x), features, tuple(blocks)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project(hidden, whole(head, "lm_head"))


def tensors(config: TargetConfig) -> checkpoint.Table:
    """Checkpoint tensors of every parameter."""
    table = {
        "embed_tokens": checkpoint.copied("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
        "norm/weight": checkpoint.copied("model.norm.weight", config.hidden_size),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = checkpoint.copied("lm_head.weight", config.vocab_size, config.hidden_size)
    for i in range(config.num_hidden_layers):
        table |= checkpoint.decoder_layer(config, f"layers_{i}", f"model.layers.{i}", fuse_qkv=True)
    return table


def ignored(config: TargetConfig) -> tuple[str, ...]:
    """Endings of tensors that published checkpoints carry and nobody reads."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_word_embeddings else ()))
