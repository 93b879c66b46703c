"""How exact products are, on every device, and their gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

FEW_ROWS = 256  # positions of a step, or of a chunk of a prompt, that are treated as few
_unrounded = jax.make_user_context(False)  # a part of every jit cache key


@contextmanager
def unrounded_gradients() -> Iterator[None]:
    """Within, the products that are traced get their float32 cotangents as they are; see `product`."""
    with _unrounded(True):
        yield


def precision(x: Array) -> jax.lax.Precision | None:
    """The precision of a product with operands like `x`: float32 as float32, and anything narrower as it is.

    Left to itself, a TPU rounds float32 operands to bfloat16, and a GPU may round them to TF32.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def product(pattern: str, a: Array, b: Array, *, rounded: bool = False) -> Array:
    """`jnp.einsum`, summed in float32, and returned so or, if `rounded`, in the dtype of `a`, rounded once.

    In the backward pass, too, the operands of products are as narrow as `a` and `b`: cotangents are rounded to their
    dtype, and the sums are float32. Where the product itself is rounded to that dtype, that changes no bit, for the
    cotangent of a rounding has only such values. Forward derivatives (`jax.jvp`) of narrow products are not defined.
    """
    out = a.dtype if rounded else jnp.dtype(jnp.float32)
    if a.dtype == b.dtype and a.dtype.itemsize < 4 and not _unrounded.value:
        return _narrow(pattern, out, a, b)
    return _product(pattern, out, a, b)


def _product(pattern: str, out: jnp.dtype, a: Array, b: Array) -> Array:
    return jnp.einsum(pattern, a, b, precision=precision(a), preferred_element_type=out)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow(pattern: str, out: jnp.dtype, a: Array, b: Array) -> Array:
    return _product(pattern, out, a, b)


def _forward(pattern: str, out: jnp.dtype, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(pattern, out, a, b), (a, b)


def _backward(pattern: str, out: jnp.dtype, operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    """The products of a narrow einsum's gradient; that einsum itself is not computed."""
    _, pull = jax.vjp(partial(jnp.einsum, pattern), *operands)
    return pull(cotangent.astype(operands[0].dtype))


_narrow.defvjp(_forward, _backward)
