"""A small target from scratch: next-token prediction on the answers of packed conversations.

Only the bundled pair needs this; a drafter for a published target begins at `regenerate`.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import checkpoint, models
from dflash_jax.target import Target
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.optimizer import make_optimizer, optimizing
from dflash_jax.train.step import TrainState

INIT_STD = 0.02
RESIDUAL = ("o_proj", "down_proj")  # projections that write to the residual stream


def new_target(raw: dict[str, Any], seed: int) -> Target:
    """A freshly initialized target for a `config.json`: matrices N(0, 0.02), those that write to the residual stream
    smaller by the square root of twice the depth, norms one."""
    config = models.target_config(raw)
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    table = models.family(config.model_type).tensors(config)
    for path, leaf in checkpoint.leaves(table):
        shrink = (2 * config.num_hidden_layers) ** 0.5 if any(name in path for name in RESIDUAL) else 1.0
        value = np.ones(leaf.shape) if "norm" in path else INIT_STD / shrink * rng.standard_normal(leaf.shape)
        params[path] = jnp.asarray(value, jnp.float32)
    return Target(checkpoint.nested(params, table, jnp.float32), config=config)


def language_loss(
    target: Target, tokens: Int[Array, "B S"], starts: Int[Array, "B S"], supervised: Bool[Array, "B S"]
) -> Float[Array, ""]:
    """Mean cross-entropy of the supervised tokens of packed rows, each given its document up to there."""
    B, S = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
    # Behind an empty cache the pass is the block alone, and differentiable.
    cache, lengths = target.init_cache(B, 0), jnp.zeros(B, jnp.int32)
    hidden, _, _ = target.forward(tokens, positions, None, cache, lengths, starts=starts)
    counts = supervised[:, 1:] & (starts[:, 1:] == starts[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(target.unembed(hidden[:, :-1]), tokens[:, 1:])
    return jnp.sum(jnp.where(counts, losses, 0)) / jnp.maximum(jnp.sum(counts.astype(losses.dtype)), 1)


def pretrain_step(
    config: TrainConfig, steps: int, target: Target, state: TrainState, batch: tuple[Array, Array, Array]
) -> tuple[TrainState, Float[Array, ""]]:
    """One update; `target` gives the configuration, `state` the parameters. Returns the loss, too."""
    loss_of = lambda params: language_loss(target.replace(params=params), *batch)
    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    with optimizing(target.dtype):
        updates, optimizer = make_optimizer(config, steps).update(gradient, state.optimizer, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), loss


def pretrain(
    directory: str | Path,
    target: Target,
    examples: Sequence[Example],
    config: TrainConfig,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Target:
    """Trains all parameters of `target`, one pass over the examples if `max_steps` does not say otherwise.

    Args:
        directory: of the checkpoints, one every `save_every` steps; a run found there is continued.
        target: as it begins, float32.
        examples: whole conversations, none longer than `length`.
        config: its fields of packing, optimizer and schedule.
        progress: called with the step, all steps and the loss every `log_every` steps.

    Raises:
        FloatingPointError: the loss is not finite; checkpoints up to there are kept.
    """
    packing = Packing(examples, config.length, config.batch_size, config.seed)
    steps = config.max_steps or packing.steps(config.epochs)
    state = TrainState(jnp.int32(0), target.params, make_optimizer(config, steps).init(target.params))
    with contextlib.closing(Checkpoints(directory, config.keep)) as checkpoints:
        if checkpoints.steps:
            state = checkpoints.restore(state)
        else:
            state = jax.tree.map(jnp.array, state)  # the step consumes it
        step = jax.jit(partial(pretrain_step, config, steps), donate_argnums=1)
        for number in range(int(state.step), steps):
            rows = packing.batch(number)
            state, loss = step(target, state, tuple(map(jnp.asarray, rows[:3])))
            done = number + 1
            if done % config.log_every == 0 or done == steps:
                if not jnp.isfinite(loss):
                    raise FloatingPointError(f"step {done}: the loss is {float(loss)}; lower learning_rate")
                progress(done, steps, float(loss))
            if done == steps or (config.save_every and done % config.save_every == 0):
                checkpoints.save(state)
    return target.replace(params=state.params)
