"""Descriptions of models: frozen and hashable, so that a jitted program takes one as a static argument.

Families and drafters make them from a `config.json`; what they share for that is in `config_json`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax.cache import KV, Mixer
from dflash_jax.mesh import Layout
from dflash_jax.storage import Storage

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, halves layout ("neox").

    Attributes:
        theta: base of the geometric frequency series.
        kind: "default", "linear", "llama3", "yarn" or "proportional" (Hugging Face `rope_type`).
        factor: context extension factor.
        original_max_position_embeddings: trained context, for llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3 band edges.
        beta_fast, beta_slow, truncate: yarn band edges, in rotations.
        attention_factor: yarn's scale of cos and sin; None derives it from `factor` and the mscales.
        partial_rotary_factor: of "proportional", the share of the pairs that turn: the first ones, with the frequencies
            they have where all do.
        rotated: how many dimensions of a head, the first ones; 0 is all.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    partial_rotary_factor: float = 1.0
    rotated: int = 0


class LayerMixer(Mixer, Protocol):
    """The description of a layer that mixes positions, as a whole."""

    @property
    def rotary(self) -> tuple[RopeConfig, int] | None:
        """The rotary embedding of its heads and their dimensions; None rotates nothing."""
        ...


@dataclass(frozen=True)
class AttentionConfig:
    """One layer's attention: what its weights, its cache entry and its kernel follow from.

    Attributes:
        num_heads, num_kv_heads: query heads, and key-value heads that groups of them share.
        head_dim: of queries and keys.
        rope: rotary embedding; None rotates nothing.
        window: a query at position p sees keys at positions above p - window; None is unbounded.
        causal: whether a block position sees only block positions up to its own.
        scale: of the scores; None is `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
        shares: an earlier layer whose keys and values it reads instead of having its own.
        bias: whether the projections of queries, keys and values have one.
        output_bias: whether the projection of the output has one, too, where the others have.
        qk_norm: epsilon of the norms of queries and keys; None has none.
        qk_norm_per_head: whether these are norms of every head, or of all heads together.
        sinks: whether every query head has an attention sink: a logit without a key in its softmax.
        value_norm: epsilon of a norm of every value head, without a weight; None has none.
        values_are_keys: whether values are what the keys are made of, before their norm and rotation.
        gate: whether the output passes a sigmoid gate of the layer's input, whose projection is fused with the others.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    window: int | None = None
    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    shares: int | None = None
    bias: bool = False
    output_bias: bool = True
    qk_norm: float | None = None
    qk_norm_per_head: bool = True
    sinks: bool = False
    value_norm: float | None = None
    values_are_keys: bool = False
    gate: bool = False

    @property
    def rotary(self) -> tuple[RopeConfig, int] | None:
        return None if self.rope is None else (self.rope, self.head_dim)

    def kv_heads(self, layout: Layout) -> int:
        """Key-value heads of all devices together: where several share a head, each of them has a copy."""
        return self.num_kv_heads * layout.copies(self.num_kv_heads)

    def entry(self, rows: int, slots: int, dtype: DTypeLike, layout: Layout, widest: int) -> KV:
        heads = self.kv_heads(layout)
        return KV.allocate(rows, heads, slots, self.head_dim, dtype, window=self.window, widest=widest)

    def indivisible(self, layout: Layout, block: int = 1) -> str | None:
        shards = layout.shards
        if self.num_heads % shards:
            return f"{self.num_heads} query heads"
        if self.num_kv_heads % shards and shards % self.num_kv_heads:
            return f"{self.num_kv_heads} key-value heads"
        for heads in (self.num_heads, self.kv_heads(layout)):
            if shards > 1 and heads * self.head_dim % (shards * block):
                return f"{heads * self.head_dim} outputs in quantized blocks of {block}"
        return None


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts, of which every token goes through some. The names are Hugging Face's.

    Attributes:
        num_experts, num_experts_per_tok: how many there are, and how many a token goes through.
        intermediate_size: inner width of one.
        scores: what makes weights of the router's logits: a softmax over all experts, a softmax over the token's top-k,
            or a sigmoid.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        routed_scaling_factor: what they are multiplied by at last.
        correction_bias: whether the router adds a bias to the scores to choose by, though not to the weights.
        bias: whether the router and every product have one.
        swiglu_limit: where gpt-oss clamps its SwiGLU; None is the plain SwiGLU.
        activation: of the gate (`layers.ACTIVATIONS`).
        per_expert_scale: whether an expert's weight is multiplied by a number of its own.

    Raises:
        ValueError: more experts per token than there are.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = False
    scores: Literal["softmax", "softmax_topk", "sigmoid"] = "softmax"
    correction_bias: bool = False
    routed_scaling_factor: float = 1.0
    bias: bool = False
    swiglu_limit: float | None = None
    activation: str = "silu"
    per_expert_scale: bool = False

    def __post_init__(self):
        if self.num_experts_per_tok > self.num_experts:
            chosen, every = self.num_experts_per_tok, self.num_experts
            raise ValueError(f"num_experts_per_tok must be at most the {every} experts, got {chosen}")


@dataclass(frozen=True)
class LayerConfig:
    """One layer.

    Attributes:
        mixer: its attention, or what it has instead.
        intermediate_size: inner width of its MLP.
        experts: what it has instead of an MLP; None if it has one.
        mlp_bias: whether the products of its MLP have a bias.
    """

    mixer: LayerMixer
    intermediate_size: int
    experts: ExpertsConfig | None = None
    mlp_bias: bool = False

    @property
    def attention(self) -> AttentionConfig:
        """Its mixer, where that is known to be attention."""
        assert isinstance(self.mixer, AttentionConfig)
        return self.mixer

    @property
    def inner(self) -> int:
        """Inner width of its MLP, or of each of its experts."""
        return self.experts.intermediate_size if self.experts else self.intermediate_size

    def indivisible(self, layout: Layout, block: int = 1) -> str | None:
        """Why its MLP or experts cannot be split so, or None; see `cache.Mixer`."""
        if self.experts and self.experts.num_experts % layout.experts:
            return f"{self.experts.num_experts} experts"
        if self.inner % (parts := layout.inner if self.experts else layout.shards):
            return f"an inner width of {self.inner}"
        if parts > 1 and self.inner % (parts * block):
            return f"{self.inner} outputs in quantized blocks of {block}"
        return None


@dataclass(frozen=True)
class DecoderConfig:
    """What a target and a drafter have in common; the names are Hugging Face's. Nothing here depends on a mesh.

    Attributes:
        storage: how their weights are stored, where they are quantized.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    storage: Storage = field(default=Storage(), kw_only=True)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[LayerMixer, ...]:
        """What each layer mixes positions with."""
        return tuple(layer.mixer for layer in self.layers)

    def indivisible(self, layout: Layout) -> str | None:
        """Why the model cannot be split so, or None."""
        if self.vocab_size % layout.shards:
            return f"a vocabulary of {self.vocab_size}"
        for i, layer in enumerate(self.layers):
            named = lambda *names, i=i: self.storage.unit_of(*(f"model.layers.{i}.{name}" for name in names))
            mixing = named(getattr(layer.mixer, "last", "self_attn.o_proj"))
            inner = self.storage.unit if layer.experts else named("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            if why := layer.mixer.indivisible(layout, mixing) or layer.indivisible(layout, inner):
                return why
        return None


@dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A target language model; families may add fields of their own.

    Attributes:
        model_type: the Hugging Face family; names the file in `models/` that implements it.
        tie_word_embeddings: whether the head is the transposed embedding.
        eos_token_ids: stop tokens; `load_target` prefers those of `generation_config.json`.
        max_position_embeddings: trained context; 0 if the config does not say.
        embedding_scale: of the embeddings that the first layer reads. A drafter whose config gives no scale reads them
            so, too.
    """

    model_type: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 0
    embedding_scale: float = 1.0

    def with_tensors(self, names: Collection[str]) -> Self:
        """The configuration of a checkpoint that has these tensors, where they may be stored in several ways."""
        return self

    @property
    def most_positions(self) -> int:
        """The trained context, or what a scaled rotary embedding makes of it; 0 if the config does not say."""
        trained = self.max_position_embeddings
        ropes = [mixer.rotary[0] for mixer in self.mixers if mixer.rotary]
        scaled = {rope.factor * (rope.original_max_position_embeddings or trained) for rope in ropes}
        return int(max([trained, *scaled])) if trained else 0


def parse_dtype(name: str | None) -> Any:
    """Returns the array type for "float32", "bfloat16" or "float16".

    None and "auto" are float32 on CPU, where bfloat16 products are slow; bfloat16 on accelerators; float16 on GPUs
    without it, those before Ampere.
    """
    if name in (None, "auto"):
        if jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) < 8:
            return jnp.float16
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or auto, got {name!r}")
    return jnp.dtype(name)
