"""The kernels of training's attention through the real compilers for Hopper and TPU, without either."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dflash_jax.benchmarks.topologies import compiling_for
from dflash_jax.kernels.anchored_attention import attend_anchored
from dflash_jax.kernels.shapes import TRAINING
from tests.chips import topology

SOME = "qwen3-8b", "gpt-oss-20b, sliding"
NAMES = [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in TRAINING]
LAUNCHES = re.compile(
    r"^  \S+ = .*? (fusion|custom-call|copy|convert|reduce|transpose|concatenate|pad|select|dot)\(", re.M
)


def compiled(chips, name, dtype=jnp.bfloat16, blocks=None):
    """A row's attention and all gradients."""
    A, T, F, N, K, H, S, causal, window = TRAINING[name]
    A = blocks or A
    place = SingleDeviceSharding(topology(chips)[0])
    spec = lambda *size, dtype=dtype: jax.ShapeDtypeStruct((1, *size), dtype, sharding=place)
    arrays = spec(A, T, N, H), spec(A, K, F, H), spec(A, K, F, H), spec(K, S, H), spec(K, S, H)
    options = {"visible": "causal" if causal else "full", "window": window}

    def both(anchors, starts, d_out, *arrays):
        out, pull = jax.vjp(lambda *x: attend_anchored(*x, anchors, starts, **options), *arrays)
        return out, *pull(d_out)

    ints = spec(A, dtype=jnp.int32)
    with compiling_for(chips):
        return jax.jit(both).lower(ints, ints, spec(A, T, N, H), *arrays).compile()


@pytest.mark.parametrize("name", NAMES)
def test_hopper(name, monkeypatch, capfd):
    """Three kernels whose registers hold what they have to, few others, and no sum for every query head in float32."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = TRAINING[name]
    blocks = shape.A + 384 * (1 + list(TRAINING).index(name))  # its own: what was compiled before is not compiled again
    program = compiled("h100", name, blocks=blocks)
    told = capfd.readouterr()
    assert set(re.findall(r"(\d+) bytes spill", told.out + told.err)) == {"0"}
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert len(LAUNCHES.findall(text[text.index("\nENTRY ") :])) <= 40
    assert " while(" not in text
    rows = blocks * shape.T
    queries, keys = rows * shape.N * shape.H, (shape.S + blocks * shape.F) * shape.K * shape.H
    # Where numbers of queries are no multiples of 128, queries and what is made of them are copied.
    assert program.memory_analysis().temp_size_in_bytes < 2 * 4.2 * keys + (8 if rows % 128 else 2.2) * queries + (
        8 << 20
    )


@pytest.mark.parametrize("name", NAMES)
def test_v5e(name):
    text = compiled("v5e:2x2", name).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    assert " while(" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_v6e(name):
    assert compiled("v6e:2x2", name).as_text().count('custom_call_target="tpu_custom_call"') == 4


@pytest.mark.parametrize("name", ["qwen3-8b", pytest.param("gpt-oss-20b, sliding", marks=pytest.mark.slow)])
def test_float32_on_tpu(name):
    assert compiled("v5e:2x2", name, jnp.float32).as_text().count('custom_call_target="tpu_custom_call"') == 4


def test_without_a_kernel_the_host_counts_nothing():
    """In float32, which the kernel for GPUs declines: loops go over all chunks."""
    text = compiled("h100", "qwen3-8b", jnp.float32, blocks=64).as_text()
    assert "mosaic_gpu" not in text
    loops = [line for line in text.splitlines() if " while(" in line]
    assert loops
    assert all('"known_trip_count":{' in line for line in loops)
