"""Attention of a block after a committed cache, and the pass through a stack of layers around it.

Shapes: B rows, T block positions, b t the same, or [B, N] where positions are packed (see `packing`),
D model width, N query heads, K key-value heads, H head dim, F tapped features.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from dflash_jax.cache import KV, Cache, Fresh
from dflash_jax.cache.int8 import Stored
from dflash_jax.config import AttentionConfig, LayerConfig, LayerMixer, RopeConfig
from dflash_jax.kernels.block_attention import Visibility, together
from dflash_jax.kernels.dispatch import platform
from dflash_jax.kernels.products import FEW_ROWS
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.layers import Linear, unfuse
from dflash_jax.models.norms import Normed, RMSNorm, inverse_rms, rms_norm, times
from dflash_jax.models.rope import Rope, rope_tables, rotate
from dflash_jax.packing import Packing, joined, parted

Norm = Callable[[Array], Array]  # of the heads of a block, [B, T, n, H]


class Inputs(NamedTuple):
    """A block of positions as a pass is given it; see `Target.forward`."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    visible: Visibility | None
    lengths: Int[Array, " B"]
    rows: Int[Array, " B"] | None = None
    starts: Int[Array, "B T"] | None = None
    counts: Int[Array, " B"] | None = None
    packing: Packing | None = None


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
        packing: the positions that layers compute (see `packing`), where these are not all: the others' results are
            undefined. None is all.
        beside: another block that is computed in the same products. What layers are given is then [p, n]: the packed
            positions of both, one after the other, in each of the p parts that a mesh splits rows into.
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
    packing: Packing | None = None
    beside: "Pass | None" = None
    per_row: int | None = struct.field(pytree_node=False, default=None)

    def tables(self, mixer: LayerMixer, dtype: jnp.dtype) -> Rope | None:
        """Rotary tables for a layer."""
        if mixer.rotary is None:
            return None
        within = self.positions if self.starts is None else self.positions - self.starts
        return rope_tables(*mixer.rotary, within, dtype)

    def rotating(self, mixer: LayerMixer, dtype: jnp.dtype) -> "Pass":
        """The same with these tables, of all its blocks."""
        beside = None if self.beside is None else self.beside.rotating(mixer, dtype)
        return self.replace(rope=self.tables(mixer, dtype), beside=beside)

    @property
    def blocks(self) -> list["Pass"]:
        """Its blocks, each as a pass of its own."""
        return [self] if self.beside is None else [self.replace(beside=None), *self.beside.blocks]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the packed positions of its own block."""
        B, T = self.positions.shape
        return B, T if self.packing is None else self.packing.rows.size // B

    @property
    def valid(self) -> Bool[Array, "b t"] | None:
        """Which of the positions that layers are given are valid; None is all."""
        if self.beside is not None:
            each = [jnp.ones(of.shape, jnp.bool_) if (mask := of.valid) is None else mask for of in self.blocks]
            return joined(each)
        counts = self.counts if self.packing is None else self.packing.valid
        return None if counts is None else jnp.arange(self.shape[1])[None] < counts[:, None]

    def pack(self, *blocks: Shaped[Array, "_ _ *S"]) -> Shaped[Array, "b t *S"]:
        """What layers are given of something that each position of its blocks has."""
        pairs = zip(self.blocks, blocks, strict=True)
        return joined([x if of.packing is None else of.packing.pack(x) for of, x in pairs])

    def apart(self, x: Shaped[Array, "b t *S"]) -> list[Shaped[Array, "_ _ *S"]]:
        """What layers return, of each of its blocks."""
        return parted(x, [of.shape for of in self.blocks])

    def mixed(
        self, mix: Callable[..., tuple[Array, PyTree]], outputs: Sequence[Shaped[Array, "b t _"]], shared: PyTree = None
    ) -> tuple[Float[Array, "b t _"], PyTree]:
        """What layers are given of the result of `mix`, which mixes the positions of a block.

        Args:
            mix: called with each of `outputs` at every position of a block, a pass of that block alone, and what it
                has of `shared`; returns a result [B, T, M], and what is fresh of the block.

        Returns:
            The results, and what is fresh: of two blocks a tuple, as `shared` is.
        """
        blocks, results = self.blocks, list[Array]()
        fresh, of_each = list[PyTree](), (shared,) if self.beside is None else shared or (None,) * len(blocks)
        for of, both, known in zip(blocks, zip(*map(self.apart, outputs), strict=True), of_each, strict=True):
            spread = (x if of.packing is None else of.packing.spread(x) for x in both)
            result, found = mix(*spread, of, known)
            results.append(result)
            fresh.append(found)
        return self.pack(*results), fresh[0] if self.beside is None else tuple(fresh)


class Attention(nn.Module):
    """Grouped-query attention of a block to the committed cache and to itself.

    Attributes:
        width: of what comes out.
        config: of this layer.
        layout: of its fused weights.
        norm_class: of the norms of queries and keys: `norm_class(size, epsilon)`.
    """

    width: int
    config: AttentionConfig
    layout: Layout = WHOLE
    norm_class: type[RMSNorm] = RMSNorm

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t Din"] | Normed,
        ctx: Pass,
        entry: KV,
        shared: Stored | tuple[Stored, ...] | None = None,
    ) -> tuple[Float[Array, "b t D"], Stored | tuple[Stored, ...]]:
        """Returns the layer's output, and the block's keys and values, of two blocks a tuple.

        Args:
            shared: the block's keys and values, where this layer does not make them: those of the layer whose entry
                this one shares, or those of a drafter that projects the keys of all its layers at once.
        """
        c, D, makes_keys = self.config, x.shape[-1], shared is None
        N, K, H = c.num_heads, c.kv_heads(self.layout), c.head_dim
        sizes = [N * H] * (2 if c.gate else 1)
        if makes_keys:
            sizes += [K * H] * (1 if c.values_are_keys else 2)
        heads = {"q_norm": N, "k_norm": K} if makes_keys else {"q_norm": N}
        widths = {name: H if c.qk_norm_per_head else n * H for name, n in heads.items()}
        eps = c.qk_norm
        norms = {} if eps is None else {name: self.norm_class(n, eps, name=name) for name, n in widths.items()}
        sinks = self.param("sinks", nn.initializers.zeros, (N,)) if c.sinks else None

        def norm(name: str, divided: Float[Array, "B T n H"] | None) -> Norm | None:
            if name not in norms:
                return None
            return lambda x: norms[name](x.reshape(*x.shape[:2], -1, widths[name]), divided).reshape(x.shape)

        def mix(
            outputs: Float[Array, "B T _"], at: Pass, shared: Stored | None
        ) -> tuple[Float[Array, "B T _"], Stored]:
            B, T, _ = outputs.shape
            q, *others = unfuse(outputs, sizes, self.layout.shards)
            divided: list[Array | None] = [None] * len(sizes)
            if eps is not None and c.qk_norm_per_head and platform() == "gpu":
                divided = [*self._divided(outputs, sizes, eps)]
            fresh = shared
            if fresh is None:
                keys = -1 if c.values_are_keys else -2
                value_norm = None if c.value_norm is None else partial(rms_norm, weight=None, eps=c.value_norm)
                key_norm = norm("k_norm", divided[keys])
                fresh = entry.stored(keys_and_values(others[keys], others[-1], H, at.rope, key_norm, value_norm))
            q = split_heads(q, H, norm("q_norm", divided[0]), at.rope)
            block = fresh
            if at.per_row is None and isinstance(fresh, Fresh) and fresh.v is not None:
                block = fresh.replace(joined=together(q, fresh.k, fresh.v, entry))
                fresh = block if shared is None else fresh
            out = attend_pass(q, block, at, entry, c, sinks).reshape(B, T, N * H)
            return (out * nn.sigmoid(others[0]) if c.gate else out), fresh

        outputs = Linear((D, sum(sizes)), c.bias, name="qkv_proj" if makes_keys else "q_proj")(x)
        out, fresh = ctx.mixed(mix, [outputs], shared)
        return Linear((N * H, self.width), c.bias and c.output_bias, name="o_proj")(out), fresh

    def _divided(
        self, outputs: Float[Array, "B T _"], sizes: list[int], eps: float
    ) -> Iterator[Float[Array, "B T n H"]]:
        """The heads of all parts over their root mean squares, in float32.

        On a GPU one launch finds what to divide by, for all heads. Of one position, and of many, it divides, too: XLA
        would use one launch more, of one to sum the squares, of many to turn what it found into the order of keys.
        """
        B, T, _ = outputs.shape
        H, shards = self.config.head_dim, self.layout.shards
        factors = inverse_rms(outputs.reshape(B, T, -1, H), eps)
        if B * T == 1 or B * T > FEW_ROWS:
            whole = times(outputs.reshape(B, T, -1, H), factors).reshape(outputs.shape)
            yield from (part.reshape(B, T, -1, H) for part in unfuse(whole, sizes, shards))
        else:
            of_each = unfuse(factors[..., 0], [size // H for size in sizes], shards)
            for part, factor in zip(unfuse(outputs, sizes, shards), of_each, strict=True):
                yield times(part.reshape(B, T, -1, H), factor[..., None])


def split_heads(
    x: Float[Array, "B T M"], size: int, norm: Norm | None = None, rope: Rope | None = None
) -> Float[Array, "B T n H"]:
    """The heads of a projection's outputs, each of this size, normed and rotated."""
    x = x.reshape(*x.shape[:2], -1, size)
    return rotate(x if norm is None else norm(x), rope)


def keys_and_values(
    k: Float[Array, "B T M"],
    v: Float[Array, "B T M"],
    size: int,
    rope: Rope | None,
    key_norm: Norm | None,
    value_norm: Norm | None = None,
) -> Fresh:
    """Keys and values of a block as a cache keeps them, from the outputs of their projections.

    Args:
        size: of a head.
    """
    k, v = split_heads(k, size, key_norm, rope), split_heads(v, size, value_norm)
    return Fresh(k.swapaxes(1, 2), v.swapaxes(1, 2))


def attend_pass(
    q: Float[Array, "B T N H"],
    fresh: Stored,
    ctx: Pass,
    entry: KV,
    config: AttentionConfig,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention of a layer's rotated queries to its cache entry and to the block, as `config` and the pass say."""
    by_layer = "causal" if config.causal else "full"
    if ctx.per_row is not None:
        assert ctx.visible is None
        assert sinks is None
        assert isinstance(entry, KV)
        assert isinstance(fresh, Fresh)
        starts = jnp.zeros_like(ctx.lengths) if ctx.starts is None else ctx.starts[:, 0]
        where = fresh, ctx.lengths, starts, ctx.per_row
        return entry.attend_anchored(q, *where, visible=by_layer, window=config.window, scale=config.scale)
    return entry.attend(
        q,
        ctx.positions,
        fresh,
        ctx.lengths,
        visible=by_layer if ctx.visible is None else ctx.visible,
        rows=ctx.rows,
        starts=ctx.starts,
        key_positions=ctx.key_positions,
        window=config.window,
        softcap=config.softcap,
        scale=config.scale,
        sinks=sinks,
    )


def run_layers(
    layers: Sequence[nn.Module],
    configs: Sequence[LayerConfig],
    x: Float[Array, "b t D"],
    ctx: Pass,
    cache: Cache,
    taps: tuple[int, ...],
) -> tuple[Float[Array, "b t D"], Float[Array, "b t FD"], tuple[Any, ...]]:
    """A block through all layers of a target, called inside its module.

    Args:
        layers: modules `layer(x, ctx, entry, shared) -> (x, fresh)`; `shared` is what an earlier layer of the same
            cache entry found for the block, else None.
        configs: of the layers.
        taps: layers whose outputs to return; -1 is their input.

    Returns:
        The last output, the tapped ones side by side, and what is fresh for each cache entry (see `Pass.mixed`).
    """
    fresh: list[Any] = [None] * len(cache.entries)
    outputs, tables = {-1: x}, dict[tuple[RopeConfig, int] | None, Pass]()
    for i, (layer, config) in enumerate(zip(layers, configs, strict=True)):
        mixer, entry = config.mixer, cache.of_layer[i]
        if mixer.rotary not in tables:
            tables[mixer.rotary] = ctx.rotating(mixer, x.dtype)
        before = x.shape
        x, fresh[entry] = _apply_once_traced(layer, x, tables[mixer.rotary], cache.entry(i), fresh[entry])
        if x.shape != before:
            raise ValueError(
                f"layer {i} returned {x.shape} for {before}; a layer that mixes positions uses `Pass.mixed`"
            )
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
