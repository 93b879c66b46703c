"""What drafters of all kinds have in common: their parameters, embedding, head and vocabulary.

Shapes: B rows, T tokens, J committed positions, P predictions, D width, V vocabulary of the drafter, FD tapped features
side by side.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from dflash_jax import checkpoint, sharding
from dflash_jax.config import AttentionConfig
from dflash_jax.decoding.state import Drafting, TargetModel
from dflash_jax.drafters.config import DrafterConfig
from dflash_jax.mesh import WHOLE, AnyMesh, Layout, entered
from dflash_jax.models.layers import project
from dflash_jax.models.weights import Outputs, linear
from dflash_jax.sharding import Rule

# Tensors that published checkpoints carry and nobody reads: the target's own, and what follows from `d2t`.
UNREAD = ("rotary_emb.inv_freq", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
RULES = (Rule(r"d2t", 1, P()),)
# Beginnings of the names of tensors in published variants, and what z-lab's have there.
ALIASES = {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "midlayer.": "layers.0."}


class Blocks(NamedTuple):
    """Anchors of packed training rows and the labels of their predictions.

    Shapes: B rows, S tokens of a row, A blocks of a row, P predictions of a block.

    Attributes:
        text: the rows.
        text_starts: where the document of each position of the rows begins.
        anchors: positions in the row, ascending; 0 for a block that is not used.
        starts: where each anchor's document begins.
        tokens: the anchors' tokens.
        labels: data token of each prediction.
        labelled: predictions that count: answer tokens of the anchor's own document.
        label_positions: where the labels stand in the row.
    """

    text: Int[Array, "B S"]
    text_starts: Int[Array, "B S"]
    anchors: Int[Array, "B A"]
    starts: Int[Array, "B A"]
    tokens: Int[Array, "B A"]
    labels: Int[Array, "B A P"]
    labelled: Bool[Array, "B A P"]
    label_positions: Int[Array, "B A P"]

    @property
    def previous(self) -> Int[Array, "B A P"]:
        """The data token before each label."""
        return jnp.concatenate([self.tokens[:, :, None], self.labels[:, :, :-1]], axis=2)


class Scored(NamedTuple):
    """Predictions and their logits, as a loss has them.

    Attributes:
        states: what `score` was given.
        logits: what it made of them.
        labels: data tokens, as the drafter numbers them; negative for one that it does not have.
        per_block: how many of them are a block's, which stand together. It is 1 unless the drafter has `whole_blocks`.
        target_logits: gives the target's own logits; None where they are not known.
    """

    states: PyTree
    logits: Float[Array, "M V"]
    labels: Int[Array, " M"]
    per_block: int = 1
    target_logits: Callable[[], Float[Array, "M V"]] | None = None

    @property
    def known(self) -> Int[Array, " M"]:
        """The labels, with token 0 for one that the drafter does not have."""
        return jnp.maximum(self.labels, 0)


class Drafter(Drafting, struct.PyTreeNode):
    """A loaded drafter, a `decoding.state.DraftModel`. A pytree of its parameters; see `Target`.

    What it decodes with, a kind must have: `dtype`, `init_state`, `propose` and `commit`. What it learns with:
    `teacher_forced` (see `Trainable`), and where its logits depend on more than one state, `heads`, `score` and
    `refine`.
    """

    params: PyTree
    config: DrafterConfig = struct.field(pytree_node=False)
    layout: Layout = struct.field(pytree_node=False, default=WHOLE, kw_only=True)
    mesh: AnyMesh | None = struct.field(pytree_node=False, default=None, kw_only=True)
    model: ClassVar[type[nn.Module]]  # of the parameters that are not `outside_model`
    frozen: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head", "d2t")  # parameters that are not trained
    by_token: ClassVar[tuple[str, ...]] = ()  # names of trained tables of which rows are looked up, mostly by tokens
    whole_blocks: ClassVar[bool] = False  # whether `refine` needs all predictions of a block together
    needs_target_logits: ClassVar[bool] = False  # whether `refine` compares with the target's own logits
    scored: ClassVar[bool] = True  # whether proposals have scores, for verification budgets
    outside_model: ClassVar[tuple[str, ...]] = frozen  # parameters that methods of the drafter use, and `model` has not

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.config.target_layer_ids

    @property
    def vocabulary(self) -> Int[Array, " V"] | None:
        """The target's id of each of its tokens; None if they are the same. `d2t` holds the differences."""
        if "d2t" not in self.params:
            return None
        return jnp.arange(self.config.draft_vocab_size, dtype=jnp.int32) + self.params["d2t"]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the computation: that of the fusion of the tapped features."""
        return self.params["fc"]["weight"].dtype

    def depth(self, block_size: int) -> int:
        """Tokens proposed at this block size; each is one deeper than the last."""
        return self.config.proposals(block_size)

    def uses(self, path: tuple[str, ...]) -> int:
        """How often a trained weight is multiplied with for each position of a block, for counts of operations."""
        return 1

    def embed(self, target: TargetModel, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the target's embedding table, unless the checkpoint has its own."""
        if not self.config.own_embedding:
            return target.table(tokens)
        with entered(self.mesh):
            return sharding.lookup(self.params["embed_tokens"], tokens)

    def unembed(self, target: TargetModel, hidden: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """Float32 logits of final-normed states, by the target's head unless the checkpoint has its own."""
        if not self.config.own_head:
            return target.head(hidden.astype(target.dtype))
        with entered(self.mesh):
            return project(hidden, sharding.gathered(self.params["lm_head"], "lm_head"))

    def teacher_forced(
        self, target: TargetModel, features: Float[Array, "B S FD"], blocks: Blocks, *, remat: bool = False
    ) -> PyTree:
        """What every prediction of every block is scored from, as decoding would compute it if all tokens before were
        right: a pytree of arrays [B, A, P, ...], of which the first is a final-normed state.

        Args:
            features: of all positions of the rows.
            remat: compute layers again in the backward pass instead of keeping their insides.
        """
        raise NotImplementedError

    def heads(self) -> dict[str, PyTree]:
        """Trained parameters that `score` and `refine` need; gradients flow to them from there."""
        return {}

    def score(self, target: TargetModel, heads: dict[str, PyTree], states: PyTree) -> Float[Array, "M V"]:
        """Logits of M predictions, each from its own entries of what `teacher_forced` returned."""
        return self.unembed(target, states[None])[0]

    def refine(
        self, target: TargetModel, heads: dict[str, PyTree], scored: "Scored"
    ) -> tuple[Float[Array, " M"] | float, Bool[Array, " M"]]:
        """A further loss of each prediction, and whether the label is what it would propose. What is returned for a
        label that the drafter does not have is not used."""
        best = jnp.take_along_axis(scored.logits, scored.known[:, None], axis=1)[:, 0]
        return 0.0, jnp.max(scored.logits, axis=-1) == best

    def _apply(self, method: str, *args: PyTree) -> PyTree:
        params = {k: v for k, v in self.params.items() if k not in self.outside_model}
        with entered(self.mesh):
            return self.model(self.config, self.layout).apply({"params": params}, *args, method=method)


def keys_and_values(prefix: str, mixer: AttentionConfig, layout: Layout) -> list[Outputs]:
    """The projections of keys and values of the layer of this prefix."""
    size, copies = mixer.num_kv_heads * mixer.head_dim, layout.copies(mixer.num_kv_heads)
    return [Outputs(f"{prefix}.{name}_proj", size, copies) for name in "kv"]


def vocabulary_tensors(config: DrafterConfig) -> checkpoint.Table:
    """Embedding, head and vocabulary of a drafter that has its own."""
    table: checkpoint.Table = {}
    D, formats = config.hidden_size, config.storage.of
    if config.own_embedding:
        embedding = [Outputs("embed_tokens", config.vocab_size)]
        table["embed_tokens"] = linear(embedding, D, formats=formats, product=False)
    if config.own_head:
        table["lm_head"] = linear([Outputs("lm_head", config.draft_vocab_size)], D, formats=formats)
    if (size := config.draft_vocab_size) != config.vocab_size or config.own_vocabulary:
        source = checkpoint.Stored("d2t", (size,), ("I64", "I32"))
        table["d2t"] = checkpoint.Leaf((size,), (checkpoint.Part(source, (slice(0, size),)),), "int32")
    return table
