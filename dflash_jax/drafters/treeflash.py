"""TreeFlash: a DFlash drafter whose slots are corrected for each likely token before them, all at once (arXiv
2606.03819; reference `tree_flash.py`).

A slot's state h becomes h + D (silu(g) u), where [u, g] = W [norm(embedding of the token before), final norm of h]. A
chain takes the slot before's best uncorrected token; a tree has a table of what follows each of its `TOP` best ones. A
node whose token is not among those of its slot has no children.
Shapes: B rows, T block slots, P proposals, M tokens before, W nodes of one depth, C candidates, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from dflash_jax import checkpoint
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
from dflash_jax.drafters.kind import Settings
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.layers import Linear
from dflash_jax.models.norms import RMSNorm
from dflash_jax.sharding import Rule

TOP = 16  # tokens of a slot that the next one is corrected for (reference `top_m`)
CANDIDATES = 64  # tokens after each of them that a tree looks at
EPSILON = 1e-6  # of the norm of embeddings (reference `SwiGLUApproximation`)


@dataclass(frozen=True)
class TreeFlashConfig(DFlashConfig):
    """A TreeFlash drafter.

    Attributes:
        corrected: whether it has the correction; without it, it is a DFlash drafter.
    """

    corrected: bool = True


class Correction(nn.Module):
    """What is added to the state of a slot, given the token before it."""

    width: int
    inner: int

    @nn.compact
    def __call__(self, embedded: Float[Array, "B M D"], normed: Float[Array, "B M D"]) -> Float[Array, "B M D"]:
        before = RMSNorm(self.width, EPSILON, name="norm")(embedded)
        both = Linear((2 * self.width, 2 * self.inner), True, name="ug")(jnp.concatenate([before, normed], axis=-1))
        u, g = jnp.split(both, 2, axis=-1)
        return Linear((self.inner, self.width), name="d")(nn.silu(g) * u)


class Model(dflash.Model):
    """A DFlash model that also returns states before the final norm."""

    def setup(self):
        super().setup()
        assert isinstance(self.config, TreeFlashConfig)
        if self.config.corrected:
            self.ar_approximation = Correction(self.config.hidden_size, self.config.layers[0].inner)

    def final(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """The states, and their final norm after them."""
        return jnp.concatenate([x, self.norm(x)], axis=-1)

    def corrected(self, both: Float[Array, "B M E"], embedded: Float[Array, "B M D"]) -> Float[Array, "B M D"]:
        """Final-normed states, given the embeddings of the tokens before."""
        x, normed = jnp.split(both, 2, axis=-1)
        return self.norm(x + self.ar_approximation(embedded, normed))


class Drafter(dflash.Drafter):
    """A loaded TreeFlash drafter."""

    config: TreeFlashConfig = struct.field(pytree_node=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[nn.Module]] = Model

    def propose(self, target: TargetModel, state: Cache, query: Query, choice: Choice) -> Proposal:
        """One pass; then all slots once more, corrected for the tokens before them."""
        both, choice = self.denoise(target, state, query), self.restricted(choice)
        plain = self.unembed(target, both[..., self.config.hidden_size :])
        if not self.config.corrected:
            return propose(choice, plain)
        count = min(TOP, plain.shape[-1]) if choice.nodes else 1
        _, best = likeliest(choice, choice.allowed(plain[:, :-1]), count)
        first = jnp.broadcast_to(query.anchor[:, None, None], (best.shape[0], 1, count))
        before = jnp.concatenate([first, choice.ids(best)], axis=1)
        logits = self.behind(target, both, before)
        if not choice.nodes:
            return propose(choice, logits[:, :, 0])
        return self.tree(choice, query.anchor, logits, before)

    def tree(
        self, choice: Choice, anchor: Int[Array, " B"], logits: Float[Array, "B P M V"], before: Int[Array, "B P M"]
    ) -> Proposal:
        """The best paths through the table of what follows each token of the slot before."""
        B, slots, M, _ = logits.shape
        allowed = choice.allowed(logits.reshape(B, slots * M, -1))
        table, count = allowed.reshape(B, slots, M, -1), min(CANDIDATES, allowed.shape[-1])
        after_one = lambda logits: likeliest(choice, logits, count)  # of all slots, after one token
        scores, candidates = jax.vmap(after_one, in_axes=2, out_axes=2)(table)

        def expand(slot: int, frontier: Frontier, _: None) -> tuple[Options, None]:
            same = before[:, slot, None] == frontier.tokens[:, :, None]
            place = jnp.argmax(same, axis=2)[:, :, None]
            found = jnp.take_along_axis(scores[:, slot], place, axis=1)
            found = jnp.where(jnp.any(same, axis=2, keepdims=True), found, -jnp.inf)
            return Options(found, jnp.take_along_axis(candidates[:, slot], place, axis=1)), None

        return grow(choice, anchor, slots, expand, None)

    def behind(
        self, target: TargetModel, both: Float[Array, "B P E"], before: Int[Array, "B P M"]
    ) -> Float[Array, "B P M V"]:
        """Logits of every slot after each of some tokens before it."""
        B, slots, M = before.shape
        embedded = self.embed(target, before.reshape(B, slots * M)).astype(self.dtype)
        hidden = self._apply("corrected", jnp.repeat(both, M, axis=1), embedded)
        return self.unembed(target, hidden).reshape(B, slots, M, -1)

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: base.Blocks, *, remat: bool = False
    ) -> PyTree:
        """Hidden states of every prediction, corrected for the data token before it."""
        both = super().teacher_forced(target, features, blocks, remat=remat)
        if not self.config.corrected:
            return both[..., self.config.hidden_size :]
        B, A, slots, E = both.shape
        embedded = self.embed(target, blocks.previous.reshape(B, A * slots)).astype(self.dtype)
        return self._apply("corrected", both.reshape(B, A * slots, E), embedded).reshape(B, A, slots, -1)


class TreeFlash(dflash.DFlashKind[TreeFlashConfig, Settings]):
    """TreeFlash."""

    name, architecture = "treeflash", "TreeFlashDraftModel"
    classes = r"TreeFlash(DraftModel|Model|ForCausalLM)"
    fields = ("treeflash_config",)
    drafter = Drafter
    zeros = ("ar_approximation/d/weight",)
    rules = (
        Rule(r"ar_approximation/ug/weight", 2, P()),
        Rule(r"ar_approximation/ug/bias", 1, P()),
        Rule(r"ar_approximation/d/weight", 2, P()),
    )

    def config(self, raw: Raw) -> TreeFlashConfig:
        """Raises ValueError, too, for another correction than "swiglu"."""
        kind = mapping(raw, "treeflash_config").get("ar_approximation")
        if kind not in ("swiglu", None):
            raise ValueError(f"treeflash_config: ar_approximation must be 'swiglu' or null, got {kind!r:.80}")
        return TreeFlashConfig(**dflash_fields(raw, self.fields), corrected=kind is not None)

    def new_config(self, common: Raw, settings: Settings, taps: Sequence[int] | None = None) -> Raw:
        raw = super().new_config(common, settings, taps)
        return {**raw, "treeflash_config": {"candidate_tokens": 64, "ar_approximation": "swiglu"}}

    def tensors(self, config: TreeFlashConfig, layout: Layout = WHOLE) -> checkpoint.Table:
        table, D, inner = super().tensors(config, layout), config.hidden_size, config.layers[0].inner
        if config.corrected:
            name = "ar_approximation"
            table[f"{name}/norm/weight"] = checkpoint.copied(f"{name}.norm.weight", D)
            table[f"{name}/ug/weight"] = checkpoint.copied(f"{name}.ug.weight", 2 * inner, 2 * D)
            table[f"{name}/ug/bias"] = checkpoint.copied(f"{name}.ug.bias", 2 * inner)
            table[f"{name}/d/weight"] = checkpoint.copied(f"{name}.d.weight", D, inner)
        return table
