"""Pages of a cache on their way to a TPU core: those of the next step are copied while this one is computed."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def copied(needed, step, steps, caches, buffers, heads, done):
    """Begins the copies of the next step and waits for those of this one; returns which half of the buffers has them.

    Args:
        needed: by step, of each place of a buffer: whether a page goes there, and a function that returns which one.
        step, steps: this one, and how many there are. The first begins its own copies.
        caches: [R, K, ...] in the device's memory.
        buffers: [2, pages of a step, heads of a page, ...] for each cache.
        heads: which ones of a page.
        done: two semaphores.
    """

    def each(step, do):
        half = jax.lax.rem(step, 2)
        for nth, (there, page) in enumerate(needed(step)):

            @pl.when(there)
            def _(half=half, nth=nth, page=page):
                held = page()
                for cache, buffer in zip(caches, buffers, strict=True):
                    do(pltpu.make_async_copy(cache.at[held, heads], buffer.at[half, nth], done.at[half]))

    pl.when(step == 0)(lambda: each(step, lambda copy: copy.start()))
    pl.when(step + 1 < steps)(lambda: each(step + 1, lambda copy: copy.start()))
    pl.when(step < steps)(lambda: each(step, lambda copy: copy.wait()))
    return jax.lax.rem(step, 2)
