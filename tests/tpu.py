"""TPU topologies to compile for, without a TPU."""

import os
from functools import cache

import pytest


@cache
def topology(name: str):
    """Skips the test where libtpu is not installed."""
    pytest.importorskip("libtpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name)
