"""EAGLE-3: one layer that drafts token by token (arXiv 2503.01840; SafeAILab/EAGLE, DeepSpec, `speculators`).

A pass takes a pair: what the drafter knows at a position, and the token after it. The first one knows the target's
fused features there, each further one what the pass before made. Keys and values of the pairs whose features the target
has computed are committed. Position p's pair lies in slot p, and the pair of a row's last committed position waits for
the anchor. Shapes: B rows, R rows of the state, J committed positions, T pairs of a pass, D width, FD tapped features
side by side, V vocabulary of the drafter.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax import checkpoint
from dflash_jax.cache import KV, Capacity, Fresh, commit, init_cache
from dflash_jax.config import Raw
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.proposing import Frontier, Options, grow
from dflash_jax.decoding.state import Query, Seen, TargetModel
from dflash_jax.drafters import base, eagle3_config
from dflash_jax.drafters.eagle3_config import Eagle3Config, official_taps
from dflash_jax.drafters.kind import Kind, Settings
from dflash_jax.drafters.latest import Latest
from dflash_jax.mesh import WHOLE, Layout, on_every_device
from dflash_jax.models.attention import Attention, Pass, keys_and_values
from dflash_jax.models.layers import MLP, Linear, unfuse
from dflash_jax.models.norms import RMSNorm
from dflash_jax.models.tables import swiglu
from dflash_jax.models.weights import Outputs, biases, linear

TREE_WIDTH = 10  # nodes of a depth that a tree goes on from (reference `eagle/model/cnets.py`, `top_k`)


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
        self.self_attn = Attention(D, mixer, self.layout)
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
        self,
        known: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        at: Pass,
        entry: PyTree,
        before: Fresh | None,
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
    """Which nodes of all passes lead to each node of the last one, itself included; see `proposing.Frontier`."""
    seen = [jnp.ones((*lineage.shape[:2], 1), bool)]
    for depth, width in enumerate(widths[1:]):
        seen.append(lineage[:, :, depth, None] == jnp.arange(width)[None, None])
    return jnp.concatenate(seen, axis=2)


class Passes(NamedTuple):
    """What the passes since the anchor leave to the next one.

    Attributes:
        known: what it knows at each node of the last one.
        fresh: keys and values of all pairs; None before the first pass.
        widths: pairs of each pass.
    """

    known: Float[Array, "B W D"]
    fresh: Fresh | None
    widths: tuple[int, ...]


class Drafter(base.Drafter):
    """A loaded EAGLE-3 drafter. A pytree of its parameters; its state from step to step is a `Latest`."""

    config: Eagle3Config = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Latest:
        """An empty cache of pairs. A row's last pair is never in it."""
        cache = init_cache(self.config.mixers, rows, slots, self.dtype, self.layout, widest)
        return Latest(cache, jnp.zeros((rows, self.config.hidden_size), self.dtype), behind=1)

    def propose(self, target: TargetModel, state: Latest, query: Query, choice: Choice) -> Proposal:
        """Token after token, one pass each; of a tree, one pass for the best nodes of each depth."""
        feature, at = state.rows(query.rows), jnp.maximum(query.lengths - 1, 0)

        def expand(depth: int, frontier: Frontier, carried: Passes) -> tuple[Options, Passes]:
            known = jnp.take_along_axis(carried.known, frontier.parents[:, :, None], axis=1)
            widths = (*carried.widths, frontier.tokens.shape[1])
            visible = None if frontier.seen is None else ancestors(frontier.lineage, widths)
            shape = {"widths": widths, "visible": visible, "rows": query.rows}
            hidden, known, fresh = self.forward(target, known, frontier.tokens, state, at, carried.fresh, **shape)
            return Options(self.unembed(target, hidden)), Passes(known, fresh, widths)

        choice, begin = choice.restricted(self.vocabulary), Passes(feature[:, None], None, ())
        return grow(choice, query.anchor, self.depth(query.block_size), expand, begin, width=TREE_WIDTH)

    def forward(
        self,
        target: TargetModel,
        known: Float[Array, "B W D"],
        tokens: Int[Array, "B W"],
        state: Latest,
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
        return self._apply("forward", known, self.embed(target, tokens), at, cache.entry(0), before)

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Final-normed states of every pass of every block: training-time test (paper section 3)."""
        B, A, P = blocks.labels.shape
        behind = jnp.roll(blocks.text, -1, axis=1)  # of the last position: no block reads it
        positions = jnp.broadcast_to(jnp.arange(features.shape[1])[None], blocks.text_starts.shape)
        known, no_context = self._apply("fuse", features.astype(self.dtype)), jnp.zeros(B, jnp.int32)
        at = Pass(positions, None, no_context, None, starts=blocks.text_starts)
        pairs = self._apply("pairs", known, self.embed(target, behind), at)
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

    def commit(self, target: TargetModel, state: Latest, seen: Seen) -> Latest:
        """Commits the pairs that these tokens complete: each with what is known at the position before."""
        fused = self._apply("fuse", seen.features.astype(self.dtype))
        known = jnp.concatenate([state.rows(seen.rows)[:, None], fused[:, :-1]], axis=1)
        at = Pass(seen.positions - 1, None, jnp.zeros_like(seen.lengths), None)
        fresh = self._apply("pairs", known, self.embed(target, seen.tokens), at)
        first = (seen.lengths == 0).astype(jnp.int32)  # nothing stands before a row's first token
        most = seen.tokens.shape[1] - 1
        path = jnp.minimum(jnp.arange(most + 1)[None] + first[:, None], most)
        behind, count = jnp.maximum(seen.lengths - 1, 0), jnp.maximum(seen.kept - first, 0)
        cache = commit(state.cache, (fresh,), behind, count, path=path, rows=seen.rows)
        return state.after(cache, fused, seen)


class Eagle3(Kind[Eagle3Config, Settings]):
    """EAGLE-3. Its block size is one more than its passes, and it has one layer."""

    name = "eagle3"
    classes = r"\w*[Ee]agle3\w*"
    drafter = Drafter
    speculators = "eagle3", "Eagle3"
    aliases = eagle3_config.ALIASES

    def config(self, raw: Raw) -> Eagle3Config:
        return eagle3_config.read(raw)

    def new_config(self, common: Raw, settings: Settings, taps: Sequence[int] | None = None) -> Raw:
        """As DeepSpec writes it."""
        taps = list(taps) if taps else sorted({*official_taps(common["num_target_layers"])})
        fields = {
            "architectures": ["Qwen3Eagle3Model"],
            "ttt_length": common["block_size"] - 1,
            "target_layer_ids": taps,
        }
        others = "dflash_config", "block_size", "sample_from_anchor"
        raw = {name: value for name, value in common.items() if name not in others}
        return raw | fields | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

    def tensors(self, config: Eagle3Config, layout: Layout = WHOLE) -> checkpoint.Table:
        """Drafting, section 3.1."""
        c, layer, (D, copied) = config, config.layers[0], (config.hidden_size, checkpoint.copied)
        mixer, taps, attention = layer.attention, len(c.target_layer_ids), "layers.0.self_attn"
        queries, kv = mixer.num_heads * mixer.head_dim, base.keys_and_values(attention, mixer, layout)
        formats = config.storage.of
        one = partial(linear, formats=formats)
        table: checkpoint.Table = {
            "fc/weight": one([Outputs("fc", D)], taps * c.target_hidden_size, product=False),
            "norm/weight": copied("norm.weight", D),
            "self_attn/q_proj/weight": one([Outputs(f"{attention}.q_proj", queries)], 2 * D),
            "self_attn/o_proj/weight": one([Outputs(f"{attention}.o_proj", D)], queries),
            "kv_proj/weight": one(kv, 2 * D, layout.shards),
            **swiglu("mlp", "layers.0.mlp", D, layer.intermediate_size, layout, formats=formats),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            table[f"{name}/weight"] = copied(f"layers.0.{name}.weight", D)
        if c.attention_bias:
            table["self_attn/q_proj/bias"] = copied(f"{attention}.q_proj.bias", queries)
            table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", D)
            table["kv_proj/bias"] = biases(kv, layout.shards)
        if c.qk_norm:
            table["self_attn/q_norm/weight"] = copied(f"{attention}.q_norm.weight", mixer.head_dim)
            table["k_norm/weight"] = copied(f"{attention}.k_norm.weight", mixer.head_dim)
        if c.norm_before_fc:
            table["input_norm/weight"] = copied("input_norm.weight", taps * c.target_hidden_size)
        for i in range(taps if c.fc_norm else 0):
            table[f"fc_norms_{i}/weight"] = copied(f"fc_norm.{i}.weight", c.target_hidden_size)
        return table | base.vocabulary_tensors(config)
