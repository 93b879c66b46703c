"""Chips to compile for, without having one."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks import topologies
from dflash_jax.cache import KV
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.shapes import SHAPES

SERVED = {name: shape for name, shape in SHAPES.items() if shape.H <= 256}  # by the Pallas kernels


@cache
def topology(name: str):
    """The devices; skips the test where their compiler is not installed."""
    if not topologies.has_compiler(name):
        pytest.skip(f"nothing compiles for {name} here: pip install '.[cuda-compiler]'")
    try:
        return topologies.topology(name)
    except ImportError as error:
        pytest.skip(str(error))


def compile_attention(chips, implementation, name, dtype=jnp.bfloat16, rows=4, slots=4096):
    """`attend` at one of the real shapes."""
    shape = SERVED[name]
    place = SingleDeviceSharding(topology(chips)[0])
    spec = lambda *size, dtype=dtype: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    T, N, K, H = shape[:4]

    def call(q, positions, k, v, cache, lengths, sinks):
        return attend(
            q,
            positions,
            k,
            v,
            cache,
            lengths,
            visible="causal" if shape.causal else "full",
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks if shape.sinks else None,
            implementation=implementation,
        )

    cache = KV(spec(rows, K, slots, H), spec(rows, K, slots, H))
    ints = spec(rows, T, dtype=jnp.int32), spec(rows, dtype=jnp.int32)
    block = spec(rows, T, N, H), ints[0], spec(rows, K, T, H), spec(rows, K, T, H)
    return jax.jit(call).lower(*block, cache, ints[1], spec(N)).compile()
