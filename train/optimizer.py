"""The optimizer: AdamW, or Muon for matrices, under a schedule; what it keeps, and how exactly it multiplies."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dflash_jax.sharding import Rule, add_rules
from dflash_jax.train.config import TrainConfig

add_rules((Rule("ns_coeffs", 1, P()),))  # of Muon's iteration


def make_optimizer(config: TrainConfig, steps: int, by_token: Collection[str] = ()) -> optax.GradientTransformation:
    """Clipping and AdamW or Muon under the configured schedule.

    Args:
        by_token: names of tables with a row for each token, which Muon leaves to Adam, as its authors do embeddings and
            heads.
    """
    schedule = make_schedule(config, steps)
    if config.optimizer == "adamw":
        rule = optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay)
    else:
        rule = optax.contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=config.weight_decay,
            adam_learning_rate=lambda step: 0.1 * schedule(step),
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: muon_dimensions(params, by_token),
        )
    if config.moments == "bfloat16":
        rule = narrow_moments(rule)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def narrow_moments(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same rule, which keeps its running means in bfloat16 from step to step, and computes in float32."""

    def kept(state: optax.OptState) -> optax.OptState:
        return optax.tree.map_params(rule, lambda x: x.astype(jnp.bfloat16), state)

    def update(updates, state, params=None):
        wide = optax.tree.map_params(rule, lambda x: x.astype(jnp.float32), state)
        updates, state = rule.update(updates, wide, params)
        return updates, kept(state)

    return optax.GradientTransformation(lambda params: kept(rule.init(params)), update)


@contextmanager
def optimizing(dtype: jnp.dtype) -> Iterator[None]:
    """Within, optax may be called: it relies on implicit promotion, which a strict program may have turned off, and
    leaves the precision of Muon's products to the platform. They are float32 where the run computes in float32, and
    else bfloat16 with float32 sums: the iteration needs no more (Jordan et al., 2024: "Muon", which runs it so)."""
    exact = dtype != jnp.bfloat16  # float16, too, is for GPUs without bfloat16
    with ExitStack() as within:
        within.enter_context(jax.default_matmul_precision("highest" if exact else "BF16_BF16_F32"))
        within.enter_context(jax.numpy_dtype_promotion("standard"))
        within.enter_context(jax.numpy_rank_promotion("allow"))
        yield


def muon_dimensions(params: Any, by_token: Collection[str] = ()) -> Any:
    """Which leaves are matrices [out, in] (also stacked ones), for Muon; None leaves norms, biases and tables of tokens
    to Adam."""

    def dimensions(path, leaf):
        name = path[-1].key
        if leaf.ndim < 2 or "norm" in name or "bias" in name or name in by_token:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=leaf.ndim - 1, output_axis=leaf.ndim - 2)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def make_schedule(config: TrainConfig, steps: int) -> optax.Schedule:
    """Linear warmup, then cosine, constant, or constant with a cosine decay over the last fifth."""
    peak, end = config.learning_rate, config.learning_rate * config.final_learning_rate
    warmup = min(max(1, round(config.warmup * steps)), steps)
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    rest = max(1, steps - warmup)
    if config.schedule == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    alpha = config.final_learning_rate
    if config.schedule == "cosine":
        return optax.join_schedules([rise, optax.cosine_decay_schedule(peak, rest, alpha)], [warmup])
    decay = max(1, steps // 5)
    fall = optax.cosine_decay_schedule(peak, decay, end / peak)
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, max(warmup, steps - decay)])
