"""TPU topologies to compile for, without a TPU."""

from functools import cache

import pytest

from dflash_jax import plan


@cache
def topology(name: str):
    """The devices; skips the test where libtpu is not installed."""
    pytest.importorskip("libtpu")
    return plan.topology(name)
