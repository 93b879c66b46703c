"""EAGLE-3: one layer that drafts token by token (arXiv 2503.01840; SafeAILab/EAGLE, DeepSpec, `speculators`).

A pass takes a pair: what the drafter knows at a position, and the token after it. The first one knows the target's
fused features there, each further one what the pass before made. Keys and values of the pairs whose features the target
has computed are committed. Position p's pair lies in slot p, and the pair of a row's last committed position waits for
the anchor. Shapes: B rows, R rows of the state, J committed positions, T pairs of a pass, D width, FD tapped features
side by side, V vocabulary of the drafter.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import checkpoint
from dflash_jax.cache import KV, Cache, Capacity, Fresh, commit, init_cache
from dflash_jax.config import Raw
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.growth import Options, Tips, grow
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.state import TargetModel
from dflash_jax.drafters import base, eagle3_config
from dflash_jax.drafters.config import DrafterConfig
from dflash_jax.drafters.eagle3_config import Eagle3Config, official_taps
from dflash_jax.mesh import ROWS, WHOLE, Layout, on_every_device
from dflash_jax.models.attention import Attention, Pass, keys_and_values
from dflash_jax.models.layers import MLP, Linear, RMSNorm, unfuse

TREE_WIDTH = 10  # nodes of a depth that a tree goes on from (reference `eagle/model/cnets.py`, `top_k`)

CLASSES, matches, config = eagle3_config.CLASSES, eagle3_config.matches, eagle3_config.config
canonical_name = eagle3_config.canonical_name


def fresh(common: Raw, settings: Any) -> Raw:
    """`config.json` of a new drafter, as DeepSpec writes it; see `dflash.fresh`."""
    own = {"architectures": ["Qwen3Eagle3Model"], "ttt_length": settings.block_size - 1}
    own["target_layer_ids"] = list(settings.target_layer_ids) or sorted({*official_taps(common["num_target_layers"])})
    others = "dflash_config", "block_size", "sample_from_anchor"
    raw = {name: value for name, value in common.items() if name not in others}
    return raw | own | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def becomes(config: DrafterConfig, raw: Raw, settings: Any) -> Raw | None:
    """See `dflash.becomes`."""
    return None


def initial(path: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """A new parameter, where it is not drawn as all others are."""
    return None


class EagleState(struct.PyTreeNode):
    """What the drafter carries from step to step.

    Attributes:
        cache: the pairs of all committed positions but the last.
        feature: fused features of the last.
    """

    cache: Cache
    feature: Float[Array, "R D"]

    def begin(self, row: Int[Array, ""]) -> "EagleState":
        return self.replace(cache=self.cache.begin(row))

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> "Snapshot":
        feature = jax.lax.dynamic_slice_in_dim(self.feature, row, 1)
        return Snapshot(self.cache.snapshot(row, start - 1, count), feature)

    def restore(self, snapshot: "Snapshot", row: Int[Array, ""], end: Int[Array, ""]) -> "EagleState":
        feature = jax.lax.dynamic_update_slice_in_dim(self.feature, snapshot.feature, row, 0)
        return EagleState(self.cache.restore(snapshot.pairs, row, end - 1), feature)

    def partition(self) -> "EagleState":
        return EagleState(self.cache.partition(), P(ROWS))  # type: ignore[arg-type]


class Snapshot(struct.PyTreeNode):
    """Pairs of some positions and the features after them; see `cache.Entry.snapshot`."""

    pairs: tuple[Any, ...]
    feature: Float[Array, "1 D"]

    def partition(self) -> "Snapshot":
        return Snapshot(tuple(pairs.partition() for pairs in self.pairs), P())  # type: ignore[arg-type]


class Model(nn.Module):
    """Fusion of tapped features, the layer and the final norm."""

    config: Eagle3Config
    layout: Layout

    def setup(self):
        c, mixer = self.config, self.config.layers[0].attention
        D, eps, taps = c.hidden_size, c.rms_norm_eps, len(c.target_layer_ids)
        heads = 2 * mixer.kv_heads(self.layout) * mixer.head_dim
        self.fc = Linear((taps * c.target_hidden_size, D))
        if c.norm_before_fc:
            self.input_norm = RMSNorm(taps * c.target_hidden_size, eps)
        if c.fc_norm:
            self.fc_norms = [RMSNorm(c.target_hidden_size, eps) for _ in range(taps)]
        self.input_layernorm, self.hidden_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        norm = eps if c.qk_norm else None
        self.self_attn = Attention(D, mixer, self.layout, c.attention_bias, qk_norm=norm)
        self.kv_proj = Linear((2 * D, heads), c.attention_bias)
        if c.qk_norm:
            self.k_norm = RMSNorm(mixer.head_dim, eps)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = MLP(D, c.layers[0].intermediate_size, self.layout)
        self.norm = RMSNorm(D, eps)

    def fuse(self, features: Float[Array, "B J FD"]) -> Float[Array, "B J D"]:
        """What is known at a position the target has seen."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = jnp.split(features, len(self.fc_norms), axis=-1)
            features = jnp.concatenate([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], axis=-1)
        return self.fc(features)

    def pairs(self, known: Float[Array, "B T D"], embedded: Float[Array, "B T D"], at: Pass) -> Fresh:
        """Keys and values of pairs."""
        return self._fresh(self._joined(known, embedded), at)

    def forward(
        self, known: Float[Array, "B T D"], embedded: Float[Array, "B T D"], at: Pass, entry: Any, before: Fresh | None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Fresh]:
        """One pass.

        Args:
            before: keys and values of earlier passes since the anchor.

        Returns:
            The final-normed state, what the next pass knows, and `before` with this pass's keys and values.
        """
        c, x = self.config, self._joined(known, embedded)
        at = at.replace(rope=at.tables(c.layers[0].attention, x.dtype))
        fresh = self._fresh(x, at)
        if before is not None:
            join = lambda old, new: jnp.concatenate([old, new], axis=2)
            fresh = jax.tree.map(join, before, fresh)
        residual = self.hidden_norm(known) if c.norm_before_residual else known
        h, _ = self.self_attn(x, at, entry, fresh)
        x = on_every_device(residual + h)
        x = on_every_device(x + self.mlp(self.post_attention_layernorm(x)))
        out = self.norm(x)
        return out, out if c.norm_output else x, fresh

    def _joined(self, known: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(known)], axis=-1)

    def _fresh(self, x: Float[Array, "B T E"], at: Pass) -> Fresh:
        mixer, norm, kv = self.config.layers[0].attention, self.k_norm if self.config.qk_norm else None, self.kv_proj(x)
        k, v = unfuse(kv, [kv.shape[-1] // 2] * 2, self.layout.shards)
        return keys_and_values(k, v, mixer.head_dim, at.tables(mixer, x.dtype), norm)


def ancestors(lineage: Int[Array, "B W d"], widths: Sequence[int]) -> Bool[Array, "B W F"]:
    """Which nodes of all passes lead to each node of the last one, itself included; see `growth.Tips`."""
    seen = [jnp.ones((*lineage.shape[:2], 1), bool)]
    for depth, width in enumerate(widths[1:]):
        seen.append(lineage[:, :, depth, None] == jnp.arange(width)[None, None])
    return jnp.concatenate(seen, axis=2)


class Drafter(base.Drafter):
    """A loaded EAGLE-3 drafter. A pytree of its parameters; its state between rounds is a `EagleState`."""

    config: Eagle3Config = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["fc"]["weight"].dtype

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> EagleState:
        """An empty state; see `init_cache`."""
        cache = init_cache(self.config.mixers, rows, slots, self.dtype, self.layout, widest)
        return EagleState(cache, jnp.zeros((rows, self.config.hidden_size), self.dtype))

    def propose(
        self,
        target: TargetModel,
        state: EagleState,
        anchor: Int[Array, " B"],
        lengths: Int[Array, " B"],
        block_size: int,
        choice: Choice,
        *,
        rows: Int[Array, " B"] | None = None,
    ) -> Proposal:
        """Token after token, one pass each; of a tree, one pass for the best nodes of each depth."""
        feature = state.feature if rows is None else state.feature[rows]
        at = jnp.maximum(lengths - 1, 0)

        def expand(depth: int, tips: Tips, carried: Any) -> tuple[Options, Any]:
            known, fresh, widths = carried
            known = jnp.take_along_axis(known, tips.parents[:, :, None], axis=1)
            widths = (*widths, tips.tokens.shape[1])
            visible = None if tips.seen is None else ancestors(tips.lineage, widths)
            shape = {"widths": widths, "visible": visible, "rows": rows}
            hidden, known, fresh = self.forward(target, known, tips.tokens, state, at, fresh, **shape)
            return Options(self.unembed(target, hidden)), (known, fresh, widths)

        begin, depth = (feature[:, None], None, ()), self.depth(block_size)
        return grow(choice, anchor, depth, expand, begin, width=TREE_WIDTH, vocabulary=self.vocabulary)

    def forward(
        self,
        target: TargetModel,
        known: Float[Array, "B W D"],
        tokens: Int[Array, "B W"],
        state: EagleState,
        lengths: Int[Array, " B"],
        before: Fresh | None,
        *,
        widths: Sequence[int] | None = None,
        visible: Bool[Array, "B W F"] | None = None,
        rows: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B W D"], Float[Array, "B W D"], Fresh]:
        """One pass over a pair of each row, or over several of one depth; see `Model.forward`.

        Args:
            known, tokens: the pairs; their position is `lengths` and one more for every earlier pass.
            lengths: pairs of each row in the state.
            widths: pairs of each earlier pass and of this one; None is one each.
            visible: which pairs of these passes each pair sees; None is all.
        """
        if widths is None:
            widths = (1,) * (1 if before is None else before.k.shape[2] + 1)
        depths = np.repeat(np.arange(len(widths)), widths)
        positions = lengths[:, None] + jnp.asarray(depths)[None]
        at = Pass(positions[:, -widths[-1] :], visible, lengths, rows, key_positions=positions)
        cache = state.cache
        return self._apply("forward", known, self.embed(target, tokens), at, cache.entries[cache.of_layer[0]], before)

    def teacher_forced(
        self,
        target: TargetModel,
        features: Float[Array, "B S FD"],
        starts: Int[Array, "B S"],
        blocks: base.Blocks,
        *,
        remat: bool = False,
    ) -> Any:
        """Final-normed states of every pass of every block: training-time test (paper section 3)."""
        B, A, P = blocks.labels.shape
        behind = jnp.roll(blocks.text, -1, axis=1)  # of the last position: no block reads it
        positions = jnp.broadcast_to(jnp.arange(features.shape[1])[None], starts.shape)
        known, nobody = self._apply("fuse", features.astype(self.dtype)), jnp.zeros(B, jnp.int32)
        pairs = self._apply(
            "pairs", known, self.embed(target, behind), Pass(positions, None, nobody, None, starts=starts)
        )
        entry, before = KV(pairs.k, pairs.v), jnp.maximum(blocks.anchors - 1, 0)
        flat, lengths = (lambda x: x.reshape(B * A, *x.shape[2:])), before.reshape(-1)
        state = flat(jnp.take_along_axis(known, before[:, :, None], axis=1))[:, None]
        first = jnp.minimum(flat(blocks.starts), lengths)[:, None]
        fresh, hidden = None, list[Array]()
        for i in range(P):
            at = Pass(lengths[:, None] + i, None, lengths, None, starts=first, per_row=A)
            embedded = self.embed(target, flat(blocks.previous)[:, i : i + 1])
            step = jax.checkpoint(partial(self._apply, "forward")) if remat else partial(self._apply, "forward")
            out, state, fresh = step(state, embedded, at, entry, fresh)
            hidden.append(out)
        return jnp.concatenate(hidden, axis=1).reshape(B, A, P, -1)

    def commit(
        self,
        target: TargetModel,
        state: EagleState,
        tokens: Int[Array, "B J"],
        features: Float[Array, "B J FD"],
        positions: Int[Array, "B J"],
        lengths: Int[Array, " B"],
        kept: Int[Array, " B"],
        *,
        rows: Int[Array, " B"] | None = None,
    ) -> EagleState:
        """Commits the pairs that these tokens complete: each with what is known at the position before."""
        fused = self._apply("fuse", features.astype(self.dtype))
        last = state.feature if rows is None else state.feature[rows]
        known = jnp.concatenate([last[:, None], fused[:, :-1]], axis=1)
        nobody = jnp.zeros_like(lengths)
        fresh = self._apply("pairs", known, self.embed(target, tokens), Pass(positions - 1, None, nobody, None))
        first = (lengths == 0).astype(jnp.int32)  # nothing stands before a row's first token
        path = jnp.minimum(jnp.arange(tokens.shape[1])[None] + first[:, None], tokens.shape[1] - 1)
        behind, count = jnp.maximum(lengths - 1, 0), jnp.maximum(kept - first, 0)
        cache = commit(state.cache, (fresh,), behind, count, path=path, rows=rows)
        end = jnp.take_along_axis(fused, jnp.maximum(kept - 1, 0)[:, None, None], axis=1)[:, 0]
        end = jnp.where((kept > 0)[:, None], end, last)
        return EagleState(cache, end if rows is None else state.feature.at[rows].set(end))


def tensors(config: Eagle3Config, layout: Layout = WHOLE) -> checkpoint.Table:
    """Checkpoint tensors of every parameter (drafting 3.1)."""
    c, layer, (D, copied) = config, config.layers[0], (config.hidden_size, checkpoint.copied)
    mixer, taps = layer.attention, len(c.target_layer_ids)
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    copies = layout.copies(mixer.num_kv_heads)
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"

    def joined(names: list[str], size: int, kind: str, *rest: int, copies: int = 1) -> checkpoint.Leaf:
        stored = [checkpoint.Stored(f"{name}.{kind}", (size, *rest)) for name in names]
        return checkpoint.fused([checkpoint.Section(each, copies=copies) for each in stored], layout.shards)

    kv, gate_up = [f"{attention}.{n}_proj" for n in "kv"], [f"{mlp}.{n}_proj" for n in ("gate", "up")]
    table: checkpoint.Table = {
        "fc/weight": copied("fc.weight", D, taps * c.target_hidden_size),
        "norm/weight": copied("norm.weight", D),
        "self_attn/q_proj/weight": joined([f"{attention}.q_proj"], queries, "weight", 2 * D),
        "self_attn/o_proj/weight": copied(f"{attention}.o_proj.weight", D, queries),
        "kv_proj/weight": joined(kv, keys, "weight", 2 * D, copies=copies),
        "mlp/gate_up_proj/weight": joined(gate_up, layer.intermediate_size, "weight", D),
        "mlp/down_proj/weight": copied(f"{mlp}.down_proj.weight", D, layer.intermediate_size),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        table[f"{name}/weight"] = copied(f"layers.0.{name}.weight", D)
    if c.attention_bias:
        table["self_attn/q_proj/bias"] = joined([f"{attention}.q_proj"], queries, "bias")
        table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", D)
        table["kv_proj/bias"] = joined(kv, keys, "bias", copies=copies)
    if c.qk_norm:
        table["self_attn/q_norm/weight"] = copied(f"{attention}.q_norm.weight", mixer.head_dim)
        table["k_norm/weight"] = copied(f"{attention}.k_norm.weight", mixer.head_dim)
    if c.norm_before_fc:
        table["input_norm/weight"] = copied("input_norm.weight", taps * c.target_hidden_size)
    for i in range(taps if c.fc_norm else 0):
        table[f"fc_norms_{i}/weight"] = copied(f"fc_norm.{i}.weight", c.target_hidden_size)
    return table | base.vocabulary_tensors(config)
