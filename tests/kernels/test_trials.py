"""The small cases on which kernels are checked: by the kernels that there are, in Pallas' interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import verify
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.block_attention.mosaic_gpu import finishes
from dflash_jax.kernels.block_attention.trial import Trial
from dflash_jax.kernels.cache_update import append
from dflash_jax.kernels.cache_update.trial import Trial as Update
from dflash_jax.kernels.dispatch import using

SMALL = {"rows": 2, "T": 3, "F": 3, "N": 4, "K": 2, "H": 64, "Hv": 64, "slots": 256, "dtype": "float32"}
PLAIN = {"visible": "causal", "window": None, "softcap": None, "scale": 0.1, "sinks": False, "starts": False}
ALONE = {"T": 128, "F": 128, "H": 128, "Hv": 128, "slots": 0}
TRIALS = {
    "plain": {},
    "one row": {"rows": 1, "visible": "full"},
    "bfloat16": {"dtype": "bfloat16"},
    "sliding": {"window": 60, "sinks": True},
    "wide": {"window": 1000, "softcap": 20.0},
    "documents": {"starts": True, "T": 8, "F": 8},
    "later pass": {"T": 1, "F": 4, "window": 100},
    "trees": {"T": 3, "F": 5, "visible": "one for each row"},
    "one tree": {"visible": "one for all rows", "Hv": 128},
    "codes": {"codes": True, "sinks": True},
    "codes, bfloat16": {"codes": True, "dtype": "bfloat16", "window": 60},
    "alone": ALONE | {"starts": True, "softcap": 20.0},
    "alone, bfloat16": ALONE | {"dtype": "bfloat16", "window": 40, "sinks": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_trials_of_attention(name):
    trial = Trial(**SMALL | PLAIN | TRIALS[name])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        assert verify._compared("tpu", trial, attend) == verify.Finding(None)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_trials_read_no_garbage(name):
    """What XLA makes of a trial is finite, and not what it makes of the next."""
    trial = Trial(**SMALL | PLAIN | TRIALS[name])
    for x in trial.run(partial(attend, implementation="xla")):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        assert np.std(np.asarray(x, np.float32)) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("T", "H", "Hv", "slots"), [(5, 64, 64, 256), (16, 128, 64, 128), (40, 128, 256, 512)])
def test_trials_of_the_cache_update(ring, T, H, Hv, slots):
    trial = Update(2, T, 2, (H, Hv), slots, ("float32",) * 2, ring)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        assert verify._compared("tpu", trial, append) == verify.Finding(None)
    assert all(np.isfinite(x).all() for x in trial.run(partial(append, implementation="xla")))


def test_trials_are_small():
    def of(kind, *sizes, **options):
        made, arrays = [], [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
        jax.eval_shape(lambda *x: made.append(kind(*x, **options)), *arrays)
        return made[0]

    q, kv, alone = (64, 16, 32, 128), (64, 8, 16, 128), ((8, 3072, 32, 128), (8, 8, 3072, 128), (8, 8, 0, 128))
    assert of(Trial.of, q, kv, (64, 8, 40_960, 128), **PLAIN)[:8] == (2, 16, 16, 32, 8, 128, 128, 2048)
    assert of(Trial.of, q, kv, (64, 8, 40_000, 128), **PLAIN).slots == 2048 + 40_000 % 128
    assert of(Trial.of, q, kv, (64, 8, 500, 128), **PLAIN).slots == 500
    # Of an engine that chooses among chains and trees: plain steps, chains, their drafts, and trees.
    block = lambda T: ((4, T, 32, 128), (4, 8, T, 128), (5, 8, 4096, 128))
    kinds = {"causal": (1, 4, 8, 16), "full": (4, 8, 16), "one for each row": (16, 32, 64)}
    found = {of(Trial.of, *block(T), **PLAIN | {"visible": kind}) for kind, widths in kinds.items() for T in widths}
    assert len(found) == 4
    with using(None, "gpu"):  # the kernel divides and writes itself where caches are not split
        few, many = (of(Trial.of, (rows, *q[1:]), (rows, *kv[1:]), (64, 8, 4096, 128), **PLAIN) for rows in (8, 32))
        long = of(Trial.of, (1, 200, 32, 128), (1, 8, 200, 128), (64, 8, 4096, 128), **PLAIN)
    assert [(x.rows, x.T, x.slots) for x in (few, many, long)] == [(2, 16, 2048), (17, 16, 384), (1, 200, 2048)]
    assert [finishes(*x[:2], *x[3:5], x.Hv) for x in (few, many, long)] == [False, True, False]
    assert of(Trial.of, *alone, **PLAIN)[:8] == (2, 512, 512, 8, 2, 128, 128, 0)
    cache = (64, 8, 40_960, 128)
    update = lambda cache, block, **given: Update.of([cache], [block], **given)
    assert of(update, cache, (64, 8, 256, 128), ring=False).slots == 1024
