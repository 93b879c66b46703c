"""Linear attention by the gated delta rule, with a short convolution before it (transformers
`models/qwen3_next/modeling_qwen3_next.py`, `Qwen3NextGatedDeltaNet`).

Shapes: B rows, T block positions, D model width, K key heads, G value heads that share one, H key dim, Hv value dim, C
channels of the convolution, W taps but a position's own.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.cache import Entry
from dflash_jax.cache.recurrent import Corrections, Recurrent, State, allocate, last_inputs
from dflash_jax.kernels.delta_rule import read_block, read_prompt
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.attention import Pass
from dflash_jax.models.layers import Linear, unfuse
from dflash_jax.models.norms import rms_norm

BLOCK = 64  # positions up to which a block without a tree may be committed in part
L2_EPSILON = 1e-6  # inside the sum of squares, not their mean


@dataclass(frozen=True)
class LinearAttentionConfig:
    """One layer of linear attention, a `cache.Mixer`; the names are Hugging Face's without `linear_`.

    Attributes:
        num_key_heads, num_value_heads: heads; so many value heads share a key head.
        key_head_dim, value_head_dim: of each.
        conv_kernel_dim: taps of the convolution, a position's own among them.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    shares: None = None
    rotary: None = None
    last: str = "linear_attn.out_proj"  # its last weight, whose inputs devices share

    @property
    def key_size(self) -> int:
        """Dimensions of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Dimensions of the values of all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def shared(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def entry(self, rows: int, slots: int, dtype: DTypeLike, layout: Layout, widest: int) -> Entry:
        heads, sizes = (self.num_key_heads, self.shared), (self.key_head_dim, self.value_head_dim)
        return allocate(rows, heads, sizes, self.conv_kernel_dim, self.channels, dtype)

    def indivisible(self, layout: Layout, block: int = 1) -> str | None:
        if self.num_key_heads % layout.shards:
            return f"{self.num_key_heads} key heads of linear attention"
        if layout.shards > 1 and self.value_size % (layout.shards * block):
            return f"{self.value_size} outputs in quantized blocks of {block}"
        return None


class LinearAttention(nn.Module):
    """The mixing of positions; see `decoder.Layer` for how it is called.

    Attributes:
        width: of the model.
        eps: of the norm of outputs.
    """

    width: int
    config: LinearAttentionConfig
    eps: float
    layout: Layout = WHOLE

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t D"], ctx: Pass, entry: Recurrent, shared: tuple[None, ...] | None = None
    ) -> tuple[Float[Array, "b t D"], Corrections | State | tuple[Corrections | State, ...]]:
        c, shards = self.config, self.layout.shards
        K, G, Hv = c.num_key_heads, c.shared, c.value_head_dim
        sizes = c.channels, c.value_size, c.num_value_heads, c.num_value_heads
        taps = self.param("conv", nn.initializers.normal(0.02), (c.channels, c.conv_kernel_dim))
        decay = self.param("A_log", nn.initializers.zeros, (c.num_value_heads,)).astype(jnp.float32)
        shift = self.param("dt_bias", nn.initializers.ones, (c.num_value_heads,)).astype(jnp.float32)
        norm = self.param("norm", nn.initializers.ones, (Hv,))

        def mix(
            outputs: Float[Array, "B T _"], at: Pass, shared: None
        ) -> tuple[Float[Array, "B T _"], Corrections | State]:
            B, T, _ = outputs.shape
            inputs, z, b, a = unfuse(outputs, sizes, shards)
            old = entry.of(at.rows)
            mixed = nn.silu(convolve(inputs, old.inputs, taps, at))
            parts = unfuse(mixed, (c.key_size, c.key_size, c.value_size), shards)
            q, k, v = (part.astype(jnp.float32) for part in parts)
            q, k = (_unit(part.reshape(B, T, K, c.key_head_dim)) for part in (q, k))
            q, v = q * c.key_head_dim**-0.5, v.reshape(B, T, K, G, Hv)
            beta = jax.nn.sigmoid(b.astype(jnp.float32)).reshape(B, T, K, G)
            g = -jnp.exp(decay)[None, None] * jax.nn.softplus(a.astype(jnp.float32) + shift[None, None])
            g = g.reshape(B, T, K, G)
            if at.visible is None and (T > BLOCK or at.starts is not None):
                out, fresh = _prompt(q, k, v, g, beta, inputs, old, at)
            else:
                visible = at.visible if at.visible is None or at.visible.ndim == 3 else at.visible[None]
                out, u = read_block(q, k, v, g, beta, old.s, visible)
                fresh = Corrections(k, u, g, inputs)
            out = rms_norm(out.astype(x.dtype), norm, self.eps).reshape(B, T, -1)
            gated = out.astype(jnp.float32) * nn.silu(z.astype(jnp.float32))
            return gated.astype(x.dtype), fresh

        out, fresh = ctx.mixed(mix, [Linear((self.width, sum(sizes)), name="in_proj")(x)])
        return Linear((c.value_size, self.width), name="out_proj")(out), fresh


def _prompt(
    q: Array, k: Array, v: Array, g: Array, beta: Array, inputs: Float[Array, "B T C"], old: State, ctx: Pass
) -> tuple[Float[Array, "B T K G Hv"], State]:
    """A prompt, all valid positions of which are kept."""
    B, T = inputs.shape[:2]
    counts = jnp.full(B, T, jnp.int32) if ctx.counts is None else ctx.counts
    valid = (jnp.arange(T)[None] < counts[:, None])[:, :, None, None]
    g, beta = jnp.where(valid, g, 0.0), jnp.where(valid, beta, 0.0)
    documents = before = None
    if ctx.starts is not None:
        documents = ctx.starts
        before = jnp.where(documents[:, 0] < ctx.lengths, documents[:, 0], -1)
    out, s = read_prompt(q, k, v, g, beta, old.s, documents, before)
    return out, State(s, last_inputs(old.inputs, inputs, counts))


def convolve(
    x: Float[Array, "B T C"], before: Float[Array, "B W C"], taps: Float[Array, "C _"], ctx: Pass
) -> Float[Array, "B T C"]:
    """A causal convolution of every channel, over a position and its nearest ancestors, in a tree too.

    Args:
        before: inputs at the last committed positions.
        taps: the last one is of the position itself.
    """
    T, W = x.shape[1], before.shape[1]
    both = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    out = x * taps[None, None, :, W]
    for back in range(1, W + 1):
        if ctx.visible is None:
            earlier = both[:, W - back : W - back + T]
        else:
            at_depth = _ancestors(ctx.visible, ctx.positions - ctx.lengths[:, None], back, W)
            earlier = jnp.take_along_axis(both, at_depth[..., None], axis=1)
        if ctx.starts is not None:
            earlier = jnp.where((ctx.positions - back >= ctx.starts)[..., None], earlier, 0.0)
        out = out + earlier * taps[None, None, :, W - back]
    return out


def _ancestors(
    visible: Bool[Array, "T T"] | Bool[Array, "B T T"], depth: Int[Array, "B T"], back: int, W: int
) -> Int[Array, "B T"]:
    """Where each node's ancestor so many positions back stands, in the block with W earlier positions before it."""
    visible = visible if visible.ndim == 3 else visible[None]
    above = visible & (depth[:, None, :] == depth[:, :, None] - back)
    return jnp.where(depth >= back, W + jnp.argmax(above, axis=-1), W + depth - back)


def _unit(x: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)
