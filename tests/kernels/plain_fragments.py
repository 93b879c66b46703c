"""What the steps of `kernels.fragments` give, for plain arrays: the interpreter knows no registers."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.kernels import fragments, tensor_cores


def plain_words(stored):
    found = jax.lax.bitcast_convert_type(stored, jnp.uint8).reshape(64, 4, -1, 4).astype(jnp.int32)
    whole = sum(found[..., i] << 8 * i for i in range(4))
    return tuple(whole[:, :, i] for i in range(whole.shape[2]))


def halves(word):
    return jnp.stack([word & 0xFFFF, (word >> 16) & 0xFFFF], axis=-1).reshape(64, 8)


def plain_pairs(word):
    return jax.lax.bitcast_convert_type(halves(word).astype(jnp.uint16), jnp.bfloat16)


def plain_scaled(word, factor):
    """A CPU would take subnormal numbers for zeros; these are 2^126 times larger."""
    bits = halves(word)
    exponent, digits = (bits >> 7) & 0xFF, (bits & 0x7F).astype(jnp.float32) / 128
    sign = jnp.where(bits >> 15, -1.0, 1.0)
    large = sign * jnp.where(exponent == 0, digits, (1 + digits) * jnp.exp2(exponent.astype(jnp.float32) - 1))
    factor = jnp.asarray(factor, jnp.float32) * 2.0**-64 * 2.0**-62
    return (large * factor).astype(jnp.bfloat16)


def plain_twice(x):
    if x.ndim == 2 and x.shape[1] == 8:
        return tuple(jnp.repeat(x[:, i::2], 2, axis=1) for i in range(2))
    return (jnp.repeat(x.reshape(64, -1), 8 // (x.size // 64), axis=1),)


def plain_fused(a, b, c):
    return (a.astype(jnp.float32) * b.astype(jnp.float32) + c.astype(jnp.float32)).astype(a.dtype)


PLAIN = {
    "words": plain_words,
    "masked": lambda word, mask, turned: (word & mask) ^ turned,
    "pairs": plain_pairs,
    "scaled": plain_scaled,
    "twice": plain_twice,
    "fused": plain_fused,
    "unzipped": lambda x: (x[::2], x[1::2]),
    "alike": lambda x: (jnp.full((64, 8), x),),
    "apart": lambda x: x,
    "joined": lambda parts: jnp.concatenate(parts, axis=1),
}


def plain_product(acc, a, b):
    return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)


def ordered_product(acc, a, b):
    """One input after the other, however many columns there are."""
    wide = lambda x: x.astype(jnp.float32)
    return jax.lax.fori_loop(0, a.shape[1], lambda i, acc: acc + wide(a)[:, i, None] * wide(b[...])[i][None], acc)


@contextmanager
def interpreted(monkeypatch):
    """Within, the kernels for Hopper are interpreted; skips the test where they cannot be."""
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip("Mosaic has an interpreter from jax 0.12 on")
    for name, function in PLAIN.items():
        monkeypatch.setattr(fragments, name, function)
    monkeypatch.setattr(tensor_cores, "add_product", plain_product)
    with plgpu.force_gpu_interpret_mode():
        yield
