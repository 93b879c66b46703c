"""The TPU kernel through the real Mosaic and XLA:TPU compilers, without a TPU: tiling, memory, no copy of the cache."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.cache import KV, Fresh, once_read
from dflash_jax.cache.latent import Latent
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.dispatch import using
from tests.chips import SERVED, compile_attention, topology

ONE_OF_EACH = ["qwen3-8b verify", "gpt-oss verify, sliding", "qwen3.5-9b verify"]


CODES = ["qwen3-8b decode", "qwen3-8b verify", "gpt-oss verify, sliding", "qwen3.5-9b verify"]


def check(program, name, rows=4, slots=4096, size=2):
    shape = SERVED[name]
    assert "block_attention" in program.as_text()
    queries = 4 * rows * shape.T * shape.N * shape.H
    assert program.memory_analysis().temp_size_in_bytes < min(
        8 * queries + (1 << 20), rows * shape.K * slots * shape.H * size
    )


@pytest.mark.parametrize("name", SERVED)
def test_v5e(name):
    check(compile_attention("v5e:2x2", "tpu", name), name)


@pytest.mark.parametrize("name", ["qwen3-8b verify", "gpt-oss verify"])
def test_rows_in_pages(name):
    check(compile_attention("v5e:2x2", "tpu", name, page=128), name)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("page", [None, 128])
def test_codes(name, page):
    check(compile_attention("v5e:2x2", "tpu", name, page=page, codes=True), name, size=1)


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
    check(compile_attention("v5e:2x2", "tpu", "qwen3-8b verify", jnp.float32), "qwen3-8b verify", size=4)


@pytest.mark.parametrize(
    ("chips", "T"),
    [
        ("v5e:2x2", 8),
        *(pytest.param(chips, 8, marks=pytest.mark.slow) for chips in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
        pytest.param("v5e:2x2", 40, marks=pytest.mark.slow),
    ],
)
def test_latents(chips, T):
    """Kimi's: read and written where they lie, one array that is keys and values."""
    place = SingleDeviceSharding(topology(chips)[0])
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    ints, size = spec(4, dtype=jnp.int32), 4 * 16384 * 576 * 2

    def step(entry, q, k, up, lengths, kept):
        fresh, positions = Fresh(k, None), lengths[:, None] + jnp.arange(T)[None]
        where = {"visible": "causal", "rows": None, "starts": None}
        out = entry.attend(q, positions, fresh, lengths, up=up, expanded=False, **where)
        return entry.commit(fresh, lengths, once_read(kept, out.reshape(4, T, -1))), out

    block = spec(4, T, 64, 576), spec(4, 1, T, 576), spec(64, 256, 512)
    with using("tpu", "tpu"):
        entry = Latent(spec(4, 1, 16384, 576), None)
        program = jax.jit(step, donate_argnums=0).lower(entry, *block, ints, ints).compile()
    assert "block_attention" in program.as_text()
    assert program.memory_analysis().alias_size_in_bytes >= size
    assert program.memory_analysis().temp_size_in_bytes < size / 2


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("codes", [False, True])
def test_other_chips(chips, name, codes):
    check(compile_attention(chips, "tpu", name, codes=codes), name, size=1 if codes else 2)
