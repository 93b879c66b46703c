"""The lattice of LiLiCorr: what scores paths through the best tokens of all slots (arXiv 2608.20530).

Shapes: B rows, P slots that predict, K candidates of a slot, L = P K of a lattice, N heads, D width of the drafter, H
of the transformer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import checkpoint
from dflash_jax.drafters.convolution import ConvolvedConfig
from dflash_jax.kernels.products import product
from dflash_jax.models.layers import Linear
from dflash_jax.models.norms import RMSNorm

FEATURES = 5  # of a candidate: log-probability, probability, its log-ratio to the best, rank, whether it is the best


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(ConvolvedConfig):
    """A LiLiCorr drafter, with convolutions or without.

    Attributes:
        lilicorr_candidate_topk: candidates of a slot.
        lilicorr_hidden_size: width of the transformer.
        lilicorr_num_layers, lilicorr_num_heads: of the transformer.
        lilicorr_mlp_ratio: width of its MLPs, by its own.
        lilicorr_factor_dim: width of the vectors whose cosines are taken.
        lilicorr_vector_eps: least length that these are divided by.
        lilicorr_logit_scale: what cosines are multiplied by, to be logits.
        slots: most slots that predict: those it was trained with.
    """

    lilicorr_candidate_topk: int
    lilicorr_hidden_size: int
    lilicorr_num_layers: int
    lilicorr_num_heads: int
    lilicorr_mlp_ratio: float
    lilicorr_factor_dim: int
    lilicorr_vector_eps: float
    lilicorr_logit_scale: float
    slots: int

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Blocks may be smaller than those of the checkpoint, whose tensors tell their size; larger ones raise
        ValueError."""
        config, shape = super().with_tensors(shapes), shapes.get("lilicorr.slot_embedding", ())
        slots = shape[2] if len(shape) == 5 else self.slots
        if self.slots > slots:
            given = f"{slots + 1}, with which its head was trained, got {self.slots + 1}"
            raise ValueError(f"block_size of this drafter must be at most {given}")
        return replace(config, slots=slots)


class LayerNorm(nn.Module):
    """Of the few features of a candidate, with torch's epsilon."""

    @nn.compact
    def __call__(self, x: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return wide.astype(x.dtype) * weight[None, None] + bias[None, None]


class MLP(nn.Module):
    """Two products with silu between them."""

    sizes: tuple[int, int, int]

    @nn.compact
    def __call__(self, x: Float[Array, "B L _"]) -> Float[Array, "B L H"]:
        inputs, inner, outputs = self.sizes
        inside = nn.silu(Linear((inputs, inner), True, name="up")(x))
        return Linear((inner, outputs), True, name="down")(inside)


class Attention(nn.Module):
    """Attention of all candidates to all, with a bias for each pair."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "B L H"], bias: Float[Array, "N L L"]) -> Float[Array, "B L H"]:
        H, shape = self.width, (*x.shape[:2], self.heads, -1)
        qkv = Linear((H, 3 * H), True, name="lattice_qkv")(x)
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        logits = product("blnh,bmnh->bnlm", q, k) / np.sqrt(q.shape[-1]) + bias[None].astype(jnp.float32)
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        out = product("bnlm,bmnh->blnh", weights, v, rounded=True)
        return Linear((H, H), True, name="lattice_out")(out.reshape(x.shape))


class Layer(nn.Module):
    """A layer of the lattice's transformer."""

    config: LiLiCorrConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B L H"], bias: Float[Array, "N L L"]) -> Float[Array, "B L H"]:
        c, H = self.config, self.config.lilicorr_hidden_size
        h = RMSNorm(H, c.rms_norm_eps, name="attn_norm")(x)
        x = x + Attention(H, c.lilicorr_num_heads, name="attn")(h, bias)
        h = RMSNorm(H, c.rms_norm_eps, name="mlp_norm")(x)
        return x + MLP((H, int(H * c.lilicorr_mlp_ratio), H), name="mlp")(h)


class Lattice(NamedTuple):
    """What is known of the candidates of a block, each slot's best first.

    Attributes:
        ids: the target's ids of them.
        likely: the drafter's log-probabilities of them, among all tokens.
    """

    ids: Int[Array, "B P K"]
    likely: Float[Array, "B P K"]


class Potentials(NamedTuple):
    """Logits of candidates.

    Attributes:
        first: of the first slot's, after the anchor.
        pairs: of each further slot's, after each of the slot before.
    """

    first: Float[Array, "B K"]
    pairs: Float[Array, "B _ K K"]


class Head(nn.Module):
    """What scores a lattice."""

    config: LiLiCorrConfig

    def setup(self):
        c, D, H = self.config, self.config.hidden_size, self.config.lilicorr_hidden_size
        linear = lambda inputs, outputs: Linear((inputs, outputs), True)
        if H != D:
            self.token_proj = linear(D, H)
        self.pass_hidden_proj, self.context_proj = linear(D, H), linear(D, H)
        self.feature_norm, self.feature_mlp = LayerNorm(), MLP((FEATURES, H, H))
        zeros, K = nn.initializers.zeros, c.lilicorr_candidate_topk
        self.slot_embedding = self.param("slot_embedding", zeros, (1, 1, c.slots, 1, H))
        self.rank_embedding = self.param("rank_embedding", zeros, (1, 1, 1, K, H))
        self.relative_slot_bias = self.param("relative_slot_bias", zeros, (c.lilicorr_num_heads, 2 * c.slots + 1))
        self.same_slot_bias = self.param("same_slot_bias", zeros, (c.lilicorr_num_heads,))
        self.layers = [Layer(c) for _ in range(c.lilicorr_num_layers)]
        self.output_norm, self.anchor_norm = RMSNorm(H, c.rms_norm_eps), RMSNorm(H, c.rms_norm_eps)
        self.factor_input_proj, F = linear(3 * H, H), c.lilicorr_factor_dim
        self.out_head, self.in_head, self.anchor_out_head = linear(H, F), linear(H, F), linear(H, F)

    def anchor(self, feature: Float[Array, "B A D"], known: Bool[Array, "B A"]) -> Float[Array, "B A H"]:
        """What is known of anchors.

        Args:
            feature: fused features of the positions before them.
            known: whether there is such a position.
        """
        return self.anchor_norm(self.context_proj(feature) * known[:, :, None].astype(feature.dtype))

    def potentials(
        self,
        embedded: Float[Array, "B L D"],
        likely: Float[Array, "B P K"],
        hidden: Float[Array, "B P D"],
        anchor: Float[Array, "B 1 H"],
    ) -> Potentials:
        """Logits of candidates.

        Args:
            embedded: rows of the target's embedding table.
            likely: see `Lattice`.
            hidden: final-normed states of the slots.
            anchor: of `anchor`.
        """
        c, (B, slots, K), H = self.config, likely.shape, self.config.lilicorr_hidden_size
        x = self.token_proj(embedded) if c.hidden_size != H else embedded
        x = x + self.feature_mlp(self.feature_norm(_features(likely).astype(x.dtype)))
        both = self.slot_embedding[:, 0, :slots] + self.rank_embedding[:, 0]
        both = both + self.pass_hidden_proj(hidden)[:, :, None]
        x, bias = x + both.reshape(B, slots * K, H), self._bias(slots)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x)
        at = jnp.broadcast_to(anchor, x.shape)
        inside = nn.silu(self.factor_input_proj(jnp.concatenate([x, at, x * at], axis=-1)))
        out, into = (self._direction(head(inside)).reshape(B, slots, K, -1) for head in (self.out_head, self.in_head))
        begun = self._direction(self.anchor_out_head(anchor))
        first = product("bf,bkf->bk", begun[:, 0], into[:, 0])
        pairs = product("bpif,bpjf->bpij", out[:, :-1], into[:, 1:])
        return Potentials(c.lilicorr_logit_scale * first, c.lilicorr_logit_scale * pairs)

    def _bias(self, slots: int) -> Float[Array, "N L L"]:
        """Of attention: by the distance of two slots, and for candidates of the same."""
        slot = np.repeat(np.arange(slots), self.config.lilicorr_candidate_topk)
        distance = slot[:, None] - slot[None]
        same = self.same_slot_bias[:, None, None] * jnp.asarray(distance == 0, self.same_slot_bias.dtype)[None]
        return self.relative_slot_bias[:, distance + self.config.slots] + same

    def _direction(self, x: Float[Array, "B L F"]) -> Float[Array, "B L F"]:
        wide = x.astype(jnp.float32)
        length = jnp.sqrt(jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), self.config.lilicorr_vector_eps**2))
        return (wide / length).astype(x.dtype)


def _features(likely: Float[Array, "B P K"]) -> Float[Array, "B L F"]:
    """What a candidate's probability and its rank tell."""
    K, shape = likely.shape[2], likely.shape
    gap = likely - jnp.max(likely, axis=-1, keepdims=True)
    ranks = np.arange(K, dtype=np.float32)[None, None]
    columns = likely, jnp.exp(likely), gap, jnp.asarray(ranks / max(K - 1, 1)), jnp.asarray(ranks == 0, jnp.float32)
    found = jnp.stack([jnp.broadcast_to(column, shape) for column in columns], axis=-1)
    return found.reshape(shape[0], -1, FEATURES)


def tensors(config: LiLiCorrConfig) -> checkpoint.Table:
    """What the head's parameters are made of, by the names that SGLang 0.5.23 reads."""
    c, D, H = config, config.hidden_size, config.lilicorr_hidden_size
    table: checkpoint.Table = {}
    plain = lambda path: path.replace("layers_", "layers.").replace("/", ".")

    def copied(path: str, *shape: int, name: str | None = None) -> None:
        table[f"lilicorr/{path}"] = checkpoint.copied(f"lilicorr.{name or plain(path)}", *shape)

    def linear(path: str, outputs: int, inputs: int, name: str | None = None) -> None:
        stored = name or plain(path)
        copied(f"{path}/weight", outputs, inputs, name=f"{stored}.weight")
        copied(f"{path}/bias", outputs, name=f"{stored}.bias")

    def mlp(path: str, inputs: int, inner: int) -> None:
        linear(f"{path}/up", inner, inputs, f"{plain(path)}.up_proj")
        linear(f"{path}/down", H, inner, f"{plain(path)}.down_proj")

    for name in ("token_proj", "pass_hidden_proj", "context_proj")[H == D :]:
        linear(name, H, D)
    copied("feature_norm/weight", FEATURES)
    copied("feature_norm/bias", FEATURES)
    mlp("feature_mlp", FEATURES, H)
    copied("slot_embedding", 1, 1, c.slots, 1, H)
    copied("rank_embedding", 1, 1, 1, c.lilicorr_candidate_topk, H)
    copied("relative_slot_bias", c.lilicorr_num_heads, 2 * c.slots + 1)
    copied("same_slot_bias", c.lilicorr_num_heads)
    for i in range(c.lilicorr_num_layers):
        path, stored = f"layers_{i}", f"layers.{i}.attn"
        copied(f"{path}/attn_norm/weight", H)
        copied(f"{path}/mlp_norm/weight", H)
        copied(f"{path}/attn/lattice_qkv/weight", 3 * H, H, name=f"{stored}.in_proj_weight")
        copied(f"{path}/attn/lattice_qkv/bias", 3 * H, name=f"{stored}.in_proj_bias")
        linear(f"{path}/attn/lattice_out", H, H, f"{stored}.out_proj")
        mlp(f"{path}/mlp", H, int(H * c.lilicorr_mlp_ratio))
    copied("output_norm/weight", H)
    copied("anchor_norm/weight", H)
    linear("factor_input_proj", H, 3 * H)
    for name in ("out_head", "in_head", "anchor_out_head"):
        linear(name, c.lilicorr_factor_dim, H)
    return table
