"""What the host does between visits to the device: `python -m tests.host_time [ROWS]`.

A pair with as many layers as Qwen3-8B and its drafter, so that programs have as many arguments, but tiny widths: what
the host does depends on nothing else. Prints its milliseconds a visit and a step: from asking for steps to handing out
their tokens, without the time in which it waits for the device.
"""

import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from dflash_jax import Engine, load_drafter, load_target
from tests import tiny

LAYERS, DRAFT_LAYERS, TOKENS = 36, 5, 400


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        layers = {"num_hidden_layers": LAYERS}
        target = load_target(tiny.write_target(Path(place) / "target", tiny.target_config(**layers)))
        drafter = load_drafter(
            tiny.write_drafter(
                Path(place) / "drafter", tiny.drafter_config(num_hidden_layers=DRAFT_LAYERS, num_target_layers=LAYERS)
            )
        )
    engine = Engine(target, drafter, slots=rows, max_length=TOKENS + 64, block_size=4)
    engine.warm_up()
    waited, get = [0.0], jax.device_get

    def timed(x):
        begin = time.perf_counter()
        jax.block_until_ready(x)
        waited[0] += time.perf_counter() - begin
        return get(x)

    for i in range(rows):
        engine.submit(tiny.ask([i % 50 + 1, 5, 9], TOKENS, id=str(i)))
    while any(row is None or row.left for row in engine._admission.rows):
        engine.step()
    spent, steps = [], []
    with mock.patch("jax.device_get", timed):
        while engine.busy == rows:
            before, waited[0] = engine.stats.steps, 0.0
            engine.wait()
            begin = time.perf_counter()
            engine.step()
            spent.append(time.perf_counter() - begin - waited[0])
            steps.append(engine.stats.steps - before)
    visit, width = np.median(spent) * 1e3, np.median(steps)
    what = f"{rows} rows, {len(spent)} visits of {width:.0f} steps"
    print(f"{what}: the host takes {visit:.2f} ms a visit, {visit / width:.3f} ms a step (medians)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
