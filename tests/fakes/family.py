"""A target family that shares as little as possible with the others: heads of two kinds and two ropes, a layer that
reads another's cache entry, a recurrent layer, a scaled embedding, capped logits, and weights that are stored oddly."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from dflash_jax.checkpoint import Leaf, Part, QuantisedLeaf, Scaled, Stored, copied
from dflash_jax.config import AttentionConfig, LayerConfig, RopeConfig, TargetConfig
from dflash_jax.config_json import DECODER_FIELDS, check_fields, decoder_fields, require
from dflash_jax.mesh import HEADS, ROWS, WHOLE, on_every_device
from dflash_jax.models.attention import Attention, run_layers
from dflash_jax.models.layers import MLP, Linear, project
from dflash_jax.models.norms import RMSNorm
from dflash_jax.models.tables import decoder_layer
from dflash_jax.quantised import EightBit
from dflash_jax.sharding import Rule, gathered, lookup

CAP = 20.0  # of the logits
RULES = (
    Rule(r"mix/in_proj/weight", 2, P(HEADS, "fsdp")),
    Rule(r"mix/out_proj/weight", 2, P("fsdp", HEADS)),
    Rule(r"mix/decay", 1, P()),
)
SMALL = AttentionConfig(4, 2, 16, RopeConfig(1e4), window=6)
LARGE = AttentionConfig(2, 1, 32, RopeConfig(1e6), softcap=30.0)


class State(struct.PyTreeNode):
    """The recurrent state of some rows, [R, D]."""

    s: Any
    whole: ClassVar[bool] = True

    def partition(self):
        return State(P(None, HEADS))


class Fresh(struct.PyTreeNode):
    """What a block adds to the state: `u` [B, T, D] of every position, and the decay [B, D]."""

    u: Any
    decay: Any


class Recurrent(struct.PyTreeNode):
    """Cache entry: s = decay * s + u, position by position."""

    s: Any

    def begin(self, row):
        return self.replace(s=self.s.at[row].set(0))

    def commit(self, fresh, lengths, kept, *, path=None, rows=None):
        u = fresh.u if path is None else jnp.take_along_axis(fresh.u, path[:, :, None], axis=1)
        age = (kept[:, None] - 1 - jnp.arange(u.shape[1])[None]).astype(jnp.float32)
        weight = jnp.where((age >= 0)[..., None], fresh.decay[:, None] ** jnp.maximum(age, 0)[..., None], 0.0)
        rows = jnp.arange(u.shape[0]) if rows is None else rows
        old = self.s[rows]
        faded = old * fresh.decay ** kept[:, None].astype(jnp.float32)
        new = faded + jnp.sum(jnp.where(weight > 0, weight * u, 0.0), axis=1)
        new = jnp.where((kept > 0)[:, None], new, old)
        return self.replace(s=self.s.at[rows].set(new))

    def snapshot(self, row, start, count):
        return State(jax.lax.dynamic_slice_in_dim(self.s, row, 1))

    def restore(self, snapshot, row, end):
        return self.replace(s=jax.lax.dynamic_update_slice_in_dim(self.s, snapshot.s, row, 0))

    def partition(self):
        return self.replace(s=P(ROWS, HEADS))


@dataclass(frozen=True)
class RecurrentConfig:
    width: int
    shares: int | None = None
    rotary: None = None

    def entry(self, rows, slots, dtype, layout, widest):
        return Recurrent(jnp.zeros((rows, self.width), jnp.float32))

    def indivisible(self, layout, block=1):
        return f"a state of {self.width}" if self.width % layout.shards else None


def config(raw):
    check_fields(raw, DECODER_FIELDS, {"hidden_act": "silu"})
    inner, width = require(raw, "intermediate_size"), require(raw, "hidden_size")
    mixers = (SMALL, RecurrentConfig(width), LARGE, replace(LARGE, shares=2))
    return TargetConfig(
        **decoder_fields(raw),
        layers=tuple(LayerConfig(mixer, inner) for mixer in mixers),
        model_type="toy",
        tie_word_embeddings=True,
        eos_token_ids=(raw["eos_token_id"],),
        max_position_embeddings=raw["max_position_embeddings"],
    )


class Mix(nn.Module):
    """The recurrent layer's mixing of positions; a position sees the committed state and its own ancestors."""

    width: int

    @nn.compact
    def __call__(self, x, at, entry):
        gate = self.param("decay", nn.initializers.ones, (self.width,))

        def mix(both, at, shared):
            first, second = jnp.split(both, 2, axis=-1)
            u = (first - second).astype(jnp.float32)
            decay = jnp.broadcast_to(jax.nn.sigmoid(gate.astype(jnp.float32))[None], (both.shape[0], self.width))
            T = both.shape[1]
            seen = jnp.tril(jnp.ones((1, T, T), bool)) if at.visible is None else at.visible
            depth = (at.positions - at.lengths[:, None]).astype(jnp.float32)
            age = depth[:, :, None] - depth[:, None, :]
            weight = jnp.where(seen[..., None], decay[:, None, None] ** jnp.maximum(age, 0)[..., None], 0.0)
            old = entry.s if at.rows is None else entry.s[at.rows]
            s = jnp.einsum("btjd,bjd->btd", weight, u) + decay[:, None] ** (depth + 1)[..., None] * old[:, None]
            return s.astype(x.dtype), Fresh(u, decay)

        mixed, fresh = at.mixed(mix, [Linear((self.width, 2 * self.width), name="in_proj")(x)])
        return Linear((self.width, self.width), name="out_proj")(mixed), fresh


class Layer(nn.Module):
    config: TargetConfig
    layer: LayerConfig
    layout: Any

    @nn.compact
    def __call__(self, x, at, entry, shared):
        D, eps, mixer = self.config.hidden_size, self.config.rms_norm_eps, self.layer.mixer
        h = RMSNorm(D, eps, name="input_layernorm")(x)
        if isinstance(mixer, RecurrentConfig):
            h, fresh = Mix(mixer.width, name="mix")(h, at, entry)
        else:
            h, fresh = Attention(D, mixer, self.layout, name="self_attn")(h, at, entry, shared)
        x = on_every_device(x + h)
        h = RMSNorm(D, eps, name="post_attention_layernorm")(x)
        return on_every_device(x + MLP(D, self.layer.intermediate_size, self.layout, name="mlp")(h)), fresh


class Model(nn.Module):
    config: TargetConfig
    layout: Any

    def setup(self):
        c = self.config
        self.embed_tokens = self.param("embed_tokens", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size))
        self.layers = [Layer(c, layer, self.layout) for layer in c.layers]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def table(self, tokens):
        return lookup(self.embed_tokens, tokens)

    def embed(self, tokens):
        return self.table(tokens) * jnp.asarray(self.config.hidden_size**0.5, self.embed_tokens.dtype)

    def forward(self, tokens, at, cache, taps):
        x, features, fresh = run_layers(self.layers, self.config.layers, self.embed(tokens), at, cache, taps)
        return self.norm(x), features, fresh

    def head(self, hidden):
        return project(hidden, gathered(self.embed_tokens, "lm_head"))

    def unembed(self, hidden):
        return CAP * jnp.tanh(self.head(hidden) / CAP)


def tensors(config, layout=WHOLE):
    D, table = config.hidden_size, {}
    table["embed_tokens"] = copied("model.embed_tokens.weight", config.vocab_size, D)
    table["norm/weight"] = copied("model.norm.weight", D)
    for i, layer in enumerate(config.layers):
        names = f"layers_{i}", f"model.layers.{i}"
        if not isinstance(layer.mixer, RecurrentConfig):
            own = layer.mixer.shares is None
            table |= decoder_layer(*names, D, layer, layout, fuse_qkv=own)
            continue
        plain = decoder_layer(*names, D, replace(layer, mixer=LARGE), layout)
        table |= {path: leaf for path, leaf in plain.items() if "self_attn" not in path}
        mix, prefix = f"{names[0]}/mix", f"{names[1]}.mix"
        # The odd columns, then the even ones, of a matrix that is stored [in, out], in small numbers with block scales.
        shape = D, 2 * D
        blocks = tuple(-(-size // side) for size, side in zip(shape, (8, 16), strict=True))
        small, scales = Stored(f"{prefix}.in.weight", shape, ("I8",)), Stored(f"{prefix}.in.scale", blocks)
        stored = Scaled(small, scales, block=(8, 16))
        everything = slice(0, D), slice(0, D)
        odd = Part(stored, everything, (slice(None), slice(1, None, 2)), (1, 0))
        even = Part(stored, (slice(D, 2 * D), slice(0, D)), (slice(None), slice(0, None, 2)), (1, 0))
        table[f"{mix}/in_proj/weight"] = Leaf((2 * D, D), (odd, even))
        # The rows of halves, which are stored one after the other, in turns; and it stays in small numbers.
        rows = tuple(range(0, D, 2)) + tuple(range(1, D, 2))
        values = Leaf((D, D), (Part(Stored(f"{prefix}.out.weight", (D, D), ("I8",)), everything, (rows,)),), "int8")
        scale = Leaf((D,), (Part(Stored(f"{prefix}.out.scale", (D,)), everything[:1], (rows,)),), "float32")
        table[f"{mix}/out_proj/weight"] = QuantisedLeaf({"values": values, "scale": scale}, EightBit)
        table[f"{mix}/decay"] = copied(f"{prefix}.decay", D)
    return table


def ignored(config):
    return ()
