"""Multi-head latent attention (arXiv 2405.04434, section 2.1; transformers
`models/deepseek_v3/modeling_deepseek_v3.py`).

A position is cached as one vector, from which every head has its key and value. A short block attends *absorbed*: its
queries are taken to the space of the cached vectors, which then serve as keys and values themselves. A long one attends
*expanded*: the vectors become keys and values of all heads, which costs more for each vector, and less for each query.

Shapes: B rows, T block positions, D model width, N heads, H head dim of queries and keys, Hv head dim of values, C
entries of a latent, L of a cached vector: a latent, then the rotated part that the keys of all heads share.
"""

import math
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dflash_jax.cache import Fresh
from dflash_jax.cache.latent import Latent
from dflash_jax.config import RopeConfig
from dflash_jax.kernels.products import product
from dflash_jax.mesh import HEADS, Layout, constrain
from dflash_jax.models.attention import Pass
from dflash_jax.models.layers import Linear, parameter
from dflash_jax.models.norms import RMSNorm
from dflash_jax.models.rope import rotate
from dflash_jax.quantised import Quantised


@dataclass(frozen=True)
class LatentAttentionConfig:
    """One layer's latent attention, a `cache.Mixer`; the names are Hugging Face's.

    Attributes:
        num_heads: heads.
        q_lora_rank: width that queries are projected to first; None projects them at once.
        kv_lora_rank: entries of a latent.
        qk_nope_head_dim, qk_rope_head_dim: of queries and keys, the part that is not rotated and the part that is.
        v_head_dim: of values.
        rope: rotary embedding.
        eps: of the norms of latents and of narrow queries.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    eps: float = 1e-6
    shares: None = None

    @property
    def head_dim(self) -> int:
        """Dimensions of a query, and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_dim(self) -> int:
        """Dimensions that a head makes from a latent: the rest of its key, and its value."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def vector(self) -> int:
        """Entries of a cached vector."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Scale of the scores, which YaRN stretches here, not in cosines and sines, as far as `mscale_all_dim` says."""
        rope = self.rope
        stretched = rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1
        stretch = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1 if stretched else 1.0
        return self.head_dim**-0.5 * stretch**2

    @property
    def absorbed(self) -> float:
        """Positions of a block up to which it costs no more to attend absorbed; 170 with DeepSeek's sizes.

        For each head and cached position, a query costs 2 C + R products absorbed and H + Hv expanded, where R of H
        dims are rotated; and expanding costs C (H - R + Hv) once.
        """
        spared = 2 * self.kv_lora_rank - self.up_dim
        return self.kv_lora_rank * self.up_dim / spared if spared > 0 else math.inf

    @property
    def rotary(self) -> tuple[RopeConfig, int]:
        return self.rope, self.qk_rope_head_dim

    def entry(self, rows: int, slots: int, dtype: DTypeLike, layout: Layout, widest: int) -> Latent:
        return Latent.empty(rows, slots, self.vector, dtype, widest)

    def indivisible(self, layout: Layout, block: int = 1) -> str | None:
        if self.num_heads % layout.shards:
            return f"{self.num_heads} heads"
        for size in (self.head_dim, self.up_dim, self.v_head_dim):
            if layout.shards > 1 and self.num_heads * size % (layout.shards * block):
                return f"{self.num_heads * size} outputs in quantized blocks of {block}"
        return None


class LatentAttention(nn.Module):
    """The mixing of positions; see `decoder.Layer` for how it is called.

    Attributes:
        width: of the model.
    """

    width: int
    config: LatentAttentionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t D"], ctx: Pass, entry: Latent, shared: tuple[None, ...] | None = None
    ) -> tuple[Float[Array, "b t D"], Fresh | tuple[Fresh, ...]]:
        c, up = self.config, self._up(x.dtype)
        norm = RMSNorm(c.kv_lora_rank, c.eps, name="kv_a_layernorm")

        def mix(
            q: Float[Array, "B T _"], vectors: Float[Array, "B T L"], at: Pass, shared: None
        ) -> tuple[Float[Array, "B T _"], Fresh]:
            B, T, _ = q.shape
            plain, rotated = jnp.split(q.reshape(B, T, c.num_heads, c.head_dim), [c.qk_nope_head_dim], axis=-1)
            rotated = rotate(rotated, at.rope)
            latents, key = jnp.split(vectors, [c.kv_lora_rank], axis=-1)
            key = rotate(key[:, :, None], at.rope)[:, :, 0]
            fresh = Fresh(jnp.concatenate([norm(latents), key], axis=-1)[:, None], None)
            expanded = c.absorbed < T
            if not expanded:
                into = up[:, : c.qk_nope_head_dim]
                plain = product("btnh,nhc->btnc", plain, into).astype(x.dtype)
            out = entry.attend(
                jnp.concatenate([plain, rotated], axis=-1),
                at.positions,
                fresh,
                at.lengths,
                visible="causal" if at.visible is None else at.visible,
                rows=at.rows,
                starts=at.starts,
                key_positions=at.key_positions,
                scale=c.scale,
                up=up,
                expanded=expanded,
            )
            if not expanded:
                out = constrain(out, P(P.UNCONSTRAINED, None, HEADS))
                out = product("btnc,nvc->btnv", out, up[:, c.qk_nope_head_dim :]).astype(x.dtype)
            return out.reshape(B, T, c.num_heads * c.v_head_dim), fresh

        out, fresh = ctx.mixed(mix, self._projected(x))
        return Linear((c.num_heads * c.v_head_dim, self.width), name="o_proj")(out), fresh

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T _"], Float[Array, "B T L"]]:
        """Queries of all heads, and the vectors to cache, before norms and rotation."""
        c = self.config
        size = c.num_heads * c.head_dim
        if c.q_lora_rank is None:
            return Linear((self.width, size), name="q_proj")(x), Linear((self.width, c.vector), name="kv_a_proj")(x)
        both = Linear((self.width, c.q_lora_rank + c.vector), name="qkv_a_proj")(x)
        narrow, vectors = jnp.split(both, [c.q_lora_rank], axis=-1)
        narrow = RMSNorm(c.q_lora_rank, c.eps, name="q_a_layernorm")(narrow)
        return Linear((c.q_lora_rank, size), name="q_b_proj")(narrow), vectors

    def _up(self, dtype: jnp.dtype) -> Float[Array, "N _ C"]:
        """The weight that makes keys and values of every head from latents."""
        c = self.config
        weight = parameter(self, "kv_b_proj", (c.num_heads * c.up_dim, c.kv_lora_rank))
        if isinstance(weight, Quantised):
            weight = weight.astype(dtype)
        return weight.reshape(c.num_heads, c.up_dim, c.kv_lora_rank)
