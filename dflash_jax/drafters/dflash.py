"""The block-diffusion drafter (DFlash v1; paper section 3, reference `dflash/model.py`), and what its kin build on.

One pass denoises `[anchor, MASK, ...]`. Every layer attends to the committed context through keys and
values projected from the target's own features, and to the block itself.
Shapes: B rows, T block slots, P proposals, J committed positions, L draft layers, FD tapped features side by side, V
vocabulary of the drafter.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax import checkpoint, sharding
from dflash_jax.cache import KV, Cache, Capacity, Fresh, commit, init_cache
from dflash_jax.config import LayerConfig, Raw
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.proposing import propose
from dflash_jax.decoding.state import Query, Seen, TargetModel
from dflash_jax.drafters import base
from dflash_jax.drafters.config import DFlashConfig, DrafterConfig, default_target_layer_ids, dflash_fields
from dflash_jax.drafters.fields import classes_of
from dflash_jax.drafters.kind import Kind, KindSettings, Settings
from dflash_jax.kernels.dispatch import platform
from dflash_jax.mesh import HEADS, WHOLE, Layout, on_every_device
from dflash_jax.models.attention import Attention, Pass, keys_and_values
from dflash_jax.models.layers import MLP, Linear, matmul, parameter, unfuse
from dflash_jax.models.norms import RMSNorm, inverse_rms, rms_norm, times
from dflash_jax.models.rope import Rope
from dflash_jax.models.tables import decoder_layer
from dflash_jax.models.weights import Outputs, biases, linear, linears
from dflash_jax.quantised import Quantised, each, joined
from dflash_jax.sharding import Rule

Config = TypeVar("Config", bound=DFlashConfig)
LONG = 1024  # positions of a context that no decoding step has at once


class Injection(NamedTuple):
    """How a layer makes keys and values, of block slots and of the context alike."""

    weight: Float[Array, "M D"] | Quantised
    bias: Float[Array, " M"] | None
    norm: Float[Array, " H"]  # of keys

    def heads(
        self,
        kv: Float[Array, "B T M"],
        config: DFlashConfig,
        layout: Layout,
        rope: Rope | None,
        factor: Float[Array, "B T K 1"] | None = None,
    ) -> Fresh:
        """Keys and values from a product with the weight; `factor` is `inverse_rms` of the keys, if that is known."""
        kv = kv if self.bias is None else kv + self.bias[None, None]
        k, v = unfuse(kv, [kv.shape[-1] // 2] * 2, layout.shards)
        if platform() == "tpu" and kv.shape[1] >= LONG:  # fused with what follows, libtpu 0.0.52 ends on it
            k, v = jax.lax.optimization_barrier((k, v))

        def norm(k: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
            return rms_norm(k, self.norm, config.rms_norm_eps, None if factor is None else times(k, factor))

        return keys_and_values(k, v, config.layers[0].attention.head_dim, rope, norm)


class Layer(nn.Module):
    """A Qwen3 layer whose keys and values are projected by what it is given."""

    config: DFlashConfig
    layer: LayerConfig
    layout: Layout

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], at: Pass, entry: PyTree, injection: Injection
    ) -> tuple[Float[Array, "B T D"], Fresh]:
        c, layer, D, eps = self.config, self.layer, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(D, layer.attention, self.layout, name="self_attn")
        h, x = self._normed(RMSNorm(D, eps, name="input_layernorm"), x)
        h, context = self.before("attention", h)
        fresh = injection.heads(matmul(h, injection.weight), c, self.layout, at.rope)
        h, _ = attention(h, at, entry, fresh)
        x = on_every_device(x + self.after(h, context))
        h, x = self._normed(RMSNorm(D, eps, name="post_attention_layernorm"), x)
        h, context = self.before("mlp", h)
        h = MLP(D, layer.intermediate_size, self.layout, name="mlp")(h)
        return on_every_device(x + self.after(h, context)), fresh

    def _normed(self, norm: RMSNorm, x: Float[Array, "B T D"]) -> tuple[Any, Float[Array, "B T D"]]:
        """What the sublayer reads, and `x` for those who read it afterwards."""
        only_products = type(self).before is Layer.before
        return norm.for_products(x) if only_products else (norm(x), x)

    def before(self, name: str, h: Any) -> tuple[Any, PyTree]:
        """What a sublayer, "attention" or "mlp", reads in place of its normed input, and what `after` needs to know.
        Kinds that build on DFlash do more before and after it."""
        return h, None

    def after(self, out: Float[Array, "B T D"], context: PyTree) -> Float[Array, "B T D"]:
        """What is added to the residual stream in place of a sublayer's output."""
        return out


class Model(nn.Module):
    """Fusion of tapped features, draft layers and final norm.

    The key and value projections of all layers are one array, `kv_proj` [L, 2*K*H, D]: block slots use
    a layer's slice, and committed features go through all layers in one product.
    """

    config: DFlashConfig
    layout: Layout

    @property
    def layer(self) -> type[Layer]:
        """The class of its layers."""
        return Layer

    def setup(self):
        c, mixer = self.config, self.config.layers[0].attention
        kv = 2 * mixer.kv_heads(self.layout) * mixer.head_dim
        self.layers = [self.layer(c, layer, self.layout) for layer in c.layers]
        self.kv_proj = parameter(self, "kv_proj", (len(c.layers), kv, c.hidden_size), gather=False)
        self.k_norm = self.param("k_norm", nn.initializers.ones, (len(c.layers), mixer.head_dim))
        if c.attention_bias:
            self.kv_bias = self.param("kv_bias", nn.initializers.zeros, (len(c.layers), kv))
        self.fc = Linear((len(c.target_layer_ids) * c.target_hidden_size, c.hidden_size))
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Float[Array, "B T D"], at: Pass, cache: Cache, remat: bool
    ) -> tuple[Float[Array, "B T _"], tuple[Fresh, ...]]:
        """Hidden states of the block (see `final`); its keys and values are never committed.

        With `remat`, a backward pass computes each layer again instead of keeping its insides.
        """
        at = at.replace(rope=at.tables(self.config.layers[0].attention, x.dtype))
        apply = nn.remat(self.layer.__call__) if remat else self.layer.__call__
        blocks = list[Fresh]()
        for i, (layer, injection) in enumerate(zip(self.layers, self._injections(), strict=True)):
            x, block = apply(layer, x, at, cache.entry(i), injection)
            blocks.append(block)
        return self.final(x), tuple(blocks)

    def _injections(self) -> list[Injection]:
        weights = each(sharding.gathered(self.kv_proj, "kv_proj"))
        biases = self.kv_bias if self.config.attention_bias else [None] * len(self.layers)
        return [Injection(*parts) for parts in zip(weights, biases, self.k_norm, strict=True)]

    def final(self, x: Float[Array, "B T D"]) -> Float[Array, "B T _"]:
        """What the pass makes of its last states."""
        return self.norm(x)

    def fuse(self, features: Float[Array, "B T FD"]) -> Float[Array, "B T D"]:
        """One context vector per position."""
        return self.hidden_norm(self.fc(features))

    def context(self, features: Float[Array, "B T FD"], at: Pass) -> tuple[Fresh, ...]:
        """KV injection: keys and values of every layer for committed positions (method 2.5)."""
        return self.injected(self.fuse(features), at)

    def injected(self, fused: Float[Array, "B T D"], at: Pass) -> tuple[Fresh, ...]:
        """The same from fused features."""
        kv_proj = sharding.gathered(self.kv_proj, "kv_proj")
        rope = at.tables(self.config.layers[0].attention, fused.dtype)
        factors: list[Array | None] = [None] * len(self.layers)
        if self.layout.shards == 1:
            kv = matmul(fused, joined(kv_proj))
            layers = jnp.split(kv, len(self.layers), axis=-1)
            if platform() == "gpu" and not self.config.attention_bias:  # of all layers by one launch
                H = self.config.layers[0].attention.head_dim
                both = inverse_rms(kv.reshape(*kv.shape[:2], 2 * len(layers), -1, H), self.config.rms_norm_eps)
                factors = [both[:, :, 2 * i] for i in range(len(layers))]
        else:  # rows are sharded within a layer, and would have to move to be one axis with the layers
            layers = [matmul(fused, weight) for weight in each(kv_proj)]
        parts = zip(self._injections(), layers, factors, strict=True)
        return tuple(injection.heads(kv, self.config, self.layout, rope, known) for injection, kv, known in parts)


class Drafter(base.Drafter):
    """A loaded DFlash drafter. Its state from step to step is a `Cache`."""

    config: DFlashConfig = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Cache:
        """An empty draft cache; windowed layers hold no more than their window."""
        return init_cache(self.config.mixers, rows, slots, self.dtype, self.layout, widest)

    def propose(self, target: TargetModel, state: Cache, query: Query, choice: Choice) -> Proposal:
        """Tokens for the positions after the anchor, every one chosen from its own slot of one pass."""
        return propose(self.restricted(choice), self.logits(target, state, query))

    @property
    def first_slot(self) -> int:
        """The first slot of the pass that predicts, or that predictions need."""
        return 0 if self.config.anchor_predicts else 1

    def restricted(self, choice: Choice) -> Choice:
        """The choice among the tokens that it may propose: its vocabulary, without its mask token."""
        return choice.restricted(self.vocabulary, forbidden=(self.config.mask_token_id,))

    def commit(self, target: TargetModel, state: Cache, seen: Seen) -> Cache:
        """Projects the target's features of committed positions into the draft cache."""
        fresh = self.context(seen.features, seen.positions)
        return commit(state, fresh, seen.lengths, seen.kept, rows=seen.rows)

    def forward(
        self, x: Float[Array, "B T D"], at: Pass, cache: Cache, *, remat: bool = False
    ) -> tuple[Float[Array, "B T _"], tuple[Fresh, ...]]:
        """Denoises embedded block slots against the committed context; reads the cache only.

        Args:
            x: the blocks.
            at: where they stand, and the context that each sees.
            cache: context.
            remat: see `Model.forward`.

        Returns:
            Final-normed hidden states, and the block's own keys and values.
        """
        return self._apply("forward", x, at, cache, remat)

    def context(
        self, features: Float[Array, "B J FD"], positions: Int[Array, "B J"], *, starts: Int[Array, "B J"] | None = None
    ) -> tuple[Fresh, ...]:
        """Keys and values of target features, for `cache.commit` into the draft cache.

        Args:
            features, positions: of the target's committed positions.
            starts: where the document of each position begins (see `Target.forward`).
        """
        no_context = jnp.zeros(positions.shape[0], jnp.int32)
        at = Pass(positions, None, no_context, None, starts=starts)
        return self._apply("context", features.astype(self.dtype), at)

    def logits(self, target: TargetModel, cache: Cache, query: Query) -> Float[Array, "B P V"]:
        """Float32 logits of the proposals for positions a+1, a+2, ... after the anchor.

        Args:
            target: supplies embedding and head where the checkpoint has none of its own.
            cache: draft cache holding exactly the positions before the anchor.
        """
        return self.unembed(target, self.denoise(target, cache, query))

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Hidden states of every prediction."""
        B, A, P = blocks.labels.shape
        positions = jnp.broadcast_to(jnp.arange(features.shape[1])[None], blocks.text_starts.shape)
        context = self.context(features, positions, starts=blocks.text_starts)
        cache = Cache(tuple(KV(fresh.k, fresh.v) for fresh in context), tuple(range(len(context))))
        flat = lambda x: x.reshape(B * A)
        size = P if self.config.anchor_predicts else P + 1
        query = Query(flat(blocks.tokens), flat(blocks.anchors), size)
        hidden = self.denoise(target, cache, query, starts=flat(blocks.starts), per_row=A, remat=remat)
        return hidden.reshape(B, A, -1, hidden.shape[-1])

    def denoise(
        self,
        target: TargetModel,
        cache: Cache,
        query: Query,
        *,
        starts: Int[Array, " B"] | None = None,
        per_row: int | None = None,
        remat: bool = False,
    ) -> Float[Array, "B P _"]:
        """Hidden states of the slots from `first_slot` on.

        Args:
            cache: see `logits`.
            starts: where the document of each anchor begins; None is at 0.
            per_row: see `models.attention.Pass`.
            remat: see `Model.forward`.
        """
        c, shape = self.config, (query.anchor.shape[0], query.block_size)
        tokens = jnp.full(shape, c.mask_token_id, jnp.int32).at[:, 0].set(query.anchor)
        positions = query.lengths[:, None] + jnp.arange(query.block_size)[None]
        scale = c.input_embedding_scale
        if scale is None:  # rows of the target's table, as the target reads them
            scale = 1.0 if c.own_embedding else target.config.embedding_scale
        x = (self.embed(target, tokens) * scale).astype(self.dtype)
        if starts is not None:
            starts = jnp.broadcast_to(starts[:, None], positions.shape)
        at = Pass(positions, None, query.lengths, query.rows, starts=starts, per_row=per_row)
        return self._apply("forward", x, at, cache, remat)[0][:, self.first_slot :]

    def unembed(self, target: TargetModel, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        c = self.config
        logits = super().unembed(target, hidden) * c.output_multiplier
        if c.final_logit_softcapping:
            logits = jnp.tanh(logits / c.final_logit_softcapping) * c.final_logit_softcapping
        return logits


class DFlashKind(Kind[Config, KindSettings]):
    """What DFlash and the kinds that build on it have in common.

    Attributes:
        architecture: the class name in the `config.json` of a new one.
    """

    drafter = Drafter
    architecture: ClassVar[str]
    rules = (
        Rule(r"kv_proj", 3, P(None, HEADS, "fsdp")),  # of all draft layers
        Rule(r"kv_bias", 2, P(None, HEADS)),
        Rule(r"k_norm", 2, P()),  # of all draft layers
    )

    def from_speculators(self, fields: Raw) -> Raw:
        return {"block_size": 8, **fields}

    def new_config(self, common: Raw, settings: KindSettings, taps: Sequence[int] | None = None) -> Raw:
        nested = dict(common["dflash_config"])
        if not taps and "target_layer_ids" not in nested:
            depths = common["num_target_layers"], common["num_hidden_layers"]
            taps = sorted({*default_target_layer_ids(*depths)})  # of a shallow target the rule names a layer twice
        nested |= {"target_layer_ids": list(taps)} if taps else {}
        return {**common, "dflash_config": nested, "architectures": [self.architecture]}

    def config_from(self, config: DrafterConfig, raw: Raw, settings: KindSettings) -> Raw | None:
        """A kind of this family can begin as a DFlash drafter."""
        if type(config) is not DFlashConfig:
            return None
        began = {"sample_from_anchor": config.anchor_predicts, "dflash_config": {}, **raw}
        return self.new_config(began, settings, config.target_layer_ids)

    def tensors(self, config: Config, layout: Layout = WHOLE) -> checkpoint.Table:
        """Method, section 7.3."""
        D, mixer = config.hidden_size, config.layers[0].attention
        features = len(config.target_layer_ids) * config.target_hidden_size
        layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
        of_layers = [base.keys_and_values(f"{layer}.self_attn", mixer, layout) for layer in layers]
        formats = config.storage.of
        norms = [checkpoint.copied(f"{layer}.self_attn.k_norm.weight", mixer.head_dim) for layer in layers]
        table: checkpoint.Table = {
            "kv_proj": linears(of_layers, D, layout.shards, formats=formats),
            "k_norm": checkpoint.stacked(norms),
            "fc/weight": linear([Outputs("fc", D)], features, formats=formats, product=False),
            "hidden_norm/weight": checkpoint.copied("hidden_norm.weight", D),
            "norm/weight": checkpoint.copied("norm.weight", D),
        }
        if config.attention_bias:
            table["kv_bias"] = checkpoint.stacked([biases(both, layout.shards) for both in of_layers])
        for name, layer in zip(layers, config.layers, strict=True):
            table |= decoder_layer(name.replace(".", "_"), name, D, layer, layout, fuse_qkv=False, formats=formats)
        return table | base.vocabulary_tensors(config)


class DFlash(DFlashKind[DFlashConfig, Settings]):
    """DFlash (v1). It takes every config that names no class."""

    name, architecture = "dflash", "DFlashDraftModel"
    # QwenDFlashDraftModel is AngelSlim's, DFlashSpeculator that of `speculators`, the assistant SGLang 0.5.23's alias
    # (models/dflash.py).
    classes = r"(Qwen3?)?DFlash(Qwen3)?(DraftModel|Model|ForCausalLM|Speculator)|MuseGlimmerAssistantModel"
    speculators = "dflash", "DFlashDraftModel"

    def matches(self, raw: Raw) -> bool:
        return not classes_of(raw) or super().matches(raw)

    def config(self, raw: Raw) -> DFlashConfig:
        return DFlashConfig(**dflash_fields(raw))
