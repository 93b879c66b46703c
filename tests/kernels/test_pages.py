"""Attention to caches in pages, by every implementation, against the same oracle as that to whole rows."""

import pytest

from dflash_jax.kernels.shapes import SHAPES
from tests.kernels.test_conformance import INTERPRETED, SLOTS, check, small, small_chunks  # noqa: F401

NAMES = "qwen3-8b verify", "gpt-oss verify, sliding", "kimi-k2.5 verify"


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("kimi")) for name in NAMES]
)
def test_rows_whose_pages_lie_anywhere(implementation, name):
    """Pages beyond a row's length hold what was never written."""
    if implementation == "gpu" and SHAPES[name].values is not None:
        pytest.skip("it has no kernel for latents")
    check(implementation, small(SHAPES[name]), [0, 1, 64, 201, SLOTS], page=64)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_row_may_be_one_page(implementation):
    check(implementation, small(SHAPES["qwen3-8b draft"]), [0, 201, SLOTS], page=SLOTS)
