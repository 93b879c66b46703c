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
from dflash_jax.config import Raw, require
from dflash_jax.decoding.choice import Choice, Picks
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.state import TargetModel
from dflash_jax.drafters import base, dflash
from dflash_jax.drafters.config import DFlashConfig, Lookup, dflash_fields
from dflash_jax.mesh import WHOLE, Layout, entered
from dflash_jax.models.layers import project

FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
canonical_name = base.canonical_name
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
    confident = bool(get("enable_confidence_head"))
    informed = confident and bool(get("confidence_head_with_markov"))
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
        """One pass, then slot after slot a token."""
        hidden = self.denoise(target, anchor, state, lengths, block_size, rows=rows)
        picks = self.chosen(target, anchor, hidden, choice)
        return Proposal(picks.tokens, trials=picks.trials)

    def chosen(
        self, target: TargetModel, anchor: Int[Array, " B"], hidden: Float[Array, "B P D"], choice: Choice
    ) -> Picks:
        """A token for every slot, given the one chosen for the slot before."""
        if not self.config.markov_rank:
            return choice.picks(self.unembed(target, hidden), **self.choosable)
        logits, picks = self.unembed(target, hidden), list[Picks]()
        previous, carried = anchor, self.initial(anchor.shape)
        for slot in range(hidden.shape[1]):
            carried, latent = self.latent(carried, previous, hidden[:, slot])
            before = Picks.joined(picks).tokens if picks else None
            scores = logits[:, slot : slot + 1] + self.bias(latent[:, None])
            picks.append(choice.picks(scores, depth=slot, before=before, **self.choosable))
            previous = picks[-1].tokens[:, 0]
        return Picks.joined(picks)

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
        flat, previous = hidden.reshape(B * A, P, -1), blocks.previous.reshape(B * A, P)
        carried, latents = self.initial((B * A,)), list[Array]()
        for slot in range(P):
            carried, latent = self.latent(carried, previous[:, slot], flat[:, slot])
            latents.append(latent)
        return hidden, jnp.stack(latents, axis=1).reshape(B, A, P, -1)

    def heads(self) -> dict[str, Any]:
        return {"markov_w2": self.params["markov_head"]["markov_w2"]} if self.config.markov_rank else {}

    def score(self, target: TargetModel, heads: dict[str, Any], seen: Any) -> Float[Array, "M V"]:
        hidden, latent = seen
        logits = self.unembed(target, hidden[None])[0]
        return logits + project(latent[None], heads["markov_w2"])[0] if heads else logits

    def initial(self, shape: tuple[int, ...]) -> Float[Array, "... R"]:
        """What an "rnn" head carries into a block."""
        return jnp.zeros((*shape, self.config.markov_rank), self.dtype)

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

    def bias(self, latent: Float[Array, "B P R"]) -> Float[Array, "B P V"]:
        """What is added to logits, in float32."""
        with entered(self.mesh):
            return project(latent, sharding.gathered(self.params["markov_head"]["markov_w2"], "markov_w2"))


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
