"""What the host does between visits to the device: `python -m benchmarks.host_time [ROWS]`.

A pair with as many layers as Qwen3-8B and its drafter, so that programs have as many arguments, but of small width:
the host's time depends on nothing else. Prints its milliseconds per visit and per step, from asking for steps to
handing out their tokens, without the time in which it waits for the device.
"""

import sys
import time
from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.loads import small_pair
from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request
from dflash_jax.infer.interrupt import exit_quietly

LAYERS, DRAFT_LAYERS, TOKENS = 36, 5, 400


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    rows = int(given[0]) if given else 32
    pair = random_pair(*small_pair(LAYERS, DRAFT_LAYERS, width=32, head_dim=16, positions=1024), dtype=jnp.float32)
    engine = Engine(*pair, slots=rows, max_length=TOKENS + 64, block_size=4)
    engine.warm_up()
    for i in range(rows):
        engine.submit(Request([i % 50 + 1, 5, 9], SamplingParams(TOKENS), id=str(i)))
    began: set[int] = set()
    while len(began) < rows:
        began |= {ticket for ticket, _ in engine.step()}
    seconds, steps = timed_visits(engine, rows)
    visit, width = np.median(seconds) * 1e3, np.median(steps)
    what = f"{rows} rows, {len(seconds)} visits of {width:.0f} steps"
    print(f"{what}: the host takes {visit:.2f} ms a visit, {visit / width:.3f} ms a step (medians)")
    return 0


def timed_visits(engine: Engine, rows: int) -> tuple[list[float], list[int]]:
    """Seconds of the host and steps of every visit, for as long as `rows` requests decode."""
    seconds, steps, waited, get = [], [], 0.0, jax.device_get

    def waiting_get(arrays: object) -> object:
        nonlocal waited
        begin = time.perf_counter()
        jax.block_until_ready(arrays)
        waited += time.perf_counter() - begin
        return get(arrays)

    with mock.patch("jax.device_get", waiting_get):
        while engine.busy == rows:
            before, waited = engine.stats.steps, 0.0
            engine.wait()
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin - waited)
            steps.append(engine.stats.steps - before)
    return seconds, steps


if __name__ == "__main__":
    exit_quietly(main())
