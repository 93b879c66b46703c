"""Layers shared by every target family and the drafter.

Strict Linen: `params` is the only collection; caches are arguments and fresh keys and values are results.
Shapes: B rows, T block positions, D model width, N query heads, K key-value heads, H head dim.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.cache import KV, Block
from dflash_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dflash_jax.kernels.anchored_attention import attend_anchored
from dflash_jax.kernels.block_attention import Visibility, attend
from dflash_jax.kernels.dispatch import platform
from dflash_jax.kernels.products import product
from dflash_jax.mesh import on_every_device
from dflash_jax.sharding import whole

FEW_ROWS = 256  # of a product: the widest block or prompt chunk that is multiplied weight first


class Rope(NamedTuple):
    """Cosines and sines of a block's positions."""

    cos: Float[Array, "B T H"]
    sin: Float[Array, "B T H"]


class Pass(struct.PyTreeNode):
    """What every layer of one forward pass shares.

    Attributes:
        positions: absolute positions of the block, [B, T].
        rope: rotary tables at those positions.
        visible: which block positions a block position sees; None leaves it to each layer's own causality.
        lengths: committed length of each row, [B].
        row: first cache row the block belongs to; the block's B rows are contiguous from there.
        starts: first position each query may see, [B, T] (packed documents); None is 0.
        per_row: in training, how many of the B blocks share one cache row (all others: None). Then the
            blocks see the cache up to their own `lengths`, and the pass is differentiable.
    """

    positions: Int[Array, "B T"]
    rope: Rope
    visible: Visibility | None
    lengths: Int[Array, " B"]
    row: Int[Array, ""]
    starts: Int[Array, "B T"] | None = None
    per_row: int | None = struct.field(pytree_node=False, default=None)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis: float32 inside, rounded before the scale (Hugging Face order)."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.param("weight", nn.initializers.ones, (self.size,)), self.eps)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """See `RMSNorm`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(weight, range(x.ndim - 1)) * wide.astype(x.dtype)


class Linear(nn.Module):
    """`x @ weight.T + bias`; the weight is [out, in] as in the checkpoint."""

    features: tuple[int, int]
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... M"]:
        inputs, outputs = self.features
        weight = self.param("weight", nn.initializers.normal(0.02), (outputs, inputs))
        y = matmul(x, whole(weight, "/".join((*self.path, "weight"))))
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (outputs,))[None, None]
        return y


def unfuse(x: Float[Array, "B T M"], sizes: Sequence[int], shards: int) -> list[Float[Array, "B T _"]]:
    """The outputs of a fused product, whose rows are interleaved in `shards` parts (see `checkpoint.fused`)."""
    *cuts, _ = itertools.accumulate(size // shards for size in sizes)
    parts = jnp.split(x.reshape(*x.shape[:2], shards, -1), cuts, axis=-1)
    return [part.reshape(*x.shape[:2], -1) for part in parts]


def matmul(x: Float[Array, "B T D"], weight: Float[Array, "M D"]) -> Float[Array, "B T M"]:
    """`x @ weight.T` in the dtype of `x`; see `project`."""
    return project(x, weight).astype(x.dtype)


def project(x: Float[Array, "B T D"], weight: Float[Array, "M D"]) -> Float[Array, "B T M"]:
    """`x @ weight.T` accumulated and returned in float32.

    For a decoding block the weight stands on the left, because on CPU a [M, D] x [D, 16] product runs up
    to twice as fast as the same product written [16, D] x [D, M]. Beyond `FEW_ROWS` it is the other way round, and on
    GPUs, too, where it spares the kernels that turn what comes out. Products of float32 are exact to float32.
    """
    if x.shape[0] * x.shape[1] > FEW_ROWS or platform() == "gpu":
        return product("btd,md->btm", x, weight)
    return jnp.moveaxis(product("md,btd->mbt", weight, x), 0, -1)


class MLP(nn.Module):
    """SwiGLU with gate and up fused into one weight."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        gate, up = unfuse(Linear((width, 2 * inner), name="gate_up_proj")(x), (inner, inner), self.config.shards)
        return Linear((inner, width), name="down_proj")(nn.silu(gate) * up)


class Attention(nn.Module):
    """Grouped-query attention of a block to the committed cache and to itself.

    `project(x) -> (k, v)`, each [B, K, T, H] and rotated, stands in for the layer's own key and value
    projection where those weights live elsewhere (the drafter holds them all in one array).
    """

    config: DecoderConfig
    layer: LayerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: KV, project: Callable | None = None
    ) -> tuple[Float[Array, "B T D"], Block]:
        config, (B, T, D) = self.config, x.shape
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q_norm = RMSNorm(H, config.rms_norm_eps, name="q_norm")
        if project is None:
            qkv = Linear((D, (N + 2 * K) * H), config.attention_bias, name="qkv_proj")(x)
            q, k, v = unfuse(qkv, (N * H, K * H, K * H), config.shards)
            k = RMSNorm(H, config.rms_norm_eps, name="k_norm")(k.reshape(B, T, K, H))
            k, v = rotate(k, at.rope).swapaxes(1, 2), v.reshape(B, T, K, H).swapaxes(1, 2)
        else:
            q = Linear((D, N * H), config.attention_bias, name="q_proj")(x)
            k, v = project(x)
        by_layer = "causal" if self.layer.causal else "full"
        q, window = rotate(q_norm(q.reshape(B, T, N, H)), at.rope), self.layer.window
        if at.per_row is None:
            out = attend(
                q,
                at.positions,
                k,
                v,
                entry,
                at.lengths,
                visible=by_layer if at.visible is None else at.visible,
                window=window,
                row=at.row,
                starts=at.starts,
            )
        else:
            assert at.visible is None
            starts = jnp.zeros_like(at.lengths) if at.starts is None else at.starts[:, 0]
            fold = lambda x: x.reshape(-1, at.per_row, *x.shape[1:])
            out = attend_anchored(
                *map(fold, (q, k, v)),
                entry.k,
                entry.v,
                *map(fold, (at.lengths, starts)),
                visible=by_layer,
                window=window,
            )
        out = Linear((N * H, D), config.attention_bias, name="o_proj")(out.reshape(B, T, N * H))
        return out, Block(k, v)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer."""

    config: DecoderConfig
    layer: LayerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: KV, project: Callable | None = None
    ) -> tuple[Float[Array, "B T D"], Block]:
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        h = RMSNorm(size, eps, name="input_layernorm")(x)
        h, block = Attention(self.config, self.layer, name="self_attn")(h, at, entry, project)
        x = on_every_device(x + h)
        h = RMSNorm(size, eps, name="post_attention_layernorm")(x)
        return on_every_device(x + MLP(self.config, name="mlp")(h)), block


def apply_layer(
    layer: DecoderLayer, x: Float[Array, "B T D"], at: Pass, entry: KV
) -> tuple[Float[Array, "B T D"], Block]:
    """`layer(x, at, entry)` inside a model, traced once for all its layers that are alike."""
    if layer.is_initializing():
        return layer(x, at, entry)
    return _apply_layer(layer.clone(parent=None, name=None), layer.variables, x, at, entry)


@partial(jax.jit, static_argnums=0, inline=True)  # as a call, XLA would reshard what goes in and out on a mesh
def _apply_layer(
    layer: DecoderLayer, variables: Any, x: Float[Array, "B T D"], at: Pass, entry: KV
) -> tuple[Float[Array, "B T D"], Block]:
    return layer.apply(variables, x, at, entry)


def rope_tables(config: RopeConfig, head_dim: int, positions: Int[Array, "B T"], dtype: jnp.dtype) -> Rope:
    """Rotary tables at absolute positions; angles in float32 whatever `dtype` is returned."""
    frequencies, scale = rope_frequencies(config, head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    tables = [(table * scale).astype(dtype) for table in (jnp.cos(angles), jnp.sin(angles))]
    # Doubled last: XLA fuses no concatenation, and would otherwise evaluate these again in every layer and head.
    return Rope(*(jnp.concatenate([table, table], axis=-1) for table in tables))


def rotate(x: Float[Array, "B T N H"], rope: Rope) -> Float[Array, "B T N H"]:
    """Applies rotary embedding in the halves ("neox") layout."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * rope.cos[:, :, None] + turned * rope.sin[:, :, None]


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Float[Array, " R"], float]:
    """Inverse frequencies and the scale of cos and sin, as in transformers' `modeling_rope_utils`."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    base = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return base, 1.0
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, base), 1.0
    return _yarn(config, base, head_dim)


def _llama3(config: RopeConfig, base: Float[Array, " R"]) -> Float[Array, " R"]:
    rotations = config.original_max_position_embeddings * base / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return base * keep + base / config.factor * (1 - keep)


def _yarn(config: RopeConfig, base: Float[Array, " R"], head_dim: int) -> tuple[Float[Array, " R"], float]:
    def dimension(rotations: float) -> float:
        context = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    interpolate = jnp.clip(ramp, 0.0, 1.0)
    frequencies = base / config.factor * interpolate + base * (1 - interpolate)
    return frequencies, _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
