"""Caches whose rows lie in pages, made of ones whose rows are whole; for trials and tests.

Shapes: R rows, K key-value heads, S slots of a row, H head dim, M pages of a row, G slots of a page.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree


def in_pages(caches: PyTree, page: int, key: PRNGKeyArray) -> tuple[PyTree, Int[Array, "R M"]]:
    """Caches [R, K, S, H] as pages [R * M, K, G, H] in a random order, and where the pages of each row are.

    Args:
        page: G; it divides S.
    """
    (R, _, S, _), M = jax.tree.leaves(caches)[0].shape, jax.tree.leaves(caches)[0].shape[2] // page
    assert M * page == S
    pages = jax.random.permutation(key, R * M).astype(jnp.int32).reshape(R, M)

    def one(x: Float[Array, "R K S H"]) -> Float[Array, "_ K G H"]:
        parts = x.reshape(R, -1, M, page, x.shape[3]).swapaxes(1, 2)
        return jnp.zeros_like(parts).reshape(R * M, *parts.shape[2:]).at[pages].set(parts)

    return jax.tree.map(one, caches), pages


def in_rows(caches: PyTree, pages: Int[Array, "R M"]) -> PyTree:
    """Caches in pages as whole rows again."""
    whole = lambda x: x[pages].swapaxes(1, 2).reshape(pages.shape[0], x.shape[1], -1, x.shape[3])
    return jax.tree.map(whole, caches)
