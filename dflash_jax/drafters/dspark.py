"""DSpark: a DFlash drafter whose logits are corrected by the token before (DeepSpec; `speculators`, `models/dspark`).

The correction of a slot is a product of two narrow matrices: an embedding of the token chosen for the slot before, and
a head. "gated" and "rnn" heads let the slot's hidden state, or a recurrent state, act in between.
Shapes: B rows, P proposals, R rank, V vocabulary of the drafter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax import checkpoint, sharding
from dflash_jax.cache import Cache
from dflash_jax.config import Raw
from dflash_jax.config_json import mapping
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.proposing import Frontier, Options, grow, propose
from dflash_jax.decoding.selection import likeliest
from dflash_jax.decoding.state import Query, TargetModel
from dflash_jax.drafters import base, dflash
from dflash_jax.drafters.config import DFlashConfig, dflash_fields
from dflash_jax.drafters.fields import Lookup, flag, size
from dflash_jax.drafters.kind import Settings
from dflash_jax.kernels.products import product
from dflash_jax.mesh import HEADS, WHOLE, Layout, entered
from dflash_jax.models.layers import project
from dflash_jax.sharding import Rule

# Names that SGLang 0.5.23 reads at the top as well (speculative/dspark_components/dspark_config.py).
_PREFIXED = {f"dspark_{name}": name for name in ("block_size", "markov_rank", "markov_head_type", "target_layer_ids")}
_PREFIXED["dspark_noise_token_id"] = "mask_token_id"
# Where ModelOpt (export/plugins/hf_spec_export.py) and early versions of SpecForge have the tensors of the heads.
_ALIASES = {"logit_head.": ""}
_ALIASES |= {f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")}
_ALIASES["confidence_proj."] = "confidence_head.proj."
_FIELDS = """
    markov_rank markov_head_type enable_confidence_head use_confidence_head confidence_head_with_markov
""".split()
# Every release that has DSpark, 0.7.0 to 0.9.0, writes the field, true unless it was set otherwise. Between #677
# (2026-06-29) and #760 (2026-07-13) the sources had DSpark without it, and only masks predicted; such files do not say
# of which day they are, and others have lost the field. Readers differ, too: SGLang, vLLM and the library itself take
# its absence as true, llama.cpp as false (vllm#56792, sglang#30982).
WHICH_SLOTS = (
    "config.json of a DSpark drafter by speculators must give sample_from_anchor, found none, and there are two kinds: "
    "releases from 0.7.0 on train the anchor's slot to predict, too, and write true; versions between #677 and #760 "
    "wrote nothing and trained the masks' slots only. Acceptance is near 0 if the wrong one is taken. Say "
    "--drafter-config '{\"sample_from_anchor\": false}' (only masks predict) or '{\"sample_from_anchor\": true}' (the "
    "anchor predicts, too)"
)
TREE_CANDIDATES = 64  # tokens of a slot that the head of a tree looks at
Head = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """A DSpark drafter.

    Attributes:
        markov_rank: width of the Markov head; 0 has none.
        markov_head_type: "vanilla" looks at the token before alone, "gated" at the slot's hidden state, too, "rnn" also
            at a state that it carries through the block.
        enable_confidence_head: whether it has a head that says how likely a proposal is right. It is kept, but not
            asked.
        confidence_head_with_markov: whether that sees the embedding of the token before.
    """

    markov_rank: int = 0
    markov_head_type: Head = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def with_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """A tensor tells whether there is a confidence head, and what it sees: the writers' flags and their defaults
        differ."""
        config, shape = super().with_tensors(shapes), shapes.get("confidence_head.proj.weight")
        if shape is None:
            return config
        informed = self.markov_rank > 0 and shape[-1] == self.hidden_size + self.markov_rank
        return replace(config, enable_confidence_head=True, confidence_head_with_markov=informed)


def _gathered(raw: Raw) -> Raw:
    """A config with what lies in `dspark_config`, or under names that begin so, in `dflash_config`.

    Raises:
        ValueError: one field has two values.
    """
    named = {ours: raw[name] for name, ours in _PREFIXED.items() if raw.get(name) is not None}
    extra, inside = {**mapping(raw, "dspark_config")}, {**mapping(raw, "dflash_config")}
    for fields in (named, extra):
        for name, value in fields.items():
            if value is not None and inside.setdefault(name, value) != value:
                raise ValueError(f"config.json contradicts itself: {name} is {inside[name]!r:.80} and {value!r:.80}")
    outside = {name: value for name, value in raw.items() if name not in _PREFIXED and name != "dspark_config"}
    return {**outside, "dflash_config": inside} if named or extra else raw


class Drafter(dflash.Drafter):
    """A loaded DSpark drafter."""

    config: DSparkConfig = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    by_token: ClassVar[tuple[str, ...]] = ("markov_w1", "markov_w2")
    outside_model: ClassVar[tuple[str, ...]] = (*base.Drafter.outside_model, "markov_head", "confidence_head")

    @property
    def first_slot(self) -> int:
        """An "rnn" head also reads the slot of an anchor that predicts none."""
        return 0 if self._recurrent else super().first_slot

    @property
    def _recurrent(self) -> bool:
        return self.config.markov_rank > 0 and self.config.markov_head_type == "rnn"

    def begun(
        self, anchor: Int[Array, " M"], hidden: Float[Array, "M S D"]
    ) -> tuple[Float[Array, "M R"], Float[Array, "M P D"]]:
        """What the head carries into the slots that predict, and their hidden states, of the M blocks' slots."""
        carried = jnp.zeros((anchor.shape[0], self.config.markov_rank), self.dtype)
        if self._recurrent and not self.config.anchor_predicts:
            carried, _ = self.latent(carried, anchor, hidden[:, 0])
            hidden = hidden[:, 1:]
        return carried, hidden

    def propose(self, target: TargetModel, state: Cache, query: Query, choice: Choice) -> Proposal:
        """One pass, then slot after slot a token, or nodes of a tree, given the one chosen for the slot before.

        In a tree, the head corrects a slot's `TREE_CANDIDATES` best tokens alone (`selection.likeliest`): logits of the
        whole vocabulary for every node would cost more than they bring.
        """
        begun, hidden = self.begun(query.anchor, self.denoise(target, state, query))
        choice = self.restricted(choice)
        logits, candidates = self.unembed(target, hidden), None
        if not self.config.markov_rank:
            return propose(choice, logits)
        if choice.nodes:
            count = min(TREE_CANDIDATES, logits.shape[-1])
            logits, candidates = likeliest(choice, choice.allowed(logits), count)

        def expand(
            slot: int, frontier: Frontier, carried: Float[Array, "B _ R"]
        ) -> tuple[Options, Float[Array, "B W R"]]:
            B, W = frontier.tokens.shape
            carried = jnp.take_along_axis(carried, frontier.parents[:, :, None], axis=1).reshape(B * W, -1)
            state = jnp.repeat(hidden[:, slot], W, axis=0)
            carried, latent = (x.reshape(B, W, -1) for x in self.latent(carried, frontier.tokens.reshape(-1), state))
            if candidates is None:
                return Options(logits[:, slot, None] + self.bias(latent)), carried
            scores = logits[:, slot, None] + self.bias_of(latent, candidates[:, slot])
            return Options(scores, jnp.broadcast_to(candidates[:, slot, None], scores.shape)), carried

        return grow(choice, query.anchor, hidden.shape[1], expand, begun[:, None])

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Hidden states, and what the biases are products of."""
        hidden = super().teacher_forced(target, features, blocks, remat=remat)
        if not self.config.markov_rank:
            return hidden, hidden[..., :0]
        B, A, P = blocks.labels.shape
        carried, flat = self.begun(blocks.tokens.reshape(B * A), hidden.reshape(B * A, *hidden.shape[2:]))
        previous, latents = blocks.previous.reshape(B * A, P), list[Array]()
        for slot in range(P):
            carried, latent = self.latent(carried, previous[:, slot], flat[:, slot])
            latents.append(latent)
        return flat.reshape(B, A, P, -1), jnp.stack(latents, axis=1).reshape(B, A, P, -1)

    def heads(self) -> dict[str, PyTree]:
        return {"markov_w2": self.params["markov_head"]["markov_w2"]} if self.config.markov_rank else {}

    def score(self, target: TargetModel, heads: dict[str, PyTree], states: PyTree) -> Float[Array, "M V"]:
        hidden, latent = states
        logits = self.unembed(target, hidden[None])[0]
        return logits + self.bias(latent[None], heads["markov_w2"])[0] if heads else logits

    def latent(
        self, carried: Float[Array, "M R"], previous: Int[Array, " M"], hidden: Float[Array, "M D"]
    ) -> tuple[Float[Array, "M R"], Float[Array, "M R"]]:
        """What a slot carries on, and what its bias is a product of, given the token before it."""
        head, kind = self.params["markov_head"], self.config.markov_head_type
        with entered(self.mesh):
            embedded = head["markov_w1"][previous]
            if kind == "vanilla":
                return carried, embedded
            weights = head["gate_proj" if kind == "gated" else "joint_proj"]
            seen = [hidden.astype(self.dtype), embedded] if kind == "gated" else [carried, embedded, hidden]
            found = project(jnp.concatenate(seen, axis=-1)[None], weights["weight"])[0]
            found = found.astype(self.dtype) + weights["bias"][None]
            if kind == "gated":
                return carried, jax.nn.sigmoid(found) * embedded
            gate, candidate, out = jnp.split(found, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            return gate * carried + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)

    def bias(self, latent: Float[Array, "B P R"], weight: Float[Array, "V R"] | None = None) -> Float[Array, "B P V"]:
        """What is added to logits, in float32; with another weight than the drafter's own, if one is given."""
        weight = self.params["markov_head"]["markov_w2"] if weight is None else weight
        with entered(self.mesh):
            return project(latent, sharding.gathered(weight, "markov_w2"))

    def bias_of(self, latent: Float[Array, "B W R"], ids: Int[Array, "B C"]) -> Float[Array, "B W C"]:
        """The same for some tokens."""
        with entered(self.mesh):
            rows = sharding.lookup(self.params["markov_head"]["markov_w2"], ids)
            return product("bwr,bcr->bwc", latent, rows)


@dataclass(frozen=True)
class DSparkSettings(Settings):
    """Hyper-parameters of a new DSpark drafter.

    Attributes:
        markov_rank: rank of the Markov head.
        markov_head_type: input of the Markov head: vanilla reads the previous token, gated also the hidden state, rnn
            all previous tokens.
    """

    markov_rank: int = 256
    markov_head_type: Head = "vanilla"

    def __post_init__(self):
        self.check_positive()


class DSpark(dflash.DFlashKind[DSparkConfig, DSparkSettings]):
    """DSpark."""

    name, architecture = "dspark", "DSparkDraftModel"
    # LingDSparkModel is an alias of Qwen3DSparkModel in DeepSpec and SGLang 0.5.23 (models/dspark.py).
    classes = r"(Qwen3|Ling)?DSpark(DraftModel|Model|ForCausalLM|Speculator)"
    fields = (*_FIELDS, "dspark_config", *_PREFIXED)
    aliases, zeros = _ALIASES, ("markov_w2",)
    drafter, settings = Drafter, DSparkSettings
    speculators = "dspark", "DSparkDraftModel"
    rules = (
        Rule(r"(joint_proj|gate_proj|confidence_head/proj)/weight", 2, P()),
        Rule(r"(joint_proj|gate_proj|confidence_head/proj)/bias", 1, P()),
        Rule(r"markov_w1", 2, P()),  # rows of it are looked up
        Rule(r"markov_w2", 2, P(HEADS, "fsdp")),
    )

    def matches(self, raw: Raw) -> bool:
        return super().matches(raw) or Lookup(raw)("projector_type") == "dspark"

    def config(self, raw: Raw) -> DSparkConfig:
        """Raises ValueError, too, for a config of `speculators` that does not say which slots predict."""
        raw = _gathered(raw)
        if raw.get("speculators_version") and Lookup(raw)("sample_from_anchor") is None:
            raise ValueError(WHICH_SLOTS)
        # DeepSpec's, SpecForge's and ModelOpt's trainers shift the labels: the anchor predicts, too.
        fields, get = dflash_fields(raw, _FIELDS, projectors=("dspark",), anchor_predicts=True), Lookup(raw)
        rank, kind = get("markov_rank", default=0), get("markov_head_type", default="vanilla")
        if rank:
            size(get, "markov_rank", most=2**16)
        if kind not in get_args(Head):
            raise ValueError(f"markov_head_type must be one of {', '.join(get_args(Head))}, got {kind!r:.80}")
        confident = bool(flag(get, "enable_confidence_head", "use_confidence_head"))  # the second is ModelOpt's name
        informed = bool(flag(get, "confidence_head_with_markov")) and confident
        if informed and not rank:
            raise ValueError("confidence_head_with_markov needs a markov_rank above 0")
        head = {"markov_rank": rank or 0, "markov_head_type": kind, "enable_confidence_head": confident}
        return DSparkConfig(**fields, **head, confidence_head_with_markov=informed)

    def from_speculators(self, fields: Raw) -> Raw:
        """Raises ValueError where it is not known which slots predict."""
        if Lookup(fields)("sample_from_anchor") is None:
            raise ValueError(WHICH_SLOTS)
        return super().from_speculators(fields)

    def new_config(self, common: Raw, settings: DSparkSettings, taps: Sequence[int] | None = None) -> Raw:
        """Its anchor predicts, too, unless `common` says otherwise."""
        return {"sample_from_anchor": True, **super().new_config(common, settings, taps), **asdict(settings)}

    def tensors(self, config: DSparkConfig, layout: Layout = WHOLE) -> checkpoint.Table:
        table, R, D = super().tensors(config, layout), config.markov_rank, config.hidden_size

        def linear(path: str, name: str, outputs: int, inputs: int) -> None:
            table[f"{path}/weight"] = checkpoint.copied(f"{name}.weight", outputs, inputs)
            table[f"{path}/bias"] = checkpoint.copied(f"{name}.bias", outputs)

        if R:
            table["markov_head/markov_w1"] = checkpoint.copied("markov_head.markov_w1.weight", config.vocab_size, R)
            table["markov_head/markov_w2"] = checkpoint.copied(
                "markov_head.markov_w2.weight", config.draft_vocab_size, R
            )
        if R and config.markov_head_type == "gated":
            linear("markov_head/gate_proj", "markov_head.gate_proj", R, D + R)
        if R and config.markov_head_type == "rnn":
            linear("markov_head/joint_proj", "markov_head.joint_proj", 3 * R, 2 * R + D)
        if config.enable_confidence_head:
            seen = D + (R if config.confidence_head_with_markov else 0)
            linear("confidence_head/proj", "confidence_head.proj", 1, seen)
        return table
