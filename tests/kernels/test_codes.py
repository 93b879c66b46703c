"""Keys and values as codes of 8 bits: every implementation against a dense softmax over what they stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache.int8 import Int8KV
from dflash_jax.kernels import fragments
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.pages import in_pages
from dflash_jax.kernels.shapes import SHAPES, Shape
from tests.kernels.plain_fragments import PLAIN
from tests.kernels.test_conformance import (
    INTERPRETED,
    SLOTS,
    TREE,
    dense,
    draw,
    exact,
    slow_on_tpu,
    small,
    small_chunks,
    tolerance,
)

__all__ = ["small_chunks"]  # of every test here, too
STEPS = 40  # of a code to 1


@pytest.fixture(autouse=True)
def plain_registers(monkeypatch):
    monkeypatch.setattr(fragments, "unzipped", PLAIN["unzipped"])


def coded(x, rng):
    """Codes of 8 bits, a scale for each position and head, and what they stand for."""
    scales = rng.uniform(0.5, 1.5, (*x.shape[:3], 1)).astype(np.float32) / STEPS
    codes = np.clip(np.rint(np.nan_to_num(np.asarray(x, np.float32)) / scales), -127, 127).astype(np.int8)
    return codes, scales, codes * scales.astype(np.float64)


def check(implementation, shape, lengths, *, mask=None, page=None, ring=None):
    dtype, rng = exact(implementation), np.random.default_rng(7)
    q, *numbers, positions, count, sinks = draw(shape, lengths, SLOTS, dtype)
    own = np.tril(np.ones((shape.T, shape.T), bool)) if shape.causal else np.ones((shape.T, shape.T), bool)
    own = np.broadcast_to(own if mask is None else mask, (len(lengths), shape.T, shape.T))
    (k, of_k, wide_k), (v, of_v, wide_v), (keys, of_keys, wide_keys), (values, of_values, wide_values) = (
        coded(x, rng) for x in numbers
    )
    expected = dense(shape, q, wide_k, wide_v, wide_keys, wide_values, positions, count, sinks, own)
    scales = np.concatenate([of_keys, of_values], axis=-1)
    for row, length in enumerate(lengths):  # what was never written: any codes, and scales that are no numbers
        scales[row, :, length:] = np.nan
        keys[row, :, length:], values[row, :, length:] = 127, -127
    if ring is not None:  # slot s holds the last position that is congruent to it
        held = [np.maximum(0, length - 1 - (length - 1 - np.arange(ring)) % ring) for length in lengths]
        keys, values, scales = (np.stack([x[b, :, at] for b, at in enumerate(held)]) for x in (keys, values, scales))
        keys, values, scales = (np.moveaxis(x, 1, 2) for x in (keys, values, scales))
    cache, pages = Int8KV(*map(jnp.asarray, (keys, values)), scales=jnp.asarray(scales), ring=ring is not None), None
    if page is not None:
        cache, pages = in_pages(cache, page, jax.random.key(0))
    call = partial(attend, visible=("causal" if shape.causal else "full") if mask is None else jnp.asarray(mask))
    call = partial(call, window=shape.window, softcap=shape.softcap, implementation=implementation)
    fresh = jnp.asarray(np.concatenate([of_k, of_v], axis=-1))
    with INTERPRETED[implementation]():
        got = jax.jit(call)(
            q, positions, jnp.asarray(k), jnp.asarray(v), cache, count, sinks=sinks, pages=pages, scales=fresh
        )
    assert got.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance(got))


NAMES = "qwen3-8b decode", "qwen3-8b verify", "qwen3-8b draft", "gpt-oss verify, sliding", "gemma-2-9b decode"


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize(("implementation", "name"), slow_on_tpu(NAMES, NAMES[2:]))
def test_real_shapes(implementation, name, page):
    check(implementation, small(SHAPES[name]), [0, 201, SLOTS], page=page)


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("T", [3, 33, 70])
def test_blocks_of_any_width(implementation, T):
    check(implementation, Shape(T, 4, 2, 64), [0, 201])


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_tree_for_each_row(implementation):
    check(implementation, small(SHAPES["llama-3.1-8b verify"]), [150, 3], mask=TREE)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_ring(implementation):
    check(implementation, Shape(4, 4, 2, 64, window=100), [300, 3], ring=128)


def test_the_wrong_scales_are_seen(monkeypatch):
    """Those of the values for the keys."""
    swapped = lambda x: x.replace(scales=x.scales[..., ::-1])
    paged = in_pages
    monkeypatch.setitem(globals(), "in_pages", lambda cache, *more: paged(swapped(cache), *more))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check("xla", Shape(4, 4, 2, 64), [201], page=64)
