"""A training step of the pair's drafter, and its share of the chip's operations."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench
from dflash_jax.benchmarks.hardware.report import SkippedError
from dflash_jax.benchmarks.topologies import CHIPS, KINDS

LENGTH, ANCHORS = 3072, 512


def training(bench: Bench) -> Iterator[Figures]:
    """One row of packed answers, in which the drafter learns from blocks of its size."""
    try:
        from dflash_jax.train.config import TrainConfig
        from dflash_jax.train.step import Batch, init_state, train_step
    except ImportError as error:
        raise SkippedError(f"{error.name} is not installed: pip install 'dflash-jax[train]'") from error
    target, drafter = bench.models()
    length, anchors = (128, 4) if bench.small else (LENGTH, ANCHORS)
    config = TrainConfig(dtype=str(bench.dtype), batch_size=1, length=length, anchors=anchors, remat=True)
    tokens = np.random.default_rng(0).integers(0, target.config.vocab_size - 1, (1, length))
    answer = (np.arange(length) >= length // 48)[None]
    batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.zeros((1, length), jnp.int32), jnp.asarray(answer))
    state = init_state(drafter, config, 100)
    step = jax.jit(partial(train_step, config, 100), donate_argnums=2)
    times: list[float] = []
    metrics: dict[str, Any] = {}
    for _ in range(6):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(step(target, drafter, state, batch))
        times.append(time.perf_counter() - begin)
    first, seconds = times[0], sorted(times[1:])[2]
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    head = target.config.vocab_size * target.config.hidden_size
    body = count(target.params) - head * (1 if target.config.tie_word_embeddings else 2)
    blocks, width = config.blocks, drafter.config.block_size
    # A forward pass of the target; one and two backward of the drafter; the head once forward and once back.
    operations = 2 * body * length + 6 * count(state.params) * blocks * width + 4 * head * blocks * (width - 1)
    row: Figures = {"positions": length, "blocks": blocks, "ms": 1e3 * seconds, "first s": first}
    row |= {"TFLOP/s": operations / seconds / 1e12, "labels/s": float(metrics["labels"]) / seconds}
    kind = jax.devices()[0].device_kind.lower()
    if chip := next((CHIPS[chip] for name, chip in KINDS.items() if name in kind), None):
        row["of the chip's operations"] = operations / seconds / chip.flops
    yield row | {"finite": bool(metrics["finite"])}
