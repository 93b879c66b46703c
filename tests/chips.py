"""Chips to compile for, without having one."""

from functools import cache

import pytest

from dflash_jax import topologies


@cache
def topology(name: str):
    """The devices; skips the test where their compiler is not installed."""
    if not topologies.has_compiler(name):
        pytest.skip(f"nothing compiles for {name} here: pip install 'dflash-jax[cuda-compiler]'")
    try:
        return topologies.topology(name)
    except ImportError as error:
        pytest.skip(str(error))
