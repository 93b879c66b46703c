"""Every kernel at the shapes of real models: equal to a float32 reference, to the bit in every run, and how fast."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.device import timed
from dflash_jax.cache import KV, Fresh
from dflash_jax.cache.int8 import Codes, Int8KV
from dflash_jax.kernels.anchored_attention import attend_anchored
from dflash_jax.kernels.anchored_attention.trial import Trial
from dflash_jax.kernels.block_attention import together
from dflash_jax.kernels.dispatch import PREFERRED, Name
from dflash_jax.kernels.grouped_matmul import grouped_matmul
from dflash_jax.kernels.shapes import PRODUCTS, SHAPES, TRAINING, Shape
from dflash_jax.quantised import BLOCK, GROUP, EightBit, FourBit, quantised

FLOAT32 = jnp.dtype("float32")
EIGHT_BITS = "qwen3-8b decode", "qwen3-8b verify", "gpt-oss verify", "qwen3.5-9b verify"  # of the shapes of attention
REPEATS = 3
LOOPS = 30  # calls in one program


def implementations() -> list[Name]:
    """XLA, and the one of this package that the device prefers."""
    return ["xla", *PREFERRED.get(jax.default_backend(), ())[:1]]


def attention(*, small: bool, dtype: jnp.dtype) -> Iterator[Figures]:
    """Ragged rows with NaN where nothing was written, against float32; then the time at 1,024 and 8,192 positions."""
    cases = [(name, shape, KV) for name, shape in SHAPES.items()]
    cases += [(f"{name}, cache in 8 bits", SHAPES[name], Int8KV) for name in EIGHT_BITS]
    for name, shape, kind in cases:
        if small:
            shape = shape._replace(T=min(shape.T, 16), N=4, K=min(shape.K, 2), H=16, values=shape.values and 8)
        block, cache, lengths = _ragged(shape, 128 if small else 2048, dtype, kind)
        wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, tree)
        with jax.default_matmul_precision("highest"):
            given: tuple[Any, ...] = (*wide(block), wide(cache), lengths)
            truth = _call(shape, *given, implementation="xla")
        row: Figures = {"shape": name}
        for implementation in implementations():
            try:
                call = jax.jit(partial(_call, shape, implementation=implementation))
                row |= _compared(implementation, partial(call, *block, cache, lengths), truth)
            except ValueError:  # it declines
                continue
            for context in (64,) if small else (1024, 8192):
                given = _full(shape, context, dtype, kind)
                seconds = _looped(partial(_call, shape, implementation=implementation), *given)
                seen, whole = min(context, shape.window or context), given[-2]
                read = seen / whole.k.shape[2] * sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
                row[f"{implementation} us at {context}"] = 1e6 * seconds
                row[f"{implementation} GB/s at {context}"] = read / seconds / 1e9
        yield row


def anchored(*, small: bool, dtype: jnp.dtype) -> Iterator[Figures]:
    """The attention of training at the shapes of real drafters, and its gradients, against float32; then the time."""
    for name, shape in TRAINING.items():
        A, T, F, N, K, H, S, causal, window = shape
        if small:
            A, N, K, H, S = 8, 4, 2, 16, 128
        case = Trial(1, A, T, F, N, K, H, S, str(dtype), "causal" if causal else "full", window, H**-0.5)
        arrays = jax.jit(case.arrays)(jax.random.key(0))
        called = lambda name: partial(attend_anchored, implementation=name)
        with jax.default_matmul_precision("highest"):
            wide = [x.astype(jnp.float32) for x in arrays[:-2]]
            truth = jax.jit(partial(case.gradients, called("xla")))(*wide, *arrays[-2:])
        row: Figures = {"blocks": name}
        for implementation in implementations():
            forward, both = (jax.jit(partial(f, called(implementation))) for f in (case.call, case.gradients))
            try:
                row |= _compared(implementation, partial(both, *arrays), truth)
            except ValueError:  # it declines
                continue
            row[f"{implementation} forward us"] = 1e6 * timed(forward, *arrays)
            row[f"{implementation} both us"] = 1e6 * timed(both, *arrays)
        yield row


def products(*, small: bool, dtype: jnp.dtype) -> Iterator[Figures]:
    """The products of experts: sorted rows, NaN in the weights of a group without rows, against float32."""
    for name, shape in PRODUCTS.items():
        rows, groups, outputs, inputs = (16, 4, 64, 64) if small else shape[:4]
        x, weights, ends = _experts(rows, groups, outputs, inputs, shape.stored, dtype)
        with jax.default_matmul_precision("highest"):
            truth = grouped_matmul(x.astype(jnp.float32), weights.astype(FLOAT32), ends, implementation="xla")
        row: Figures = {"products": name}
        for implementation in implementations():
            call = partial(grouped_matmul, implementation=implementation)
            try:
                row |= _compared(implementation, partial(call, x, weights, ends), truth)
            except ValueError:
                continue
            seconds = timed(call, x, weights, ends)
            read = (
                np.count_nonzero(np.diff(ends, prepend=0))
                / groups
                * sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
            )
            row |= {f"{implementation} us": 1e6 * seconds, f"{implementation} GB/s": read / seconds / 1e9}
        yield row


def _compared(name: str, call: Callable[[], PyTree], truth: PyTree) -> Figures:
    """Of an array, or of several together."""
    numbers = lambda tree: [np.asarray(x.astype(jnp.float32), np.float64) for x in jax.tree.leaves(tree)]
    runs, expected = [numbers(call()) for _ in range(REPEATS)], numbers(truth)
    pairs = zip(runs[0], expected, strict=True)
    error = max(float(np.max(np.abs(got - right)) / np.max(np.abs(right))) for got, right in pairs)
    same = all(all(map(np.array_equal, runs[0], run)) for run in runs[1:])  # NaN differs from itself
    return {f"{name} error": error, f"{name} same bits": same}


def _call(shape: Shape, q: Array, positions: Array, k: Array, v: Array, sinks: Any, cache: KV, lengths: Array, **how):
    options = {"window": shape.window, "softcap": shape.softcap, "sinks": sinks}
    visible, fresh = "causal" if shape.causal else "full", cache.stored(Fresh(k, v, together(q, k, v, cache)))
    return cache.attend(q, positions, fresh, lengths, visible=visible, **options, **how)


def _ragged(shape: Shape, slots: int, dtype: jnp.dtype, kind: type[KV]) -> tuple[tuple, KV, Array]:
    """Rows of many lengths; slots that were never written hold NaN."""
    lengths = jnp.asarray([0, 1, 63, 65, slots // 2 + 7, slots - 64], jnp.int32)
    block, cache = _drawn(shape, len(lengths), slots, dtype)
    unwritten = (jnp.arange(slots)[None] >= lengths[:, None])[:, None, :, None]
    k = jnp.where(unwritten, jnp.nan, cache.k)
    v = None if cache.v is None else jnp.where(unwritten, jnp.nan, cache.v)
    return (block[0], _positions(lengths, shape.T), *block[1:]), _entry(k, v, kind), lengths


def _entry(k: Array, v: Array | None, kind: type[KV]) -> KV:
    """A cache that holds these, in 8 bits if it is one of those."""
    if kind is KV:
        return KV(k, v)
    codes = Codes.of(Fresh(k, v))
    return Int8KV(codes.k, codes.v, scales=codes.scales)


def _full(shape: Shape, context: int, dtype: jnp.dtype, kind: type[KV]) -> tuple:
    """One row of so many positions."""
    block, cache = _drawn(shape, 1, -(-context // 128) * 128, dtype)
    lengths = jnp.full(1, context, jnp.int32)
    return block[0], _positions(lengths, shape.T), *block[1:], _entry(cache.k, cache.v, kind), lengths


def _positions(lengths: Array, width: int) -> Array:
    return lengths[:, None] + jnp.arange(width)[None]


def _drawn(shape: Shape, rows: int, slots: int, dtype: jnp.dtype) -> tuple[tuple, KV]:
    T, N, K, H = shape[:4]
    normal = lambda seed, *size: jax.random.normal(jax.random.key(seed), size, dtype)
    cache = KV(normal(0, rows, K, slots, H), normal(1, rows, K, slots, H) if shape.values is None else None)
    q, k, v = normal(2, rows, T, N, H), normal(3, rows, K, T, H), normal(4, rows, K, T, H)
    return (q, k, v[..., : shape.values], normal(5, N) if shape.sinks else None), cache


def _looped(once: Callable, q: Array, *rest: Any) -> float:
    """Seconds of one call in a loop inside one program, in which each call waits for the last."""

    def loop(q, *rest):
        def again(_, x):
            out = once(x, *rest)  # of latents, narrower than the queries
            return jnp.concatenate([out, x[..., out.shape[-1] :]], axis=-1)

        return jax.lax.fori_loop(0, LOOPS, again, q)

    return timed(jax.jit(loop), q, *rest, runs=5, calls=1) / LOOPS


def _experts(
    rows: int, groups: int, outputs: int, inputs: int, stored: str, dtype: jnp.dtype
) -> tuple[Float[Array, "M D"], Any, Array]:
    """Rows for some of the groups, by chance; what no row asks for is NaN."""
    x = jax.random.normal(jax.random.key(0), (rows, inputs), dtype)
    chosen = np.random.default_rng(0).integers(0, groups, rows)
    sizes = np.bincount(chosen, minlength=groups)
    key, shape, idle = jax.random.key(1), (groups, outputs, inputs), jnp.asarray(sizes == 0)[:, None, None]
    if stored == "MXFP4":
        bits = jax.random.bits(key, (*shape[:2], inputs // 2), jnp.uint8)
        scale = jax.random.randint(key, (*shape[:2], inputs // GROUP), 118, 124).astype(jnp.uint8)
        weights: Any = FourBit(bits, jnp.where(idle, jnp.uint8(255), scale), code="e2m1")
    elif stored == "FP8":
        values = jax.random.normal(key, shape, jnp.float32).astype(jnp.float8_e4m3fn)
        blocks = groups, -(-outputs // BLOCK), -(-inputs // BLOCK)
        scale = jnp.where(idle, jnp.nan, jax.random.uniform(key, blocks, minval=0.01, maxval=0.03))
        weights = EightBit(values, scale, block=(BLOCK, BLOCK))
    elif stored == "INT8":
        weights = quantised(jax.random.normal(key, shape, dtype) * inputs**-0.5, "int8")
        weights = weights.replace(scale=jnp.where(idle[..., 0], jnp.nan, weights.scale))
    else:
        weights = jnp.where(idle, jnp.nan, jax.random.normal(key, shape, dtype) * inputs**-0.5).astype(dtype)
    return x, weights, jnp.asarray(np.cumsum(sizes), jnp.int32)
