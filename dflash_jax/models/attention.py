"""Attention of a block after a committed cache, and the pass through a stack of layers around it.

Shapes: B rows, T block positions, D model width, N query heads, K key-value heads, H head dim, F tapped features.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Cache, Fresh
from dflash_jax.config import AttentionConfig, LayerConfig, LayerMixer
from dflash_jax.kernels.block_attention import Visibility
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.layers import Linear, RMSNorm, unfuse
from dflash_jax.models.rope import Rope, rope_tables, rotate


class Pass(struct.PyTreeNode):
    """What a layer knows of the forward pass it is part of.

    Attributes:
        positions: absolute positions of the block.
        visible: which block positions a block position sees; None leaves it to each layer's own causality.
        lengths: committed length of each row.
        rows: cache row of each of the block's rows, all different; None if the block has every row, in order.
        rope: rotary tables of this layer at those positions (see `run_layers`).
        starts: first position each query may see (packed documents), from which rotary positions count; None is 0.
        counts: how many positions of each row are valid, the first ones (see `Target.forward`); None is all.
        key_positions: of the block's keys where there are more of them than queries (see `block_attention.attend`).
        per_row: in training, how many of the B blocks share one cache row (all others: None). Then the
            blocks see the cache up to their own `lengths`, and the pass is differentiable.
    """

    positions: Int[Array, "B T"]
    visible: Visibility | None
    lengths: Int[Array, " B"]
    rows: Int[Array, " B"] | None
    rope: Rope | None = None
    starts: Int[Array, "B T"] | None = None
    counts: Int[Array, " B"] | None = None
    key_positions: Int[Array, "B F"] | None = None
    per_row: int | None = struct.field(pytree_node=False, default=None)

    def tables(self, mixer: LayerMixer, dtype: jnp.dtype) -> Rope | None:
        """Rotary tables for a layer."""
        if mixer.rotary is None:
            return None
        within = self.positions if self.starts is None else self.positions - self.starts
        return rope_tables(*mixer.rotary, within, dtype)


class Attention(nn.Module):
    """Grouped-query attention of a block to the committed cache and to itself.

    Attributes:
        width: of what comes out.
        config: of this layer.
        layout: of its fused weights.
        bias: whether the projections have one.
        qk_norm: epsilon of the norms of queries and keys; None has none.
        qk_norm_per_head: whether these are norms of every head, or of all heads together.
        sinks: whether every query head has an attention sink: a logit without a key in its softmax.
    """

    width: int
    config: AttentionConfig
    layout: Layout = WHOLE
    bias: bool = False
    qk_norm: float | None = None
    qk_norm_per_head: bool = True
    sinks: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T Din"],
        at: Pass,
        entry: Any,
        shared: Fresh | None = None,
        project: Callable[[Array], Fresh] | None = None,
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        """Returns the layer's output, and the block's keys and values.

        Args:
            shared: the block's keys and values of the layer whose entry this one shares.
            project: stands in for the layer's own key and value projection where those weights live elsewhere (a
                drafter holds them all in one array).
        """
        c, (B, T, D) = self.config, x.shape
        N, K, H = c.num_heads, c.num_kv_heads * self.layout.copies(c.num_kv_heads), c.head_dim

        def normed(x: Float[Array, "B T n H"], name: str) -> Float[Array, "B T n H"]:
            if self.qk_norm is None:
                return x
            flat = x if self.qk_norm_per_head else x.reshape(B, T, -1)
            return RMSNorm(flat.shape[-1], self.qk_norm, name=name)(flat).reshape(x.shape)

        if shared is None and project is None:
            qkv = Linear((D, (N + 2 * K) * H), self.bias, name="qkv_proj")(x)
            q, k, v = unfuse(qkv, (N * H, K * H, K * H), self.layout.shards)
            k = rotate(normed(k.reshape(B, T, K, H), "k_norm"), at.rope)
            fresh = Fresh(k.swapaxes(1, 2), v.reshape(B, T, K, H).swapaxes(1, 2))
        else:
            q = Linear((D, N * H), self.bias, name="q_proj")(x)
            fresh = shared if project is None else project(x)
            assert fresh is not None
        q = rotate(normed(q.reshape(B, T, N, H), "q_norm"), at.rope)
        sinks = self.param("sinks", nn.initializers.zeros, (N,)) if self.sinks else None
        out = attend_pass(q, fresh, at, entry, c, sinks).reshape(B, T, N * H)
        return Linear((N * H, self.width), self.bias, name="o_proj")(out), fresh


def attend_pass(
    q: Float[Array, "B T N H"],
    fresh: Any,
    at: Pass,
    entry: Any,
    config: AttentionConfig,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention of a layer's rotated queries to its cache entry and to the block, as `config` and the pass say."""
    by_layer = "causal" if config.causal else "full"
    if at.per_row is not None:
        assert at.visible is None
        assert sinks is None
        starts = jnp.zeros_like(at.lengths) if at.starts is None else at.starts[:, 0]
        settings: dict[str, Any] = {"visible": by_layer, "window": config.window, "scale": config.scale}
        return entry.attend_anchored(q, fresh, at.lengths, starts, at.per_row, **settings)
    return entry.attend(
        q,
        at.positions,
        fresh,
        at.lengths,
        visible=by_layer if at.visible is None else at.visible,
        rows=at.rows,
        starts=at.starts,
        key_positions=at.key_positions,
        window=config.window,
        softcap=config.softcap,
        scale=config.scale,
        sinks=sinks,
    )


def run_layers(
    layers: Sequence[nn.Module],
    configs: Sequence[LayerConfig],
    x: Float[Array, "B T D"],
    at: Pass,
    cache: Cache,
    taps: tuple[int, ...],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T FD"], tuple[Any, ...]]:
    """A block through all layers of a target, called inside its module.

    Args:
        layers: modules `layer(x, at, entry, shared) -> (x, fresh)`; `shared` is what an earlier layer of the same
            cache entry found for the block, else None.
        configs: of the layers.
        taps: layers whose outputs to return; -1 is their input.

    Returns:
        The last output, the tapped ones side by side, and what is fresh for each cache entry.
    """
    fresh: list[Any] = [None] * len(cache.entries)
    outputs, tables = {-1: x}, dict[Any, Rope | None]()
    for i, (layer, config) in enumerate(zip(layers, configs, strict=True)):
        mixer, entry = config.mixer, cache.of_layer[i]
        if mixer.rotary not in tables:
            tables[mixer.rotary] = at.tables(mixer, x.dtype)
        at = at.replace(rope=tables[mixer.rotary])
        x, fresh[entry] = _apply_once_traced(layer, x, at, cache.entries[entry], fresh[entry])
        if i in taps:
            outputs[i] = x
    features = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else x[..., :0]
    return x, features, tuple(fresh)


def _apply_once_traced(layer: nn.Module, *arguments: Any) -> tuple[Array, Any]:
    """`layer(*arguments)` inside a model, traced once for all its layers that are alike."""
    if layer.is_initializing():
        return layer(*arguments)  # type: ignore[operator]
    return _apply(layer.clone(parent=None, name=None), layer.variables, *arguments)


@partial(jax.jit, static_argnums=0, inline=True)  # as a call, XLA would reshard what goes in and out on a mesh
def _apply(layer: nn.Module, variables: Any, *arguments: Any) -> tuple[Array, Any]:
    return layer.apply(variables, *arguments)  # type: ignore[return-value]
