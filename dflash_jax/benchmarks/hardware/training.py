"""A training step of the pair's drafter, and its share of the chip's operations."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench
from dflash_jax.benchmarks.hardware.report import SkippedError
from dflash_jax.infer.engine.compiler_options import training_compiler_options

LENGTH, ANCHORS = 3072, 512


def training(bench: Bench) -> Iterator[Figures]:
    """One row of packed answers, in which the drafter learns from blocks of its size."""
    try:
        from dflash_jax.train.config import TrainConfig
        from dflash_jax.train.memory import compiled_step, memory_limit
        from dflash_jax.train.operations import operations, share_of_peak
        from dflash_jax.train.step import Batch, init_state, train_step
    except ImportError as error:
        raise SkippedError(f"{error.name} is not installed: pip install 'dflash-jax[train]'") from error
    target, drafter = bench.models()
    length, anchors = (128, 4) if bench.small else (LENGTH, ANCHORS)
    width = drafter.config.block_size
    config = TrainConfig(block_size=width, dtype=str(bench.dtype), batch_size=1, length=length, anchors=anchors)
    tokens = np.random.default_rng(0).integers(0, target.config.vocab_size - 1, (1, length))
    answer = (np.arange(length) >= length // 48)[None]
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.zeros((1, length), jnp.int32), jnp.asarray(answer))
    state = init_state(drafter, config, 100)
    begin = time.perf_counter()

    def lower(remat: bool) -> Lowered:
        step = partial(train_step, replace(config, remat=remat), 100)
        program = jax.jit(step, donate_argnums=2, compiler_options=training_compiler_options())
        return program.lower(target, drafter, state, batch)

    step, again = compiled_step(lower, config.remat, memory_limit())
    compiling = time.perf_counter() - begin
    times: list[float] = []
    metrics: dict[str, Any] = {}
    for _ in range(6):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(step(target, drafter, state, batch))
        times.append(time.perf_counter() - begin)
    seconds = sorted(times[1:])[2]
    rate = operations(config, target, drafter, state.params) / seconds
    row: Figures = {"positions": length, "blocks": config.blocks, "ms": 1e3 * seconds, "first s": compiling + times[0]}
    row["layers computed again"] = again
    row |= {"TFLOP/s": rate / 1e12, "labels/s": float(metrics["labels"]) / seconds}
    if share := share_of_peak(rate):
        row["of the chip's operations"] = share
    yield row | {"finite": bool(metrics["finite"])}
