"""What a training step of a drafter needs on a machine: `python -m dflash_jax.plan --training`.

Memory and bytes are the compiler's. Operations follow from the sizes of the models.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from dflash_jax import sharding
from dflash_jax.benchmarks.arguments import Figures, PlanOptions
from dflash_jax.benchmarks.compiled import measured
from dflash_jax.benchmarks.random_weights import Pair, placed, random_pair
from dflash_jax.chips import Chip
from dflash_jax.drafters.base import Drafter
from dflash_jax.infer.engine.compiler_options import TRAINING_OPTIONS
from dflash_jax.kernels.dispatch import platform
from dflash_jax.mesh import ROWS
from dflash_jax.target import Target
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.memory import Remat, compiled_step
from dflash_jax.train.operations import attention_operations, operations, trained_operations
from dflash_jax.train.step import Batch, TrainState, init_state, train_step

MOST = 64  # times the first length or batch that are tried
UNIT = 512  # tokens by which rows grow


def plan(raws: Pair, mesh: Mesh, chip: Chip, options: PlanOptions) -> Figures:
    """Figures of a step on each device: memory, bytes, operations, the least time, and what else would fit."""
    config = step_config(raws, options.batch_size, options.max_length, options.row_anchors)
    target, drafter, state, _ = _shapes(raws, mesh, config)
    compiled, again = _compiled(raws, mesh, config, "auto", int(chip.memory))
    figures = measured(compiled) | {"again": again, "model_flops": operations(config, target, drafter, state.params)}
    figures["model_flops"] /= mesh.size
    more = trained_operations(config, drafter, state.params) if again else 0.0
    figures["flops"] = figures["model_flops"] + (more + attention_operations(config, drafter, again=again)) / mesh.size
    moved = figures["memory_bytes"] or figures.get("bytes_accessed")
    parts = {"products": figures["flops"] / chip.flops, "memory": (moved or 0) / chip.bandwidth}
    seconds = max(parts.values())
    if figures["collectives"] is not None:
        parts["links"] = 2 * sum(c["bytes"] * c["count"] for c in figures["collectives"]) / chip.link
        seconds += parts["links"]
    figures |= {"seconds_by": parts, "least_step_seconds": seconds}
    figures["model_share"] = figures["model_flops"] / chip.flops / seconds
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    figures["step_tokens"] = options.batch_size * options.max_length
    if options.tokens:
        figures["epoch_hours"] = options.tokens / figures["step_tokens"] * seconds / 3600
    if options.largest:

        def fits(batch: int, length: int) -> bool:
            try:
                config = step_config(raws, batch, length, options.row_anchors)
                compiled, _ = _compiled(raws, mesh, config, "auto", int(chip.memory))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return False
            return measured(compiled)["peak_bytes"] < chip.memory

        figures["largest_batch"] = largest(lambda n: fits(n, options.max_length), rows)
        figures["largest_length"] = largest(lambda n: fits(options.batch_size, n), UNIT)
    return figures


def step_config(raws: Pair, rows: int, length: int, anchors: int) -> TrainConfig:
    """The configuration of such a step: each row with so many blocks."""
    return TrainConfig(
        length=length, anchors=anchors, row_anchors=anchors, batch_size=rows, block_size=raws[1]["block_size"]
    )


def compile_training(
    raws: Pair, mesh: Mesh, rows: int, length: int, anchors: int, *, remat: Remat = True, limit: int | None = None
) -> Compiled:
    """The drafter's training step as compiled for the mesh's devices, its state donated; nothing is allocated."""
    return _compiled(raws, mesh, step_config(raws, rows, length, anchors), remat, limit)[0]


def _compiled(raws: Pair, mesh: Mesh, config: TrainConfig, remat: Remat, limit: int | None) -> tuple[Compiled, bool]:
    target, drafter, state, batch = _shapes(raws, mesh, config)

    def lower(again: bool) -> Lowered:
        program = jax.jit(
            partial(train_step, replace(config, remat=again), 1000),
            donate_argnums=2,
            compiler_options=TRAINING_OPTIONS.get(platform()),
            out_shardings=(sharding.shardings(state, mesh), None),
        )
        with jax.set_mesh(mesh):
            return program.lower(target, drafter, state, batch)

    return compiled_step(lower, remat, limit)


def _shapes(raws: Pair, mesh: Mesh, config: TrainConfig) -> tuple[Target, Drafter, TrainState, Batch]:
    target, _ = jax.eval_shape(lambda: random_pair(*raws, mesh=mesh))
    _, drafter = jax.eval_shape(lambda: random_pair(*raws[:2], dtype=jnp.float32))
    state = jax.eval_shape(lambda drafter: init_state(drafter, config, 1000), drafter)
    zeros = partial(jnp.zeros, (config.batch_size, config.length))
    batch = jax.eval_shape(lambda: Batch(zeros(jnp.int32), zeros(jnp.int32), zeros(bool)))
    by_row = jax.tree.map(lambda _: NamedSharding(mesh, sharding.P(ROWS)), batch)
    return *(placed(x, sharding.shardings(x, mesh)) for x in (target, drafter, state)), placed(batch, by_row)


def largest(fits: Callable[[int], bool], unit: int) -> int:
    """The most that fits, a multiple of `unit` and at most `MOST` times it; 0 if nothing does.

    Where much fits, it is found to an eighth: every try compiles a program.
    """
    known, fails = 0, 1
    while fails <= MOST and fits(fails * unit):
        known, fails = fails, 2 * fails
    if fails > MOST:
        return known * unit
    while fails - known > max(1, known // 8):
        middle = (known + fails) // 2
        known, fails = (middle, fails) if fits(middle * unit) else (known, middle)
    return known * unit


def lines(figures: Figures) -> list[str]:
    """What the table says of a training step."""
    again = "yes, for want of memory" if figures["again"] else "no"
    parts = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in figures["seconds_by"].items())
    found = [
        f"  {'layers computed again':22} {again}",
        f"  {'operations a step':22} {figures['model_flops'] / 1e12:.1f} TFLOP of the models, "
        f"{figures['flops'] / 1e12:.1f} with attention{' and what is computed again' if figures['again'] else ''}",
        f"  {'least time by part':22} {parts}",
        f"  {'at the least time':22} {figures['step_tokens'] / figures['least_step_seconds']:,.0f} tokens/s, "
        f"{100 * figures['model_share']:.0f}% of the devices' published operations are the models'",
    ]
    if "epoch_hours" in figures:
        found.append(f"  {'an epoch':22} {figures['epoch_hours']:.1f} hours at the least time")
    if "largest_batch" in figures:
        found.append(f"  {'largest that fit':22} {figures['largest_batch']} sequences of this length")
        more = " or more" if figures["largest_length"] == MOST * UNIT else ""
        found.append(f"  {'':22} {figures['largest_length']} tokens{more} in this many rows")
    return found
