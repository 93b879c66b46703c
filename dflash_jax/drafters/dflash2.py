"""DFlash 2: convolutions over the block around every sublayer, and a selector that chooses among a slot's best tokens
given the one before (reference `dflash/model.py`, `DFlash2DraftModel`).

Shapes: B rows, P proposals, C candidates of a slot, R rank, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax import checkpoint
from dflash_jax.cache import Cache
from dflash_jax.config import Raw
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.proposing import Frontier, Options, grow
from dflash_jax.decoding.sampling import top_k
from dflash_jax.decoding.selection import likeliest
from dflash_jax.decoding.state import Query, TargetModel
from dflash_jax.drafters import base, convolution, dflash
from dflash_jax.drafters.config import dflash_fields
from dflash_jax.drafters.convolution import ConvolvedConfig
from dflash_jax.drafters.fields import Lookup, size
from dflash_jax.drafters.kind import Settings
from dflash_jax.mesh import WHOLE, Layout, entered
from dflash_jax.models.layers import matmul
from dflash_jax.sharding import Rule


@dataclass(frozen=True)
class DFlash2Config(ConvolvedConfig):
    """A DFlash 2 drafter.

    Attributes:
        selector_rank: width of the selector's embeddings of tokens.
        selector_top_k: tokens of a slot that it chooses among.
    """

    selector_rank: int = 256
    selector_top_k: int = 16


class Model(dflash.Model):
    """A DFlash model with convolutions."""

    @property
    def layer(self) -> type[dflash.Layer]:
        return convolution.Layer


class Drafter(dflash.Drafter):
    """A loaded DFlash 2 drafter."""

    config: DFlash2Config = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model
    by_token: ClassVar[tuple[str, ...]] = ("predecessor_codebook", "successor_codebook")
    outside_model: ClassVar[tuple[str, ...]] = (*base.Drafter.outside_model, "candidate_selector")

    def propose(self, target: TargetModel, state: Cache, query: Query, choice: Choice) -> Proposal:
        """One pass, then slot after slot one of its best tokens, or several, given those of the slot before."""
        hidden, choice = self.denoise(target, state, query), self.restricted(choice)
        logits = choice.allowed(self.unembed(target, hidden))
        unary, candidates = likeliest(choice, logits, self.config.selector_top_k)
        gates, ids = self.gates(hidden), choice.ids(candidates)

        def expand(slot: int, frontier: Frontier, _: None) -> tuple[Options, None]:
            pairs = self.pairs(gates[:, slot], frontier.tokens, ids[:, slot])
            among = jnp.broadcast_to(candidates[:, slot, None], pairs.shape)
            return Options(unary[:, slot, None] + pairs, among), None

        return grow(choice, query.anchor, hidden.shape[1], expand, None)

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Hidden states, and what the selector makes of them and of the tokens before."""
        hidden = super().teacher_forced(target, features, blocks, remat=remat)
        gates = self.gates(hidden.reshape(*hidden.shape[:1], -1, hidden.shape[-1])).reshape(*hidden.shape[:3], -1)
        return hidden, self.params["candidate_selector"]["predecessor_codebook"][blocks.previous] * gates

    def heads(self) -> dict[str, PyTree]:
        return {"successor_codebook": self.params["candidate_selector"]["successor_codebook"]}

    def score(self, target: TargetModel, heads: dict[str, PyTree], states: PyTree) -> Float[Array, "M V"]:
        return self.unembed(target, states[0][None])[0]

    def refine(
        self, target: TargetModel, heads: dict[str, PyTree], scored: base.Scored
    ) -> tuple[Float[Array, " M"] | float, Bool[Array, " M"]]:
        """The selector's cross-entropy over its candidates, of which the label takes the last one's place if it is not
        among them."""
        states, logits, labels = scored.states, scored.logits, scored.known
        _, candidates = top_k(jax.lax.stop_gradient(logits)[None], self.config.selector_top_k)
        candidates = candidates[0]
        found = jnp.any(candidates == labels[:, None], axis=1)
        candidates = candidates.at[:, -1].set(jnp.where(found, candidates[:, -1], labels))
        ids = candidates if self.vocabulary is None else self.vocabulary[candidates]
        after = heads["successor_codebook"][ids].astype(jnp.float32)
        scores = jnp.take_along_axis(logits, candidates, axis=1)
        scores = scores + jnp.sum(states[1].astype(jnp.float32)[:, None] * after, axis=-1)
        label_score = jnp.sum(jnp.where(candidates == labels[:, None], scores, 0.0), axis=1)
        return jax.nn.logsumexp(scores, axis=1) - label_score, found & (label_score == jnp.max(scores, axis=1))

    def gates(self, hidden: Float[Array, "B P D"]) -> Float[Array, "B P R"]:
        """What a slot's hidden state makes of the selector's pairs."""
        with entered(self.mesh):
            return matmul(hidden, self.params["candidate_selector"]["hidden_projection"]["weight"])

    def pairs(
        self, gate: Float[Array, "B R"], previous: Int[Array, "B W"], candidates: Int[Array, "B C"]
    ) -> Float[Array, "B W C"]:
        """What is added to the logits of candidates after each of some tokens, in float32."""
        selector = self.params["candidate_selector"]
        with entered(self.mesh):
            before = (selector["predecessor_codebook"][previous] * gate[:, None]).astype(jnp.float32)
            after = selector["successor_codebook"][candidates].astype(jnp.float32)
            return jnp.sum(before[:, :, None] * after[:, None], axis=-1)


@dataclass(frozen=True)
class DFlash2Settings(Settings):
    """Hyper-parameters of a new DFlash 2 drafter.

    Attributes:
        conv_group_size: channels of a convolution that share their dynamic coefficients.
        selector_rank: rank of the selector.
        selector_top_k: candidate tokens per position for the selector.
    """

    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self):
        self.check_positive()


class DFlash2(dflash.DFlashKind[DFlash2Config, DFlash2Settings]):
    """DFlash 2."""

    name, architecture = "dflash2", "DFlash2DraftModel"
    # The classes with Beam and MiniMax in their names are aliases in SGLang 0.5.23 (models/dflash.py).
    classes = r"(Qwen3|MiniMax)?DFlash2(Beam)?(DraftModel|Model|ForCausalLM|Speculator)"
    fields = (*convolution.FIELDS, "selector_rank", "selector_top_k")
    drafter, settings = Drafter, DFlash2Settings
    speculators = "dflash2", "DFlash2DraftModel"
    zeros = (*convolution.ZEROS, "successor_codebook")
    rules = (
        *convolution.RULES,
        Rule(r"hidden_projection/weight", 2, P()),
        Rule(r"\w+_codebook", 2, P()),  # rows of them are looked up
    )

    def config(self, raw: Raw) -> DFlash2Config:
        """Raises ValueError, too, if one of the four fields is missing, or groups do not divide the width."""
        fields, get = dflash_fields(raw, self.fields, projectors=("dflash", "dflash2")), Lookup(raw)
        fields |= convolution.read(get, fields["hidden_size"])
        fields |= {name: size(get, name, most=2**16) for name in ("selector_rank", "selector_top_k")}
        c = DFlash2Config(**fields)
        if (most := c.draft_vocab_size) < c.selector_top_k:
            raise ValueError(f"selector_top_k must be at most the vocabulary's {most}, got {c.selector_top_k}")
        return c

    def from_speculators(self, fields: Raw) -> Raw:
        return {"sliding_window_non_causal": True, **super().from_speculators(fields)}

    def new_config(self, common: Raw, settings: DFlash2Settings, taps: Sequence[int] | None = None) -> Raw:
        raw = super().new_config(common, settings, taps)
        return {**raw, "dflash_config": {**raw["dflash_config"], "conv_kernel_size": 2, **asdict(settings)}}

    def initial(self, path: str, shape: tuple[int, ...], config: DFlash2Config) -> np.ndarray | None:
        return convolution.initial(path, super().initial(path, shape, config))

    def canonical_name(self, name: str) -> str:
        name = super().canonical_name(name)
        codebook = name.removesuffix(".weight")
        return codebook if codebook.endswith("_codebook") else name

    def tensors(self, config: DFlash2Config, layout: Layout = WHOLE) -> checkpoint.Table:
        """Method, section 6."""
        D, V, R = config.hidden_size, config.vocab_size, config.selector_rank
        table = super().tensors(config, layout) | convolution.tensors(config)
        selector = "candidate_selector"
        table[f"{selector}/hidden_projection/weight"] = checkpoint.copied(f"{selector}.hidden_projection.weight", R, D)
        for name in ("predecessor_codebook", "successor_codebook"):
            table[f"{selector}/{name}"] = checkpoint.copied(f"{selector}.{name}", V, R)
        return table
