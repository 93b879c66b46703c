"""What a planned step reads of prompts, beside rows that decode."""

import jax
import jax.numpy as jnp

from dflash_jax.benchmarks.arguments import PlanOptions
from dflash_jax.decoding.prompts import Prompts, stacked
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.prompts import BesideShape


def prefill_budget(options: PlanOptions, parts: int) -> int:
    """Tokens of prompts that a step of these options reads; raises ValueError where it can read none."""
    least = 2 * parts
    if options.training or options.parts:
        raise ValueError("--prefill-budget is for a whole decoding step; leave it, --training and --parts out")
    if options.batch_size < least:
        raise ValueError(f"--prefill-budget needs rows that decode beside prompts: --batch-size of {least} or more")
    if options.prefill_budget < parts:
        raise ValueError(f"--prefill-budget must be at least {parts}, a token for each part of the mesh")
    return parts * BesideShape.of(options.prefill_budget, options.batch_size, parts, EngineConfig.prefill_chunk).total


def prompt_shapes(tokens: int, batch: int, parts: int) -> Prompts | None:
    """So many tokens of prompts, in all parts of a mesh together, as shapes; None for none."""
    if not tokens:
        return None
    shape = BesideShape.of(tokens, batch, parts, EngineConfig.prefill_chunk)
    count, idle = parts * shape.rows, SamplingParams().on_device("", 0, 0, 1)

    def made() -> Prompts:
        zeros = jnp.zeros(count, jnp.int32)
        block = jnp.zeros((count, shape.tokens), jnp.int32)
        return Prompts(zeros, block, zeros, zeros > 0, stacked((idle,) * count), total=shape.total)

    return jax.eval_shape(made)
