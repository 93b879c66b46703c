"""LiLiCorr: a DFlash drafter that chooses a path through the best tokens of all slots (arXiv 2608.20530).

The best tokens of the slots are the candidates of a lattice. A small transformer sees all of them, and gives each a
vector for what follows it and one for what it follows. How well two candidates of neighboring slots go together is the
cosine of these two. What the first slot follows is the anchor, known by the features of the position before it. A chain
takes the best candidate of one slot after another. References: SGLang 0.5.23, `models/lilicorr.py`; for training,
NVIDIA ModelOpt, `plugins/hf_lilicorr.py`.
Shapes: B rows, P slots that predict, K candidates of a slot, J committed positions, A blocks of a row, M predictions, D
width of the drafter, H of the transformer, V vocabulary of the drafter, FD tapped features side by side.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from dflash_jax import checkpoint
from dflash_jax.cache import Capacity, Fresh, commit
from dflash_jax.config import Raw
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.proposing import Frontier, Options, grow
from dflash_jax.decoding.sampling import top_k
from dflash_jax.decoding.selection import likeliest
from dflash_jax.decoding.state import Query, Seen, TargetModel
from dflash_jax.drafters import base, convolution, dflash, lattice
from dflash_jax.drafters.config import dflash_fields
from dflash_jax.drafters.fields import Lookup, flag, number, size
from dflash_jax.drafters.kind import Settings
from dflash_jax.drafters.latest import Latest
from dflash_jax.drafters.lattice import Head, Lattice, LiLiCorrConfig, Potentials
from dflash_jax.mesh import WHOLE, Layout, entered
from dflash_jax.models.attention import Pass
from dflash_jax.sharding import Rule

CROSS_ENTROPY, PENALTY = 0.25, 0.25  # of the loss (the variant that ModelOpt calls "base")
_SIZES = "candidate_topk", "num_layers", "num_heads", "factor_dim"
_NUMBERS = "mlp_ratio", "vector_eps", "logit_scale"
# Names that the first versions of ModelOpt export, and what stands there since.
_OLDER = {
    r"feature_mlp\.0\.": "feature_norm.",
    r"feature_mlp\.1\.": "feature_mlp.up_proj.",
    r"feature_mlp\.3\.": "feature_mlp.down_proj.",
    r"\.mlp\.0\.": ".mlp.up_proj.",
    r"\.mlp\.2\.": ".mlp.down_proj.",
}


class Model(dflash.Model):
    """A DFlash model, with convolutions or without, that also returns what it makes of features."""

    @property
    def layer(self) -> type[dflash.Layer]:
        assert isinstance(self.config, LiLiCorrConfig)
        return convolution.Layer if self.config.conv_kernel_size else dflash.Layer

    def fused_context(
        self, features: Float[Array, "B J FD"], at: Pass
    ) -> tuple[tuple[Fresh, ...], Float[Array, "B J D"]]:
        """Keys and values of committed positions, and their fused features."""
        fused = self.fuse(features)
        return self.injected(fused, at), fused


class Drafter(dflash.Drafter):
    """A loaded LiLiCorr drafter. Its state from step to step is a `Latest`."""

    config: LiLiCorrConfig = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model
    by_token: ClassVar[tuple[str, ...]] = ("slot_embedding", "rank_embedding")
    outside_model: ClassVar[tuple[str, ...]] = (*base.Drafter.outside_model, "lilicorr")
    whole_blocks: ClassVar[bool] = True
    needs_target_logits: ClassVar[bool] = True

    def uses(self, path: tuple[str, ...]) -> int:
        """Most of the head sees every candidate of a slot."""
        once = "pass_hidden_proj", "context_proj", "anchor_out_head"
        return 1 if path[0] != "lilicorr" or path[1] in once else self.config.lilicorr_candidate_topk

    def init_state(self, rows: int, slots: Capacity, widest: int = 1) -> Latest:  # type: ignore[override]
        """An empty draft cache; windowed layers hold no more than their window."""
        cache = super().init_state(rows, slots, widest)
        return Latest(cache, jnp.zeros((rows, self.config.hidden_size), self.dtype))

    def commit(self, target: TargetModel, state: Latest, seen: Seen) -> Latest:  # type: ignore[override]
        """Projects the target's features of committed positions into the draft cache, and keeps the last ones."""
        at = Pass(seen.positions, None, jnp.zeros_like(seen.lengths), None)
        fresh, fused = self._apply("fused_context", seen.features.astype(self.dtype), at)
        return state.after(commit(state.cache, fresh, seen.lengths, seen.kept, rows=seen.rows), fused, seen)

    def propose(self, target: TargetModel, state: Latest, query: Query, choice: Choice) -> Proposal:  # type: ignore[override]
        """One pass, then slot after slot the best candidate, or several, after those of the slot before.

        Where a constraint proposes a token that is no candidate, the next slot's own log-probabilities count.
        """
        hidden, choice = self.denoise(target, state.cache, query), self.restricted(choice)
        logits = self.unembed(target, hidden)
        allowed, candidates = likeliest(choice, choice.allowed(logits), self.config.lilicorr_candidate_topk)
        # The head knows them in the order of their probability, which noise and penalties may have changed.
        plain = jnp.take_along_axis(logits, candidates, axis=2)
        order = jnp.argsort(plain, axis=2, descending=True, stable=True)
        plain, allowed, candidates = (jnp.take_along_axis(x, order, axis=2) for x in (plain, allowed, candidates))
        best = Lattice(choice.ids(candidates), plain - jax.nn.logsumexp(logits, axis=2, keepdims=True))
        anchor = self.anchor(state.rows(query.rows)[:, None], query.lengths[:, None] > 0)
        scores = self.potentials(target, self.params["lilicorr"], best, hidden, anchor)

        def expand(slot: int, frontier: Frontier, _: None) -> tuple[Options, None]:
            after = scores.first[:, None]
            if slot:
                same = best.ids[:, slot - 1, None] == frontier.tokens[:, :, None]
                place = jnp.argmax(same, axis=2)[:, :, None]
                after = jnp.take_along_axis(scores.pairs[:, slot - 1], place, axis=1)
                after = jnp.where(jnp.any(same, axis=2, keepdims=True), after, best.likely[:, slot, None])
            after = after + (allowed - plain)[:, slot, None]  # penalties, and what may not be proposed
            return Options(after, jnp.broadcast_to(candidates[:, slot, None], after.shape)), None

        return grow(choice, query.anchor, hidden.shape[1], expand, None)

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Hidden states, and what is known of the anchor of each."""
        hidden = super().teacher_forced(target, features, blocks, remat=remat)
        before = jnp.maximum(blocks.anchors - 1, 0)
        fused = self._apply("fuse", jnp.take_along_axis(features, before[:, :, None], axis=1).astype(self.dtype))
        anchor = self.anchor(fused, blocks.anchors > blocks.starts)
        return hidden, jnp.broadcast_to(anchor[:, :, None], (*hidden.shape[:3], anchor.shape[-1]))

    def heads(self) -> dict[str, PyTree]:
        return {"lilicorr": self.params["lilicorr"]}

    def score(self, target: TargetModel, heads: dict[str, PyTree], states: PyTree) -> Float[Array, "M V"]:
        return self.unembed(target, states[0][None])[0]

    def refine(
        self, target: TargetModel, heads: dict[str, PyTree], scored: base.Scored
    ) -> tuple[Float[Array, " M"] | float, Bool[Array, " M"]]:
        """The loss of the paths: cross-entropy among the candidates of a slot, given the label of the slot before; and
        the head's probability of each candidate, times how much less likely than the label the target thinks it is. Of
        slots whose label, and those before, are candidates."""
        logits, fold = scored.logits, lambda x: x.reshape(-1, scored.per_block, *x.shape[1:])
        _, candidates = top_k(jax.lax.stop_gradient(logits)[None], self.config.lilicorr_candidate_topk)
        candidates = candidates[0]
        likely = jnp.take_along_axis(logits, candidates, axis=1) - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        ids = candidates if self.vocabulary is None else self.vocabulary[candidates]
        hidden, anchor = map(fold, scored.states)
        scores = self.potentials(target, heads["lilicorr"], Lattice(fold(ids), fold(likely)), hidden, anchor[:, :1])
        found = fold(candidates == scored.labels[:, None])
        place = jnp.argmax(found, axis=2)
        reached = jnp.cumprod(jnp.any(found, axis=2).astype(jnp.int32), axis=1) > 0
        after = jnp.take_along_axis(scores.pairs, place[:, :-1, None, None], axis=2)[:, :, 0]
        chances = jax.nn.log_softmax(jnp.concatenate([scores.first[:, None], after], axis=1), axis=2)
        of_label = jnp.sum(jnp.where(found, chances, 0.0), axis=2)
        loss = -CROSS_ENTROPY * of_label
        if scored.target_logits is not None:
            logit = fold(jnp.take_along_axis(scored.target_logits(), candidates, axis=1))
            gap = jnp.sum(jnp.where(found, logit, 0.0), axis=2, keepdims=True) - logit
            loss += PENALTY * jnp.sum(jnp.exp(chances) * jnp.maximum(jax.lax.stop_gradient(gap), 0.0), axis=2)
        correct = reached & (of_label == jnp.max(chances, axis=2))
        return jnp.where(reached, loss, 0.0).reshape(-1), correct.reshape(-1)

    def anchor(self, feature: Float[Array, "B A D"], known: Bool[Array, "B A"]) -> Float[Array, "B A H"]:
        """See `Head.anchor`."""
        return self._scored(self.params["lilicorr"], "anchor", feature, known)

    def potentials(
        self,
        target: TargetModel,
        params: PyTree,
        best: Lattice,
        hidden: Float[Array, "B P D"],
        anchor: Float[Array, "B 1 H"],
    ) -> Potentials:
        """Logits of the candidates of each block; see `Head.potentials`.

        Args:
            target: whose embeddings the head was trained with, though a drafter may have its own.
            params: of the head.
        """
        embedded = target.table(best.ids.reshape(hidden.shape[0], -1)).astype(self.dtype)
        return self._scored(params, "potentials", embedded, best.likely, hidden.astype(self.dtype), anchor)

    def _scored(self, params: PyTree, method: str, *args: PyTree) -> PyTree:
        with entered(self.mesh):
            return Head(self.config).apply({"params": params}, *args, method=method)


@dataclass(frozen=True)
class LiLiCorrSettings(Settings):
    """Hyper-parameters of a new LiLiCorr drafter.

    Attributes:
        lilicorr_candidate_topk: candidate tokens per position.
        lilicorr_hidden_size: hidden size of the transformer that scores candidates; at most the drafter's.
        lilicorr_num_layers: layers of that transformer.
        lilicorr_num_heads: attention heads of that transformer.
        lilicorr_mlp_ratio: width of its MLPs, as a multiple of its hidden size.
        lilicorr_factor_dim: dimension of the vectors whose cosine similarity scores pairs; at most the drafter's.
        lilicorr_logit_scale: scale of these cosines as logits.
        conv_kernel_size: positions that a convolution in the drafter's layers reads; 0 has no convolutions.
        conv_group_size: channels of a convolution that share their dynamic coefficients.
    """

    lilicorr_candidate_topk: int = 8
    lilicorr_hidden_size: int = 1024
    lilicorr_num_layers: int = 2
    lilicorr_num_heads: int = 8
    lilicorr_mlp_ratio: float = 2.0
    lilicorr_factor_dim: int = 1024
    lilicorr_logit_scale: float = 8.0
    conv_kernel_size: int = 0
    conv_group_size: int = 16

    def __post_init__(self):
        if self.conv_kernel_size:
            self.check_positive()
        else:
            replace(self, conv_kernel_size=1)  # which checks the others


class LiLiCorr(dflash.DFlashKind[LiLiCorrConfig, LiLiCorrSettings]):
    """LiLiCorr."""

    name, architecture = "lilicorr", "LiLiCorrDraftModel"
    classes = r"(Qwen3)?LiLiCorr(DraftModel|Model|ForCausalLM)"
    fields = tuple(f"lilicorr_{name}" for name in ("enabled", "hidden_size", *_SIZES, *_NUMBERS))
    drafter, settings = Drafter, LiLiCorrSettings
    zeros = (*convolution.ZEROS, "feature_norm/bias", "slot_embedding", "rank_embedding")
    rules = (
        *convolution.RULES,
        Rule(r"(token|pass_hidden|context|factor_input)_proj/weight", 2, P()),
        Rule(r"(token|pass_hidden|context|factor_input)_proj/bias", 1, P()),
        Rule(r"(lattice_qkv|lattice_out|up|down|out_head|in_head|anchor_out_head)/weight", 2, P()),
        Rule(r"(lattice_qkv|lattice_out|up|down|out_head|in_head|anchor_out_head|feature_norm)/bias", 1, P()),
        Rule(r"(slot|rank)_embedding", 5, P()),
        Rule(r"relative_slot_bias", 2, P()),
        Rule(r"same_slot_bias", 1, P()),
    )

    def config(self, raw: Raw) -> LiLiCorrConfig:
        """Raises ValueError, too, if a field of the head is missing, which all change what it computes."""
        more, get = (*self.fields, *convolution.FIELDS), Lookup(raw)
        fields, D = dflash_fields(raw, more, projectors=("dflash", "lilicorr")), size(get, "hidden_size")
        if flag(get, "lilicorr_enabled") is False:
            raise ValueError(
                "lilicorr_enabled is false, and there are other fields of the head. Set it to true; or, without one, "
                "take all fields that begin with lilicorr_ out of config.json and name DFlashDraftModel as the class"
            )
        if fields["anchor_predicts"]:
            raise ValueError(
                "sample_from_anchor must be false for a LiLiCorr drafter, whose anchor predicts nothing; a DFlash "
                "drafter whose anchor does cannot become one"
            )
        if any(get(name) for name in convolution.FIELDS):
            fields |= convolution.read(get, D)
        head: dict[str, Any] = {f"lilicorr_{name}": size(get, f"lilicorr_{name}", most=2**16) for name in _SIZES}
        for name in (f"lilicorr_{name}" for name in _NUMBERS):
            if (value := number(get, name, default=0.0)) <= 0:
                raise ValueError(f"config.json must have a positive {name}, got {get(name)!r:.80}")
            head[name] = value
        width = get("lilicorr_hidden_size")
        as_layers = width == 0 and not isinstance(width, bool)
        head["lilicorr_hidden_size"] = D if as_layers else size(get, "lilicorr_hidden_size", most=2**16)
        if head["lilicorr_hidden_size"] % head["lilicorr_num_heads"]:
            given = f"{head['lilicorr_num_heads']} and {head['lilicorr_hidden_size']}"
            raise ValueError(f"lilicorr_num_heads must divide lilicorr_hidden_size, got {given}")
        if (most := fields["draft_vocab_size"]) < head["lilicorr_candidate_topk"]:
            got = head["lilicorr_candidate_topk"]
            raise ValueError(f"lilicorr_candidate_topk must be at most the vocabulary's {most}, got {got}")
        if fields["block_size"] < 2:
            raise ValueError(f"block_size of a LiLiCorr drafter must be at least 2, got {fields['block_size']}")
        return LiLiCorrConfig(**fields, **head, slots=fields["block_size"] - 1)

    def new_config(self, common: Raw, settings: LiLiCorrSettings, taps: Sequence[int] | None = None) -> Raw:
        raw = super().new_config(common, settings, taps)
        head: Raw = {"projector_type": self.name, "lilicorr_enabled": True, "lilicorr_vector_eps": 1e-4}
        given = asdict(settings)
        for name in ("lilicorr_hidden_size", "lilicorr_factor_dim"):
            given[name] = min(given[name], common["hidden_size"])
        convolved = bool(settings.conv_kernel_size)
        given = {name: value for name, value in given.items() if convolved or name not in convolution.FIELDS}
        return {**raw, "dflash_config": {**raw["dflash_config"], **head, **given}}

    def for_blocks(self, drafter: base.Drafter, block_size: int) -> base.Drafter:
        """The head has parameters for each slot, and for each distance of two."""
        drafter, slots = super().for_blocks(drafter, block_size), block_size - 1
        assert isinstance(drafter.config, LiLiCorrConfig)
        more, head = drafter.config.slots - slots, dict(drafter.params["lilicorr"])
        head["slot_embedding"] = head["slot_embedding"][:, :, :slots]
        head["relative_slot_bias"] = head["relative_slot_bias"][:, more : more + 2 * slots + 1]
        params = {**drafter.params, "lilicorr": head}
        return drafter.replace(params=params, config=replace(drafter.config, slots=slots))

    def initial(self, path: str, shape: tuple[int, ...], config: LiLiCorrConfig) -> np.ndarray | None:
        return convolution.initial(path, super().initial(path, shape, config))

    def canonical_name(self, name: str) -> str:
        name = super().canonical_name(name)
        if name.startswith("lilicorr."):
            for older, ours in _OLDER.items():
                name = re.sub(older, ours, name)
        return name

    def tensors(self, config: LiLiCorrConfig, layout: Layout = WHOLE) -> checkpoint.Table:
        convolutions = convolution.tensors(config) if config.conv_kernel_size else {}
        return super().tensors(config, layout) | convolutions | lattice.tensors(config)
