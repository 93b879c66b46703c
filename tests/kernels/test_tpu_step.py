"""The whole speculative step of a published pair, compiled for a TPU from its configurations alone."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.benchmarks.topologies import compiling_for
from dflash_jax.decoding.state import init_state
from dflash_jax.decoding.step import run, speculative_step, step_functions
from tests.chips import topology

CHIP = 16 * 2**30  # bytes of a v5e


@pytest.mark.slow
def test_qwen3_4b_fits_one_chip_and_copies_nothing():
    rows, slots = 4, 4096
    place = SingleDeviceSharding(topology("v5e:2x2")[0])

    def shapes():
        target, drafter = random_pair(*PAIRS["qwen3-4b"])
        return target, drafter, init_state(target, drafter, rows, slots, 8)

    def loop(target, drafter, state, max_steps, leave_below):
        return run(partial(speculative_step, step_functions(target, drafter, 16)), state, max_steps, leave_below, 16)

    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    target, drafter, state, *scalars = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (*jax.eval_shape(shapes), *scalars)
    )
    with compiling_for("v5e:2x2"):
        program = jax.jit(loop, donate_argnums=2).lower(target, drafter, state, *scalars).compile()
    text, memory = program.as_text(), program.memory_analysis()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    caches = size([state.target_cache, state.draft])
    one = 2 * rows * 8 * slots * 128  # bytes of one layer's keys
    # One program: a loop around draft, verify and commit, with a kernel for every attention, and one for the writes of
    # four layers.
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert sum("block_attention" in line for line in calls) == 36 + 5
    assert sum("cache_update" in line for line in calls) == 36 // 4 + 2
    # In place: all of the cache is aliased, and the temporaries have no room for the keys of three layers.
    assert memory.alias_size_in_bytes >= caches
    logits = 4 * rows * 16 * 151936
    assert memory.temp_size_in_bytes < 4 * logits + one
    assert f"bf16[{rows},8,{slots},128]{{3,2,1,0:T(8,128)(2,1)}} copy(" not in text
    # No weight is widened to float32.
    for leaf in jax.tree.leaves((target.params, drafter.params)):
        if leaf.ndim == 2:
            assert f"f32[{leaf.shape[0]},{leaf.shape[1]}]" not in text
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    assert used < CHIP
