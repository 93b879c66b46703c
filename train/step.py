"""One optimizer step as a pure function of (state, batch)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.drafters.base import Drafter
from dflash_jax.mesh import ROWS, constrain
from dflash_jax.target import Target
from dflash_jax.train.blocks import draw_blocks, target_features
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.drafters import cast
from dflash_jax.train.losses import decay_weights, dpace_weights, teacher_forced_lengths, token_losses
from dflash_jax.train.optimizer import make_optimizer, make_schedule, optimizing


class TrainState(struct.PyTreeNode):
    """Everything a run carries from step to step.

    Attributes:
        step: steps taken; order and anchors follow from it and the seed.
        params: trained parameters, float32.
        optimizer: optax state.
    """

    step: Int[Array, ""]
    params: Any
    optimizer: Any


class Batch(NamedTuple):
    """Packed rows of a step (see `data.Rows`), and the target's features if they were cached.

    Attributes:
        begins: see `data.Rows`; only for anchors where steps began.
        features: tapped features, [B, S, FD].
        hidden: final-normed target states, [B, S, D]; only for losses against the target's distribution.
    """

    tokens: Int[Array, "B S"]
    starts: Int[Array, "B S"]
    supervised: Bool[Array, "B S"]
    begins: Bool[Array, "B S"] | None = None
    features: Float[Array, "B S FD"] | None = None
    hidden: Float[Array, "B S D"] | None = None


class Sums(NamedTuple):
    """Sums over blocks and rows; the loss of a step is `loss / weight` over all its parts and devices."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]
    labels: Float[Array, ""]
    lengths: Float[Array, ""]
    blocks: Float[Array, ""]


def split_params(drafter: Drafter) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trained, frozen) parameters of a drafter."""
    trained = {name: value for name, value in drafter.params.items() if name not in drafter.frozen}
    return trained, {name: value for name, value in drafter.params.items() if name in drafter.frozen}


def init_state(drafter: Drafter, config: TrainConfig, steps: int) -> TrainState:
    """A run's beginning: float32 copies of the drafter's trained parameters."""
    trained, _ = split_params(drafter)
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)
    return TrainState(jnp.int32(0), params, make_optimizer(config, steps, drafter.by_token).init(params))


def train_step(
    config: TrainConfig,
    steps: int,
    target: Target,
    drafter: Drafter,
    state: TrainState,
    batch: Batch,
    going: Bool[Array, ""] | None = None,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One update. Compile it with `config` and `steps` static.

    Args:
        config, steps: of the run.
        target: frozen.
        drafter: gives the configuration and frozen parameters; the trained ones come from `state`.
        state: consumed.
        batch: rows of this step.
        going: `finite` of the step before, where the host has not looked at it yet; None is true.

    Returns:
        The new state, or the old one if the loss or a gradient is not finite, or that of a step before was not; and
        metrics, of which `finite` says which.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    rows = batch.tokens.shape[0]
    # A row's anchors follow from its place in the batch, however the batch is split.
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))

    def part_sums(params: Any, part: tuple) -> tuple[Array, Sums]:
        sums = loss_sums(config, target, drafter, params, *part)
        return sums.loss, sums

    def accumulate(carry, part):
        gradient, sums = carry
        (_, more), g = jax.value_and_grad(part_sums, has_aux=True)(state.params, part)
        return (jax.tree.map(jnp.add, gradient, g), jax.tree.map(jnp.add, sums, more)), None

    def split(x: Array) -> Array:
        return constrain(x.reshape(config.accumulate, rows // config.accumulate, *x.shape[1:]), P(None, ROWS))

    zeros = jax.tree.map(jnp.zeros_like, state.params), Sums(*[jnp.float32(0)] * len(Sums._fields))
    (gradient, sums), _ = jax.lax.scan(accumulate, zeros, jax.tree.map(split, (batch, keys)))
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), gradient)
    loss, norm = sums.loss / jnp.maximum(sums.weight, 1e-9), optax.tree.norm(gradient)
    with optimizing(target.dtype):
        rule = make_optimizer(config, steps, drafter.by_token)
        updates, optimizer = rule.update(gradient, state.optimizer, state.params)
        learning_rate = make_schedule(config, steps)(state.step)
    new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer)
    update_norm = optax.tree.norm(updates)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(update_norm)
    finite = finite if going is None else finite & going
    metrics = {
        "loss": loss,
        "accuracy": sums.correct / jnp.maximum(sums.labels, 1),
        "teacher_forced_tau": sums.lengths / jnp.maximum(sums.blocks, 1),
        "labels": sums.labels,
        "gradient_norm": norm,
        "update_norm": update_norm,
        "learning_rate": learning_rate,
        "finite": finite,
    }
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), metrics


def loss_sums(config: TrainConfig, target: Target, drafter: Drafter, params: Any, batch: Batch, keys: Array) -> Sums:
    """Loss sums of some rows with the trained parameters `params`."""
    drafter = drafter.replace(params=cast(params, target.dtype) | split_params(drafter)[1])
    blocks = draw_blocks(
        keys,
        batch.tokens,
        batch.starts,
        batch.supervised,
        batch.begins,
        count=config.blocks,
        per_document=config.anchors,
        block_size=config.block_size,
        predictions=drafter.depth(config.block_size),
        placement=config.anchor_placement,
    )
    features, hidden = batch.features, batch.hidden
    if features is None:
        features, hidden = target_features(target, drafter.taps, batch.tokens, batch.starts)
    assert features is not None
    if config.feature_noise:
        shape = features.shape[1:]
        noise = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), shape))(keys)
        features = features + (config.feature_noise * (2 * noise - 1)).astype(features.dtype)
    seen = drafter.teacher_forced(target, features, blocks, remat=config.remat is not False)
    B, A, P = blocks.labels.shape
    flat, target_hidden = (lambda x: x.reshape(B * A * P, *x.shape[3:])), None
    if config.losses.distill or (drafter.needs_target_logits and hidden is not None):
        assert hidden is not None
        before = (blocks.label_positions - 1).reshape(B, A * P, 1)
        target_hidden = jnp.take_along_axis(hidden, before, axis=1).reshape(B * A * P, -1)
    labels, ids = flat(blocks.labels), drafter.vocabulary
    if ids is not None:
        known = jnp.full(drafter.config.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0]))
        labels = known[labels]

    def target_logits(hidden: Float[Array, "M D"]) -> Float[Array, "M V"]:
        logits = target.unembed(hidden[None])[0]
        return logits if ids is None else logits[:, ids]

    tokens = token_losses(
        partial(drafter.score, target),
        partial(drafter.refine, target),
        target_logits,
        drafter.heads(),
        jax.tree.map(flat, seen),
        labels,
        target_hidden,
        coefficients=config.losses,
        chunk=config.loss_chunk,
        per_block=P if drafter.whole_blocks else 1,
        rounded=config.round_logit_gradients,
    )
    losses, cross_entropy, correct = (x.reshape(B, A, P) for x in tokens)
    labelled = blocks.labelled
    if config.weighting == "decay":
        weights = jnp.where(labelled, decay_weights(P, config.decay)[None, None], 0)
        norm = jnp.sum(weights)
    else:
        weights = dpace_weights(cross_entropy, labelled)
        norm = jnp.sum(labelled).astype(jnp.float32)
    losses = jnp.where(labelled, losses, 0)
    lengths, used = teacher_forced_lengths(correct, labelled)
    counts = (jnp.sum(correct & labelled), jnp.sum(labelled), lengths, used)
    return Sums(jnp.sum(weights * losses), norm, *(x.astype(jnp.float32) for x in counts))
