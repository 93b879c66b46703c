"""A small case of a call of `api.attend`, on which its implementations are compared."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Num, PRNGKeyArray

from ..dispatch import platform
from ..pages import in_pages
from ..verify import TOLERANCE
from .mosaic_gpu import TILE, finishes, join, rows_that_finish

BYTES = 8 << 20  # keys and values of one row, at most; several chunks of any implementation
LEAST = 512  # slots, however large
LONG = 512  # queries and keys of a block alone: the largest tile
WIDTHS = (1, 16, 64, 256)  # of a block after a cache: one trial stands for all up to the next
MOST_PAGES = 8  # of a row, that a kernel handles at a time; of fewer, it handles as many as there are
FEW = 384  # slots where there are so many rows that the kernel finishes: as many chunks as it ever has in flight
TREE_WIDTHS = WIDTHS[2:]  # the same where a mask says what is seen
STEPS = 32  # of codes to 1


class _Entry(NamedTuple):
    k: Num[Array, "R K S H"]
    v: Num[Array, "R K S Hv"] | None
    scales: Float[Array, "R K S 2"] | None = None


class Trial(NamedTuple):
    """What makes a call the program that it is: sizes (see `api`), type and options, with few rows and slots.

    Calls that differ in the number of rows, slots or positions alone run the same code more or less often. They share a
    trial, so that an engine with all its chains and trees needs a handful.

    Attributes:
        visible: "causal", "full", or another visibility, "one for each row" or "one for all rows".
        sinks, starts: whether there are any.
        apart: whether the cache has values, besides its keys.
        joined: whether the block is in one array (see `api.together`).
        page: slots of a page, of a cache in pages.
        codes: whether keys and values are codes of 8 bits.
    """

    rows: int
    T: int
    F: int
    N: int
    K: int
    H: int
    Hv: int
    slots: int
    dtype: str
    visible: str
    window: int | None
    softcap: float | None
    scale: float
    sinks: bool
    starts: bool
    apart: bool = True
    joined: bool = False
    page: int | None = None
    codes: bool = False

    @classmethod
    def of(
        cls,
        q: Float[Array, "B T N H"],
        v: Num[Array, "B K F Hv"],
        cache_k: Num[Array, "R _ S _"],
        pages: int | None = None,
        **options: Any,
    ) -> "Trial":
        """The trial of a call with arrays of these shapes, and so many pages of a row."""
        (B, T, N, H), (K, F, Hv), slots = q.shape, v.shape[1:], cache_k.shape[2]
        if pages is not None:
            options["page"], slots = slots, slots * pages
        rows, gpu = min(B, 2), platform() == "gpu"
        if slots:
            fits = max(LEAST, BYTES // (K * (H + Hv) * q.dtype.itemsize)) // 128 * 128
            many = gpu and finishes(B, T, N, K, Hv)
            step = options.get("page") or 128
            if slots >= LEAST and (pages is None or pages >= MOST_PAGES):
                slots = -(-(FEW if many else fits) // step) * step + slots % step
            widths = WIDTHS if options["visible"] in ("causal", "full") else TREE_WIDTHS
            wider = next((width for width in widths if width >= T), T)
            if options.get("joined") and T % TILE and wider > 1:
                wider -= 1  # it is filled up, too
            rows = rows_that_finish(wider, N, K) if many else 2
            if gpu and not many and finishes(2, wider, N, K, Hv):  # which would be another program
                rows, wider = 1, T
            T, F = wider, F + wider - T
        elif T == F > 2 * LONG:  # a block alone: of its length, the remainder shows in the program
            T = F = LONG + T % LONG
        heads = K if slots else min(K, 2)
        return cls(rows, T, F, N // K * heads, heads, H, Hv, slots, str(q.dtype), **options)

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, TOLERANCE["float32"])

    def run(self, call: Callable[..., Array]) -> tuple[Array, ...]:
        """What it attends to and, of a block alone, which only a training pass has, the gradients."""
        attend = partial(self._attend, call)
        key = jax.random.key(0)
        if self.slots:
            return (jax.jit(lambda key: attend(key, *self._block(key)))(key),)

        def with_gradients(key: PRNGKeyArray) -> tuple[Array, ...]:
            out, pull = jax.vjp(partial(attend, key), *self._block(key))
            return out, *pull(jnp.cos(out))

        return jax.jit(with_gradients)(key)

    def _block(self, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        sizes = (self.T, self.N, self.H), (self.K, self.F, self.H), (self.K, self.F, self.Hv)
        draw = lambda i, size: jax.random.normal(jax.random.fold_in(key, i), (self.rows, *size), self.dtype)
        q, k, v = (draw(i, size) for i, size in enumerate(sizes))
        if self.codes:
            k, v = _coded(k), _coded(v)
        return q, k, v if self.apart else k[..., : self.Hv]

    def _attend(self, call: Callable[..., Array], key: PRNGKeyArray, q: Array, k: Array, v: Array) -> Array:
        """The call, after a cache that holds NaN where nothing was written. Windowed rows have gone round it once."""
        keys = jax.random.split(jax.random.fold_in(key, 3), 4)
        B, S, T, F = self.rows, self.slots, self.T, self.F
        lengths = jnp.resize(jnp.asarray([2 * S // 3, S if self.window is None else S + S // 2], jnp.int32), (B,))
        written = (jnp.arange(S)[None] < lengths[::-1, None])[:, None, :, None]

        def cached(key: PRNGKeyArray, width: int) -> Array:
            """One row more than the block has, whose own are in any order."""
            x = jnp.where(written, jax.random.normal(key, (B, self.K, S, width), self.dtype), jnp.nan)
            return jnp.pad(x, ((1, 0), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)

        cache, scales = _Entry(cached(keys[0], self.H), cached(keys[1], self.Hv) if self.apart else None), None
        if self.codes:
            assert cache.v is not None
            drawn = jax.random.uniform(keys[2], (B, self.K, F, 2), minval=0.5 / STEPS, maxval=1.5 / STEPS)
            scales = drawn.astype(jnp.float32)
            cache = _Entry(_coded(cache.k), _coded(cache.v), jnp.abs(cached(keys[3], 2)).astype(jnp.float32) / STEPS)
        where = {"rows": B - jnp.arange(B)}
        if self.page is not None:
            cache, pages = in_pages(cache, self.page, keys[3])
            where = {"pages": pages[where["rows"]]}
        at = lengths[:, None] + jnp.arange(F)[None]
        documents = jnp.where(jnp.arange(F)[None] < F // 3, lengths[:, None] // 2, at[:, F // 3][:, None])
        visible: Any = self.visible
        if visible not in ("causal", "full"):
            visible = jax.random.bernoulli(keys[2], 0.5, (B, T, F)) | jnp.eye(T, F, F - T, dtype=bool)[None]
            visible = visible if self.visible == "one for each row" else visible[0]
        return call(
            q,
            at[:, F - T :],
            k,
            v,
            cache,
            lengths,
            visible=visible,
            window=None if self.window is None else min(self.window, max(1, S // 2)) if S else self.window,
            softcap=self.softcap,
            sinks=jax.random.normal(keys[3], (self.N,), self.dtype) if self.sinks else None,
            scale=self.scale,
            **where,
            starts=documents[:, F - T :] if self.starts else None,
            key_positions=None if T == F else at,
            scales=scales,
            joined=join(q, k, v) if self.joined else None,
        )


def _coded(x: Float[Array, "B K S H"]) -> Int8[Array, "B K S H"]:
    """Any codes; of what is NaN, too."""
    return jnp.round(jnp.nan_to_num(x).astype(jnp.float32) * STEPS).clip(-127, 127).astype(jnp.int8)
