"""A small case of a call of `api.append`, on which its implementations are compared."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num, PRNGKeyArray

from ..pages import in_pages
from .part import Part

ROWS = 10  # more than a kernel handles at the same time
ARRAYS = 8  # of a trial, at most: as many as a kernel handles in one call


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), type and options, with few rows, slots and layers.

    Attributes:
        widths, dtypes: the last axis and the type of each array.
        inside: whether the blocks lie in larger arrays (see `part`).
        page: slots of a page, of caches in pages.
        path: how many positions of the block are written in an order of their own; None takes them as they are.
    """

    rows: int
    T: int
    K: int
    widths: tuple[int, ...]
    slots: int
    dtypes: tuple[str, ...]
    ring: bool
    path: int | None = None
    inside: bool = False
    page: int | None = None

    @classmethod
    def of(
        cls,
        caches: Sequence[Num[Array, "R K S _"]],
        blocks: Sequence[Num[Array, "B K T _"]],
        ring: bool,
        path: int | None = None,
        inside: bool = False,
        pages: int | None = None,
    ) -> "Trial":
        """The trial of a call with arrays of these shapes, and so many pages of a row."""
        (B, K, T, _), slots, page = blocks[0].shape, caches[0].shape[2], None
        if pages is not None:
            page, slots = slots, slots * pages
        step = 128 << max(0, (T - 1).bit_length() - 7)  # a multiple of all windows that an implementation may write
        widths, dtypes = (x.shape[3] for x in caches[:ARRAYS]), (str(x.dtype) for x in caches[:ARRAYS])
        slots = slots if slots % step else min(slots, 4 * step)
        slots = slots if page is None else -(-slots // page) * page
        return cls(min(B, ROWS), T, K, tuple(widths), slots, tuple(dtypes), ring, path, inside, page)

    @property
    def tolerance(self) -> float:
        return 0.0

    def run(self, call: Callable[..., list[Array]]) -> list[Array]:
        """The caches: a block over the border of a window, and one at the end that keeps half of its positions, by
        turns, each a position further from there."""
        S, T, (further, at_end) = self.slots, self.T, jnp.divmod(jnp.arange(self.rows, dtype=jnp.int32), 2)
        lengths = jnp.where(at_end, S - T // 4 - 1 - further, S // 4 - T // 2 + further).clip(0)
        kept = jnp.where(at_end, T - T // 2, T)
        valid, path = (jnp.arange(T)[None] < kept[:, None])[:, None, :, None], None
        if self.path is not None:  # every other position, from the end
            kept = jnp.minimum(kept, self.path)
            valid, path = jnp.ones_like(valid), jnp.maximum(T - 1 - 2 * jnp.arange(self.path), 0)
            path = jnp.tile(path, (self.rows, 1))

        def drawn(key: PRNGKeyArray, width: int, dtype: str) -> tuple[Array, Array]:
            """A cache with one row more than the block has, and a block; what is not kept is NaN."""
            codes = dtype == "int8"

            def draw(i: int, *size: int) -> Array:
                of = jax.random.fold_in(key, i)
                if codes:
                    return jax.random.randint(of, (*size, width), -127, 128, jnp.int8)
                return jax.random.normal(of, (*size, width), dtype)

            block = draw(1, self.rows, self.K, T)
            return draw(0, self.rows + 1, self.K, S), block if codes else jnp.where(valid, block, jnp.nan)

        def update(key: PRNGKeyArray) -> list[Array]:
            pairs = map(drawn, jax.random.split(key, len(self.widths)), self.widths, self.dtypes)
            caches, blocks = map(list, zip(*pairs, strict=True))
            blocks = [self._part(block) for block in blocks] if self.inside else blocks
            rows = self.rows - jnp.arange(self.rows)
            if self.page is None:
                return call(caches, blocks, lengths, kept, rows, path=path, ring=self.ring)
            caches, pages = in_pages(caches, self.page, key)
            return call(caches, blocks, lengths, kept, pages=pages[rows], path=path, ring=self.ring)

        return jax.jit(update)(jax.random.key(0))

    def _part(self, block: Num[Array, "B K T H"]) -> Part:
        """The block inside an array that has other rows before it and between its heads."""
        around = partial(jnp.pad, constant_values=-128 if block.dtype == jnp.int8 else jnp.nan)
        rows = around(block, ((0, 0), (0, 0), (0, 3), (0, 0))).reshape(block.shape[0], -1, block.shape[3])
        return Part(block, around(rows, ((0, 0), (5, 0), (0, 0))), 5, self.T + 3)
