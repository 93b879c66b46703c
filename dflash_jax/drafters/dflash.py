"""The block-diffusion drafter (DFlash v1; paper section 3, reference `dflash/model.py`).

One pass denoises `[anchor, MASK, ...]`. Every layer attends to the committed context through keys and
values projected from the target's own features, and to the block itself.
"""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax import cache as caches
from dflash_jax import checkpoint, sharding
from dflash_jax.cache import Block, Cache
from dflash_jax.config import parse_dtype
from dflash_jax.drafters.config import DrafterConfig, drafter_config
from dflash_jax.models.layers import (
    DecoderLayer,
    Linear,
    Pass,
    RMSNorm,
    Rope,
    matmul,
    project,
    rms_norm,
    rope_tables,
    rotate,
    unfuse,
)
from dflash_jax.target import Target


class Model(nn.Module):
    """Fusion of tapped features, draft layers and final norm.

    The key and value projections of all layers are one array, `kv_proj` [L, 2*K*H, D]: block slots use
    a layer's slice, and committed features go through all layers in one product.
    """

    config: DrafterConfig

    def setup(self):
        c = self.config
        kv = 2 * c.num_key_value_heads * c.head_dim
        self.layers = [DecoderLayer(c, layer) for layer in c.layers]
        self.kv_proj = self.param("kv_proj", nn.initializers.normal(0.02), (len(c.layers), kv, c.hidden_size))
        self.k_norm = self.param("k_norm", nn.initializers.ones, (len(c.layers), c.head_dim))
        if c.attention_bias:
            self.kv_bias = self.param("kv_bias", nn.initializers.zeros, (len(c.layers), kv))
        self.fc = Linear((len(c.target_layer_ids) * c.target_hidden_size, c.hidden_size))
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Float[Array, "B T D"], at: Pass, cache: Cache, remat: bool
    ) -> tuple[Float[Array, "B T D"], tuple[Block, ...]]:
        """Final-normed hidden states of the block; its keys and values are never committed.

        With `remat`, a backward pass computes each layer again instead of keeping its insides.
        """
        blocks, kv_proj = [], sharding.whole(self.kv_proj, "kv_proj")
        for i in range(len(self.layers)):

            def layer(model: Model, x: Float[Array, "B T D"], i: int = i) -> tuple[Array, Block]:
                def project(h: Float[Array, "B T D"]) -> tuple[Array, Array]:
                    kv = matmul(h, kv_proj[i])
                    if model.config.attention_bias:
                        kv = kv + model.kv_bias[i][None, None]
                    return model._heads(kv, model.k_norm[i], at.rope)

                return model.layers[i](x, at, cache.entries[i], project)

            x, block = (nn.remat(layer) if remat else layer)(self, x)
            blocks.append(block)
        return self.norm(x), tuple(blocks)

    def fuse(self, features: Float[Array, "B T FD"]) -> Float[Array, "B T D"]:
        """One context vector per position."""
        return self.hidden_norm(self.fc(features))

    def context(self, features: Float[Array, "B T FD"], rope: Rope) -> tuple[Block, ...]:
        """KV injection: keys and values of every layer for committed positions (method 2.5)."""
        fused, kv_proj = self.fuse(features), sharding.whole(self.kv_proj, "kv_proj")
        if self.config.shards == 1:
            kv = matmul(fused, kv_proj.reshape(-1, fused.shape[-1]))
            layers = jnp.split(kv, len(self.layers), axis=-1)
        else:  # rows are sharded within a layer, and would have to move to be one axis with the layers
            kv = jnp.einsum("btd,lmd->lbtm", fused, kv_proj, preferred_element_type=jnp.float32)
            layers = list(kv.astype(fused.dtype))
        if self.config.attention_bias:
            layers = [kv + self.kv_bias[i][None, None] for i, kv in enumerate(layers)]
        return tuple(Block(*self._heads(kv, self.k_norm[i], rope)) for i, kv in enumerate(layers))

    def _heads(self, kv: Float[Array, "B T M"], weight: Float[Array, " H"], rope: Rope) -> tuple[Array, Array]:
        B, T, K, H = *kv.shape[:2], self.config.num_key_value_heads, self.config.head_dim
        k, v = (x.reshape(B, T, K, H) for x in unfuse(kv, (K * H, K * H), self.config.shards))
        k = rotate(rms_norm(k, weight, self.config.rms_norm_eps), rope)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)


class Drafter(struct.PyTreeNode):
    """A loaded drafter. A pytree of its parameters; see `Target`."""

    params: Any
    config: DrafterConfig = struct.field(pytree_node=False)

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["kv_proj"].dtype

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.config.target_layer_ids

    def proposals(self, block_size: int) -> int:
        """Tokens proposed by a pass of `block_size` slots."""
        return self.config.proposals(block_size)

    def init_cache(self, rows: int, slots: int) -> Cache:
        """An empty cache; windowed layers hold no more than their window."""
        return caches.init_cache(self.config, rows, slots, self.dtype)

    def forward(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths: Int[Array, " B"] | None = None,
        starts: Int[Array, "B T"] | None = None,
        per_row: int | None = None,
        remat: bool = False,
    ) -> Float[Array, "B T D"]:
        """Denoises embedded block slots against the committed context; reads the cache only.

        Args:
            x, positions: the blocks.
            cache: context.
            lengths: context each block sees, `cache.lengths` by default.
            starts: where the document of each position begins (see `Target.forward`).
            per_row: see `models.layers.Pass`.
            remat: see `Model.forward`.
        """
        within = positions if starts is None else positions - starts
        lengths = cache.lengths if lengths is None else lengths
        at = Pass(positions, self._rope(within), None, lengths, jnp.int32(0), starts, per_row)
        return self._apply("forward", x, at, cache, remat)[0]

    def context(
        self,
        features: Float[Array, "B T FD"],
        positions: Int[Array, "B T"],
        cache: Cache | None = None,
        *,
        row: Int[Array, ""] | int = 0,
        starts: Int[Array, "B T"] | None = None,
    ) -> tuple[Block, ...]:
        """Keys and values of target features, for `cache.commit` into the draft cache.

        Args:
            features, positions: of the target's committed positions.
            cache, row: what is committed before them, from which cache row on. Not read here: every position's
                keys and values follow from its own features alone.
            starts: where the document of each position begins (see `Target.forward`).
        """
        within = positions if starts is None else positions - starts
        return self._apply("context", features.astype(self.dtype), self._rope(within))

    def logits(
        self,
        target: Target,
        anchor: Int[Array, " B"],
        cache: Cache,
        block_size: int,
    ) -> Float[Array, "B P V"]:
        """Float32 logits of the proposals for positions a+1, a+2, ... behind the anchor.

        Args:
            target: supplies embedding and head where the checkpoint has none of its own.
            anchor: last committed token of each row, at position `cache.lengths`.
            cache: draft cache holding exactly the positions before the anchor.
            block_size: slots of this pass, up to the checkpoint's.
        """
        return self.unembed(target, self.denoise(target, anchor, cache, block_size))

    def denoise(
        self,
        target: Target,
        anchor: Int[Array, " B"],
        cache: Cache,
        block_size: int,
        *,
        lengths: Int[Array, " B"] | None = None,
        starts: Int[Array, " B"] | None = None,
        per_row: int | None = None,
        remat: bool = False,
    ) -> Float[Array, "B P D"]:
        """Hidden states of the slots that predict; arguments as in `logits` and `forward`."""
        c = self.config
        lengths = cache.lengths if lengths is None else lengths
        tokens = jnp.full((anchor.shape[0], block_size), c.mask_token_id, jnp.int32).at[:, 0].set(anchor)
        positions = lengths[:, None] + jnp.arange(block_size)[None]
        x = sharding.lookup(self.params["embed_tokens"], tokens) if c.own_embedding else target.embed(tokens)
        x = (x * c.input_embedding_scale).astype(self.dtype)
        if starts is not None:
            starts = jnp.broadcast_to(starts[:, None], positions.shape)
        hidden = self.forward(x, positions, cache, lengths=lengths, starts=starts, per_row=per_row, remat=remat)
        return hidden[:, 0 if c.anchor_predicts else 1 :]

    def unembed(self, target: Target, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """Float32 logits of hidden states, by the target's head unless the checkpoint has its own."""
        c = self.config
        if c.own_head:
            logits = project(hidden, self.params["lm_head"])
        else:
            logits = target.unembed(hidden.astype(target.dtype))
        logits = logits * c.output_multiplier
        if c.final_logit_softcapping:
            logits = jnp.tanh(logits / c.final_logit_softcapping) * c.final_logit_softcapping
        return logits

    def _rope(self, positions: Int[Array, "B T"]) -> Rope:
        return rope_tables(self.config.rope, self.config.head_dim, positions, self.dtype)

    def _apply(self, method: str, *args: Any) -> Any:
        params = {k: v for k, v in self.params.items() if k not in ("embed_tokens", "lm_head")}
        return Model(self.config).apply({"params": params}, *args, method=method)


def load_drafter(source: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> Drafter:
    """Loads a DFlash v1 drafter from a local directory or a hub id; arguments and errors as `load_target`."""
    array_type = parse_dtype(dtype)
    directory = checkpoint.resolve(source, "drafter")
    config = drafter_config(checkpoint.read_json(directory / "config.json"))
    reader = checkpoint.Reader(directory, _canonical_name)
    names = reader.names()
    config = dataclasses.replace(
        config, own_embedding="embed_tokens.weight" in names, own_head="lm_head.weight" in names
    )
    config, place = sharding.shard_config(config, mesh), sharding.placement(mesh)
    params = checkpoint.load(reader, tensors(config), array_type, ignored=("rotary_emb.inv_freq",), place=place)
    return Drafter(params, config)


def _canonical_name(name: str) -> str:
    """Tensor names of published variants, as z-lab's."""
    name = name.removeprefix("model.")
    for alias, ours in (
        ("encoder.fc.", "fc."),
        ("encoder.output_norm_enc.", "hidden_norm."),
        ("midlayer.", "layers.0."),
    ):
        if name.startswith(alias):
            return ours + name.removeprefix(alias)
    return name


def tensors(config: DrafterConfig) -> checkpoint.Table:
    """Checkpoint tensors of every parameter (method 7.3)."""
    D, H, depth = config.hidden_size, config.head_dim, config.num_hidden_layers
    keys = config.num_key_value_heads // config.key_value_copies * H
    features = len(config.target_layer_ids) * config.target_hidden_size

    def keys_and_values(layer: int, kind: str, *rest: int) -> checkpoint.Leaf:
        names = [f"layers.{layer}.self_attn.{name}_proj.{kind}" for name in "kv"]
        copies = dict.fromkeys(names, config.key_value_copies)
        return checkpoint.fused([(name, keys) for name in names], *rest, shards=config.shards, copies=copies)

    norms = [checkpoint.copied(f"layers.{i}.self_attn.k_norm.weight", H) for i in range(depth)]
    table = {
        "kv_proj": checkpoint.stacked([keys_and_values(i, "weight", D) for i in range(depth)]),
        "k_norm": checkpoint.stacked(norms),
        "fc/weight": checkpoint.copied("fc.weight", D, features),
        "hidden_norm/weight": checkpoint.copied("hidden_norm.weight", D),
        "norm/weight": checkpoint.copied("norm.weight", D),
    }
    if config.attention_bias:
        table["kv_bias"] = checkpoint.stacked([keys_and_values(i, "bias") for i in range(depth)])
    if config.own_embedding:
        table["embed_tokens"] = checkpoint.copied("embed_tokens.weight", config.vocab_size, D)
    if config.own_head:
        table["lm_head"] = checkpoint.copied("lm_head.weight", config.vocab_size, D)
    for i in range(depth):
        table |= checkpoint.decoder_layer(config, f"layers_{i}", f"layers.{i}", fuse_qkv=False)
    return table
