"""Float32 is multiplied as float32 everywhere: seen in the traced programs, for a CPU does so anyway."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.lax import Precision

from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.cache import KV
from dflash_jax.kernels.anchored_attention import attend_anchored
from dflash_jax.kernels.block_attention import attend
from dflash_jax.kernels.cache_update import append
from dflash_jax.kernels.products import FEW_ROWS
from dflash_jax.models.attention import Pass
from dflash_jax.models.layers import matmul, project
from tests import tiny

EXACT = (Precision.HIGHEST, Precision.HIGHEST)
TYPES = [jnp.float32, jnp.bfloat16]


def inner(value):
    """The programs within a parameter of an equation."""
    values = value if isinstance(value, (list, tuple)) else [value]
    for x in values:
        if isinstance(x, core.ClosedJaxpr):
            yield x.jaxpr
        elif isinstance(x, core.Jaxpr):
            yield x


def products(jaxpr):
    """Every product of a program, those of its loops and kernels, too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in equation.params.values():
            for program in inner(value):
                yield from products(program)


def check(function, dtype, *arguments, least=1, operands=True):
    """At least so many products, all as exact as they have to be, and of `dtype` where `operands` says so."""
    found = list(products(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert len(found) >= least
    for equation in found:
        if operands:
            assert {x.aval.dtype for x in equation.invars} == {jnp.dtype(dtype)}
        assert equation.params["precision"] == (EXACT if dtype == jnp.float32 else None)


def attention(dtype, T=4, slots=320, **options):
    spec = lambda *size: jnp.zeros(size, dtype)
    positions, lengths = jnp.broadcast_to(jnp.arange(T), (2, T)), jnp.zeros(2, jnp.int32)
    cache = KV(spec(2, 2, slots, 128), spec(2, 2, slots, 128))
    call = lambda q, k, v: attend(q, positions, k, v, cache, lengths, visible="causal", **options)
    return call, (spec(2, T, 4, 128), spec(2, 2, T, 128), spec(2, 2, T, 128))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_attention(implementation, dtype):
    call, block = attention(dtype, implementation=implementation)
    check(call, dtype, *block, least=4)  # scores and values, of the first step and of those in the loop


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_without_a_cache(dtype):
    call, block = attention(dtype, T=128, slots=0, implementation="tpu")
    check(call, dtype, *block, least=2, operands=False)  # splash widens bfloat16 values, and rounds them on the way


def test_gradients_without_a_cache():
    call, block = attention(jnp.float32, T=128, slots=0, implementation="tpu")
    check(jax.grad(lambda *x: jnp.sum(call(*x)), argnums=(0, 1, 2)), jnp.float32, *block, least=7)


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_of_training(dtype):
    spec = lambda *size: jnp.zeros(size, dtype)
    ints = jnp.zeros((2, 3), jnp.int32)
    call = lambda *x: attend_anchored(*x, ints, ints, visible="full")
    arrays = spec(2, 3, 4, 4, 8), spec(2, 3, 2, 4, 8), spec(2, 3, 2, 4, 8), spec(2, 2, 40, 8), spec(2, 2, 40, 8)
    check(call, dtype, *arrays, least=4)
    check(jax.grad(lambda *x: jnp.sum(call(*x)), argnums=range(5)), dtype, *arrays, least=14)


@pytest.mark.parametrize("dtype", TYPES)
def test_cache_update(dtype):
    spec, ints = lambda *size: jnp.zeros(size, dtype), jnp.ones(2, jnp.int32)
    call = lambda *x: append(list(x[:2]), list(x[2:]), ints, ints, implementation="tpu")
    check(call, dtype, *[spec(2, 2, 128, 128)] * 2, *[spec(2, 2, 4, 128)] * 2, least=2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("function", [project, matmul])
def test_projections(function, rows, dtype):
    check(function, dtype, jnp.zeros((1, rows, 16), dtype), jnp.zeros((24, 16), dtype))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(family):
    """Weights that stay quantized are widened to float32, too."""
    raw = tiny.target_config(model_type=family, **tiny.FAMILIES[family])
    target, _ = random_pair(raw, tiny.drafter_config(), dtype=jnp.float32)

    def verify(target, cache):
        hidden, *_ = target.forward(jnp.zeros((2, 4), jnp.int32), jnp.arange(8).reshape(2, 4), None, cache)
        return target.unembed(hidden)

    check(verify, jnp.float32, target, target.init_cache(2, 64), least=4 * 6 + 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_whole_models(target, drafter, dtype):
    """A pass of each, heads and what the drafter makes of the target's features."""
    cast = lambda model: model.replace(params=jax.tree.map(lambda x: x.astype(dtype), model.params))
    target, drafter = cast(target), cast(drafter)
    positions = jnp.arange(4)[None]

    def verify(target, cache):
        hidden, *_ = target.forward(jnp.zeros((1, 4), jnp.int32), positions, None, cache)
        return target.unembed(hidden)

    check(verify, dtype, target, target.init_cache(1, 64), least=4 * 6 + 1)
    draft = lambda drafter, cache, x: drafter.forward(x, Pass(positions, None, jnp.zeros(1, jnp.int32), None), cache)
    x = jnp.zeros((1, 4, drafter.config.hidden_size), dtype)
    check(draft, dtype, drafter, drafter.init_state(1, 64), x, least=7 * 2)
    features = jnp.zeros((1, 4, len(drafter.taps) * target.config.hidden_size), dtype)
    check(lambda drafter, x: drafter.context(x, positions), dtype, drafter, features, least=2)
