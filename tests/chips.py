"""Chips to compile for, without having one."""

from functools import cache

import jax.numpy as jnp
import pytest

from benchmarks import compiled_attention
from dflash_jax.benchmarks import topologies
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


def compile_attention(chips, implementation, name, dtype=jnp.bfloat16, rows=4, slots=4096, page=None, codes=False):
    """`attend` at one of the real shapes."""
    return compiled_attention.compile_attention(
        topology(chips)[0], SERVED[name], implementation, dtype, rows, slots, page, codes
    )
