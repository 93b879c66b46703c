"""The TPU kernel through the real Mosaic and XLA:TPU compilers, without a TPU: tiling, memory, no copy of the cache."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.cache import KV
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.shapes import SHAPES
from tests.chips import topology

SERVED = {name: shape for name, shape in SHAPES.items() if shape.H <= 256}
ONE_OF_EACH = ["qwen3-8b verify", "gpt-oss verify, sliding", "qwen3.5-9b verify"]


def compiled(chips: str, name: str, dtype=jnp.bfloat16, rows=4, slots=4096):
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
            implementation="tpu",
        )

    cache = KV(spec(rows, K, slots, H), spec(rows, K, slots, H))
    ints = spec(rows, T, dtype=jnp.int32), spec(rows, dtype=jnp.int32)
    block = spec(rows, T, N, H), ints[0], spec(rows, K, T, H), spec(rows, K, T, H)
    return jax.jit(call).lower(*block, cache, ints[1], spec(N)).compile()


def check(program, name, rows=4, slots=4096, size=2):
    shape = SERVED[name]
    assert "block_attention" in program.as_text()
    queries = 4 * rows * shape.T * shape.N * shape.H
    assert program.memory_analysis().temp_size_in_bytes < min(
        8 * queries + (1 << 20), rows * shape.K * slots * shape.H * size
    )


@pytest.mark.parametrize("name", SERVED)
def test_v5e(name):
    check(compiled("v5e:2x2", name), name)


def test_packed_rows_without_a_cache():
    """A row of training: the scores of no head ever exist whole."""
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    ints, none = spec(1, 3072, dtype=jnp.int32), spec(1, 8, 0, 128)

    def call(q, positions, k, v, cache, starts):
        lengths = jnp.zeros(1, jnp.int32)
        return attend(q, positions, k, v, cache, lengths, visible="causal", starts=starts, implementation="tpu")

    keys = spec(1, 8, 3072, 128)
    program = jax.jit(call).lower(spec(1, 3072, 32, 128), ints, keys, keys, KV(none, none), ints).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 3072 * 3072


def test_float32():
    check(compiled("v5e:2x2", "qwen3-8b verify", jnp.float32), "qwen3-8b verify", size=4)


@pytest.mark.parametrize("chips", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_other_chips(chips, name):
    check(compiled(chips, name), name)
