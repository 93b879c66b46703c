"""DSpark: a DFlash drafter whose logits are corrected by the token before (DeepSpec; `speculators`, `models/dspark`).

The correction of a slot is a product of two narrow matrices: an embedding of the token chosen for the slot before, and
a head. "gated" and "rnn" heads let the slot's hidden state, or a recurrent state, act in between.
Shapes: B rows, P proposals, R rank, V vocabulary of the drafter.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dflash_jax import checkpoint, sharding
from dflash_jax.cache import Cache
from dflash_jax.config import Raw
from dflash_jax.config_json import require
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.growth import Options, Tips, grow
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.state import TargetModel
from dflash_jax.drafters import base, dflash
from dflash_jax.drafters.config import DFlashConfig, DrafterConfig, Lookup, dflash_fields, flag, is_of
from dflash_jax.kernels.products import product
from dflash_jax.mesh import WHOLE, Layout, entered
from dflash_jax.models.layers import project

CLASSES = r"(Qwen3)?DSpark(DraftModel|Model|ForCausalLM)"
FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
TREE_CANDIDATES = 64  # tokens of a slot that the head of a tree looks at
canonical_name = base.canonical_name
Head = Literal["vanilla", "gated", "rnn"]


def matches(raw: Raw) -> bool:
    """Whether a config is that of such a drafter."""
    return is_of(raw, CLASSES, FIELDS)


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


def config(raw: Raw) -> DSparkConfig:
    """Reads `config.json`.

    Raises:
        ValueError: as for DFlash, or an unknown head.
    """
    fields, get = dflash_fields(raw, FIELDS), Lookup(raw)
    rank, kind = get("markov_rank", default=0), get("markov_head_type", default="vanilla")
    if rank:
        require({"markov_rank": rank}, "markov_rank")
    if kind not in get_args(Head):
        raise ValueError(f"markov_head_type must be one of {', '.join(get_args(Head))}, got {kind!r:.80}")
    confident, with_markov = (bool(flag(get, name)) for name in FIELDS[2:])
    informed = confident and with_markov
    if informed and not rank:
        raise ValueError("confidence_head_with_markov needs a markov_rank above 0")
    return DSparkConfig(
        **fields,
        markov_rank=rank or 0,
        markov_head_type=kind,
        enable_confidence_head=confident,
        confidence_head_with_markov=informed,
    )


def fresh(common: Raw, settings: Any) -> Raw:
    """`config.json` of a new drafter; see `dflash.fresh`. Its anchor predicts, too, unless `common` says otherwise."""
    own = {"markov_rank": settings.markov_rank, "markov_head_type": settings.markov_head_type}
    return {"sample_from_anchor": True, **common, **own, "architectures": ["DSparkDraftModel"]}


def becomes(config: DrafterConfig, raw: Raw, settings: Any) -> Raw | None:
    """`config.json` of a drafter that begins as a DFlash drafter; see `dflash.becomes`."""
    common = dflash.common_of(config, raw)
    return None if common is None else fresh(common, settings)


def initial(path: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """A new drafter begins as DFlash: its head adds nothing."""
    return np.zeros(shape, np.float32) if path.endswith("markov_w2") else None


class Drafter(dflash.Drafter):
    """A loaded DSpark drafter."""

    config: DSparkConfig = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    apart: ClassVar[tuple[str, ...]] = (*base.Drafter.apart, "markov_head", "confidence_head")

    def propose(
        self,
        target: TargetModel,
        state: Cache,
        anchor: Int[Array, " B"],
        lengths: Int[Array, " B"],
        block_size: int,
        choice: Choice,
        *,
        rows: Int[Array, " B"] | None = None,
    ) -> Proposal:
        """One pass, then slot after slot a token. An "rnn" head also reads the slot of an anchor that predicts none."""
        hidden = self.denoise(target, anchor, state, lengths, block_size, rows=rows)
        return self.chosen(target, anchor, hidden, choice)

    @property
    def first_slot(self) -> int:
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

    def chosen(
        self, target: TargetModel, anchor: Int[Array, " B"], hidden: Float[Array, "B S D"], choice: Choice
    ) -> Proposal:
        """A token for every slot, or a tree of them, given the one chosen for the slot before.

        In a tree, the head corrects a slot's `TREE_CANDIDATES` best tokens alone (`Choice.best`): logits of the whole
        vocabulary for every node would cost more than they bring.
        """
        begun, hidden = self.begun(anchor, hidden)
        logits = self.unembed(target, hidden)
        if not self.config.markov_rank:
            return choice.propose(logits, **self.choosable)
        best, ids = self.best(choice, logits) if choice.nodes else (logits, None)

        def expand(slot: int, tips: Tips, carried: Float[Array, "B _ R"]) -> tuple[Options, Float[Array, "B W R"]]:
            B, W = tips.tokens.shape
            carried = jnp.take_along_axis(carried, tips.parents[:, :, None], axis=1).reshape(B * W, -1)
            state = jnp.repeat(hidden[:, slot], W, axis=0)
            carried, latent = (x.reshape(B, W, -1) for x in self.latent(carried, tips.tokens.reshape(-1), state))
            if ids is None:
                return Options(best[:, slot, None] + self.bias(latent)), carried
            among = ids[:, slot]
            tokens = among if self.vocabulary is None else self.vocabulary[among]
            scores = best[:, slot, None] + self.bias_of(latent, among)
            return Options(scores, jnp.broadcast_to(tokens[:, None], scores.shape)), carried

        return grow(choice, anchor, hidden.shape[1], expand, begun[:, None], **self.choosable)

    def best(self, choice: Choice, logits: Float[Array, "B P V"]) -> tuple[Float[Array, "B P C"], Int[Array, "B P C"]]:
        """The best allowed tokens of every slot, as the drafter numbers them."""
        allowed = choice.allowed(logits, **self.choosable)
        return choice.best(allowed, min(TREE_CANDIDATES, allowed.shape[-1]), vocabulary=self.vocabulary)

    def teacher_forced(
        self,
        target: TargetModel,
        features: Float[Array, "B S FD"],
        starts: Int[Array, "B S"],
        blocks: base.Blocks,
        *,
        remat: bool = False,
    ) -> Any:
        """Hidden states, and what the biases are products of."""
        hidden = super().teacher_forced(target, features, starts, blocks, remat=remat)
        if not self.config.markov_rank:
            return hidden, hidden[..., :0]
        B, A, P = blocks.labels.shape
        carried, flat = self.begun(blocks.tokens.reshape(B * A), hidden.reshape(B * A, *hidden.shape[2:]))
        previous, latents = blocks.previous.reshape(B * A, P), list[Array]()
        for slot in range(P):
            carried, latent = self.latent(carried, previous[:, slot], flat[:, slot])
            latents.append(latent)
        return flat.reshape(B, A, P, -1), jnp.stack(latents, axis=1).reshape(B, A, P, -1)

    def heads(self) -> dict[str, Any]:
        return {"markov_w2": self.params["markov_head"]["markov_w2"]} if self.config.markov_rank else {}

    def score(self, target: TargetModel, heads: dict[str, Any], seen: Any) -> Float[Array, "M V"]:
        hidden, latent = seen
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


def tensors(config: DSparkConfig, layout: Layout = WHOLE) -> checkpoint.Table:
    """Checkpoint tensors of every parameter."""
    table, R, D = dflash.tensors(config, layout), config.markov_rank, config.hidden_size

    def linear(path: str, name: str, outputs: int, inputs: int) -> None:
        table[f"{path}/weight"] = checkpoint.copied(f"{name}.weight", outputs, inputs)
        table[f"{path}/bias"] = checkpoint.copied(f"{name}.bias", outputs)

    if R:
        table["markov_head/markov_w1"] = checkpoint.copied("markov_head.markov_w1.weight", config.vocab_size, R)
        table["markov_head/markov_w2"] = checkpoint.copied("markov_head.markov_w2.weight", config.draft_vocab_size, R)
    if R and config.markov_head_type == "gated":
        linear("markov_head/gate_proj", "markov_head.gate_proj", R, D + R)
    if R and config.markov_head_type == "rnn":
        linear("markov_head/joint_proj", "markov_head.joint_proj", 3 * R, 2 * R + D)
    if config.enable_confidence_head:
        seen = D + (R if config.confidence_head_with_markov else 0)
        linear("confidence_head/proj", "confidence_head.proj", 1, seen)
    return table
