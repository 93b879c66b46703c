"""Rotary position embedding: tables at the positions of a pass, and their application."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import RopeConfig


class Rope(NamedTuple):
    """Cosines and sines of a block's positions, for the first R dimensions of a head."""

    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]


def rope_tables(config: RopeConfig, head_dim: int, positions: Int[Array, "B T"], dtype: jnp.dtype) -> Rope:
    """Rotary tables at absolute positions; angles in float32 whatever `dtype` is returned."""
    frequencies, scale = rope_frequencies(config, config.rotated or head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    tables = [(table * scale).astype(dtype) for table in (jnp.cos(angles), jnp.sin(angles))]
    # Doubled last: XLA fuses no concatenation, and would otherwise evaluate these again in every layer and head.
    return Rope(*(jnp.concatenate([table, table], axis=-1) for table in tables))


def rotate(x: Float[Array, "B T N H"], rope: Rope | None) -> Float[Array, "B T N H"]:
    """Applies rotary embedding in the halves ("neox") layout to as many dimensions as the table has; without one, to
    none."""
    if rope is None:
        return x
    if (size := rope.cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], rope), x[..., size:]], axis=-1)
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * rope.cos[:, :, None] + turned * rope.sin[:, :, None]


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Float[Array, " R"], float]:
    """Inverse frequencies and the scale of cos and sin, as in transformers' `modeling_rope_utils`."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    base = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return base, 1.0
    if config.kind == "proportional":
        turning = jnp.arange(head_dim // 2) < int(config.partial_rotary_factor * head_dim // 2)
        return jnp.where(turning, base, 0.0) / config.factor, 1.0
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, base), 1.0
    return _yarn(config, base, head_dim)


def _llama3(config: RopeConfig, base: Float[Array, " R"]) -> Float[Array, " R"]:
    rotations = config.original_max_position_embeddings * base / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    return base * keep + base / config.factor * (1 - keep)


def _yarn(config: RopeConfig, base: Float[Array, " R"], head_dim: int) -> tuple[Float[Array, " R"], float]:
    def dimension(rotations: float) -> float:
        context = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    interpolate = jnp.clip(ramp, 0.0, 1.0)
    frequencies = base / config.factor * interpolate + base * (1 - interpolate)
    return frequencies, _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
