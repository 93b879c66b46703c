"""Choosing tokens: greedy, or sampled with noise keyed by (request, position).

A token is `argmax(filtered log-probabilities / temperature + noise)` where the noise depends on nothing
but the request's key, the absolute position and the token id. Sampling is therefore a deterministic
function of the logits, and a speculative run reproduces the autoregressive sample exactly, whatever the
drafter, block size or batch. Shapes: B rows, T positions, V vocabulary.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dflash_jax.kernels.dispatch import platform
from dflash_jax.mesh import HEADS, current_mesh, parts_of


class Sampling(struct.PyTreeNode):
    """Sampling settings of every row.

    Attributes:
        temperature: 0 is greedy, and ignores the rest.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: of those, keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
        min_p: of those, drop tokens less likely than this share of the most likely one; 0 drops none.
        key: one typed key per request (see `request_key`).
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    key: Key[Array, " B"]


def check_sampling(temperature: float, top_p: float, top_k: int, min_p: float = 0.0) -> None:
    """Raises ValueError for settings that name no distribution."""
    most = float(jnp.finfo(jnp.float32).max)
    if not 0 <= temperature <= most:
        raise ValueError(f"temperature must be at least 0 and at most {most:.4g} (float32), got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}; 1 keeps every token")
    if not 0 <= top_k < 2**31:
        raise ValueError(f"top_k must lie in 0..2**31 - 1, got {top_k}; 0 keeps every token")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must lie in 0..1, got {min_p}; 0 keeps every token")


def greedy_rows(rows: int) -> Sampling:
    """Settings of `rows` greedy rows."""
    zeros, keys = jnp.zeros(rows), jax.random.split(jax.random.key(0), rows)
    return Sampling(zeros, jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.zeros(rows), keys)


def request_key(seed: int | None, job_seed: int, request_id: str, sample: int = 0) -> Key[Array, ""]:
    """The key of one request: its own seed, else the job's folded with a stable hash of its id; further samples of the
    same request fold in their number."""
    if seed is not None:
        key = _key(seed)
    else:
        digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()
        key = jax.random.fold_in(_key(job_seed), int.from_bytes(digest[:4], "little"))
    return jax.random.fold_in(key, sample) if sample else key


def _key(seed: int) -> Key[Array, ""]:
    """`jax.random.key(seed)`, with the high word folded in where jax would drop it."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key


def gumbel_noise(sampling: Sampling, positions: Int[Array, "B T"], vocab_size: int) -> Float[Array, "B T V"]:
    """Gumbel noise of the tokens at absolute `positions`; zeros for greedy rows, and free if all rows are greedy.

    Drawn in JAX's "high" mode: the default one stops at 15.94, so that tokens below a probability of about 1e-6 would
    come too rarely.
    """
    shape = (*positions.shape, vocab_size)

    def draw() -> Float[Array, "B T V"]:
        def one(key: Key[Array, ""], position: Int[Array, ""]) -> Float[Array, " V"]:
            return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32, mode="high")

        noise = jax.vmap(jax.vmap(one, (None, 0)))(sampling.key, positions)
        return jnp.where(sampling.temperature[:, None, None] > 0, noise, 0.0)

    return if_any(sampling.temperature > 0, draw, lambda: jnp.zeros(shape, jnp.float32))


def select(logits: Float[Array, "B T V"], noise: Float[Array, "B T V"], sampling: Sampling) -> Int[Array, "B T"]:
    """The token of every position under each row's settings; ties go to the lowest id."""
    sampled = sampling.temperature > 0
    return first_argmax(if_any(sampled, lambda: perturbed_scores(logits, noise, sampling), lambda: logits))


def if_any(rows: Bool[Array, " B"], then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`then()` if any row asks for it, at no cost where none does.

    By an index, not a predicate: with that, XLA for GPUs forgets how the result is split over a mesh, and gathers it.
    """
    return jax.lax.switch(jnp.max(rows.astype(jnp.int32)), (otherwise, then))


def top_k(scores: Float[Array, "B T V"], count: int) -> tuple[Float[Array, "B T C"], Int[Array, "B T C"]]:
    """The largest scores in order, and where; of equal ones the first.

    Without the barrier XLA looks through it at who uses a part of the result, and on CPU then sorts all of the scores.
    In the order of `jax.lax.top_k`, XLA puts the barrier on its whole result, and aborts on a mesh that splits only the
    vocabulary.
    """
    best, at = jax.lax.top_k(scores, count)
    at, best = jax.lax.optimization_barrier((at, best))
    return best, at


def first_argmax(scores: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """The lowest index of the largest score, or some index where a score is NaN."""
    return best_score(scores)[1]


def best_score(scores: Float[Array, "B T V"]) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """The largest score, and its lowest index, or some index where a score is NaN.

    Two plain reductions, which vectorize where argmax does not. On a GPU that has the whole vocabulary, one of pairs:
    it starts half as many kernels, and whatever the scores are computed from becomes a part of it.
    """
    size = scores.shape[-1]
    if platform() == "gpu" and parts_of(current_mesh(), HEADS) == 1:
        nothing = jnp.array(-jnp.inf, scores.dtype), jnp.int32(size)
        index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        best, place = jax.lax.reduce((scores, index), nothing, _better, (2,))
        return best, jnp.minimum(place, size - 1)
    index = jnp.arange(size, dtype=jnp.int32)[None, None]
    best = jnp.max(scores, axis=-1, keepdims=True)
    # A row of NaN equals nothing; the clamp keeps its token inside the vocabulary.
    place = jnp.minimum(jnp.min(jnp.where(scores == best, index, size), axis=-1), size - 1)
    return best[..., 0], place


def _better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of two scores with their indices the larger one, of equal ones the first; NaN comes before all."""
    (x, i), (y, j) = a, b
    first = (x > y) | jnp.isnan(x) | ((x == y) & (i < j))
    return jnp.where(first, x, y), jnp.where(first, i, j)


def perturbed_scores(
    logits: Float[Array, "B T V"], noise: Float[Array, "B T V"], sampling: Sampling
) -> Float[Array, "B T V"]:
    """Scores whose argmax is the chosen token: logits of greedy rows, filtered and noisy ones of others."""
    sampled = sampling.temperature[:, None, None] > 0
    return jnp.where(sampled, scaled_scores(logits, sampling) + noise, logits)


def scaled_scores(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Logits divided by the temperature, and filtered; of greedy rows the logits.

    Temperature, top-k and top-p come in the order of the official implementation; then min-p. Tokens tied with the last
    one kept are kept. Equal to `reference`, without sorting.
    """
    temperature = sampling.temperature[:, None, None]
    # Relative to the best, so that a tiny temperature cannot overflow.
    scores = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)
    return jnp.where(temperature > 0, filter_scores(scores, sampling), logits)


def reference(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """What `scaled_scores` returns, found by sorting the vocabulary: slower, and short enough to check by reading.

    The two may differ in the last token of a top-p if the mass before it lies within rounding of `top_p`.
    """
    settings = sampling.temperature, sampling.top_p, sampling.min_p
    temperature, top_p, min_p = (x[:, None, None].astype(logits.dtype) for x in settings)
    scores = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    descending = jnp.sort(scores, axis=-1, descending=True)
    count = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, logits.shape[-1]), logits.shape[-1])
    lowest = jnp.take_along_axis(descending, count[:, None, None] - 1, axis=-1)  # of top-k
    mass = jax.nn.softmax(jnp.where(descending >= lowest, descending, -jnp.inf), axis=-1)
    in_top_p = (jnp.cumsum(mass, axis=-1) - mass < top_p) | (top_p == 1)  # by the mass of the better ones
    lowest = jnp.maximum(lowest, jnp.min(jnp.where(in_top_p, descending, jnp.inf), axis=-1, keepdims=True))
    kept = (scores >= lowest) & (scores >= jnp.log(min_p))  # the best score is 0
    return jnp.where(temperature > 0, jnp.where(kept, scores, -jnp.inf), logits)


def filter_scores(scores: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Sets tokens outside each row's top-k, top-p and min-p to minus infinity; costs next to nothing where none is set.

    A filter is a cut in the order of the floats, found by searching for it (`_cut`), without sorting the vocabulary and
    without anything of the scores' size but the result.
    """
    limited = (sampling.top_k > 0) & (sampling.top_k < scores.shape[-1])
    top_k = jnp.where(limited, sampling.top_k, scores.shape[-1])[:, None]
    best = jnp.max(scores, axis=-1, keepdims=True)

    def by_count() -> Int[Array, "B T"]:
        return _cut(scores, lambda scores: 1, top_k, lowest)

    def by_mass() -> Int[Array, "B T"]:
        kept = _ordered(scores) >= cut[..., None]
        total = jnp.sum(jnp.where(kept, jnp.exp(scores - best), 0.0), axis=-1, keepdims=True)
        share = jnp.maximum(jnp.ceil(sampling.top_p * _UNITS), 1.0).astype(jnp.int32)
        share = jnp.where(sampling.top_p < 1, share, jnp.iinfo(jnp.int32).max)[:, None]
        return _cut(scores, lambda scores: _units(jnp.exp(scores - best) * (_UNITS / total)), share, cut)

    lowest = jnp.full(scores.shape[:2], jnp.iinfo(jnp.int32).min, jnp.int32)
    cut = if_any(limited, by_count, lambda: lowest)
    cut = if_any(sampling.top_p < 1, by_mass, lambda: cut)
    least = best + jnp.log(sampling.min_p)[:, None, None]
    return jnp.where((_ordered(scores) >= cut[..., None]) & (scores >= least), scores, -jnp.inf)


def _ordered(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of the floats they came from."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


_UNITS = 2.0**30  # in which masses are counted: all of a position's together stay below 2**31


def _units(mass: Float[Array, "B T V"]) -> Int[Array, "B T V"]:
    """Whole units of mass: their sums are exact, in whatever order and however the vocabulary is split, and a processor
    may add several at once.

    Rounded up or down in an even mixture over the vocabulary, so that neither a long tail of tokens below one unit nor
    many equal ones are lost or gained together: a sum is off by a few parts in 10**7, as one of floats would be.
    """
    index = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, mass.shape[-1]), 2)
    golden = (index * jnp.uint32(0x9E3779B1)) >> 8  # multiples of the golden ratio, modulo 1, in 24 bits
    return (mass + golden.astype(jnp.int32).astype(jnp.float32) * 2.0**-24).astype(jnp.int32)


def _cut(
    scores: Float[Array, "B T V"],
    weigh: Callable[[Float[Array, "B T V"]], Int[Array, "B T V"] | int],
    limit: Int[Array, "B 1"],
    low: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    """The smallest t >= `low` for which the tokens above t in the order of the floats weigh less than `limit` together.

    Every pass reads the scores once, compares them with thresholds that part what is left of the integers evenly, and
    goes on with one of the parts.
    """
    mesh, where = current_mesh(), platform()
    split = parts_of(mesh, HEADS) > 1  # the vocabulary, over devices
    # Where memory is what a pass costs, few passes with many comparisons; on a CPU comparisons are.
    parts, passes = (4, 16) if where == "cpu" else (41, 6) if where == "tpu" and not split else (16, 8)
    assert parts**passes >= 2**32
    width = jax.lax.bitcast_convert_type(jnp.full_like(low, jnp.iinfo(jnp.int32).max) - low, jnp.uint32)
    signed = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)

    def narrow(_, bounds):
        low, width = bounds  # the cut lies in low..low + width
        seen = scores
        if where != "cpu":  # computed anew from the scores, or XLA would store order and weight and read both
            seen, _ = jax.lax.optimization_barrier((scores, low))
        order, weight = _ordered(seen), weigh(seen)
        step = width // parts + 1
        above = [low + signed(jnp.minimum(i * step - 1, width)) for i in range(1, parts)]
        weights = [jnp.where(order > t[..., None], weight, 0) for t in above]
        sums = [jnp.sum(x, axis=-1) for x in weights] if split else _sums(weights)
        below = sum((x >= limit).astype(jnp.uint32) for x in sums)  # thresholds below the cut
        return low + signed(below * step), jnp.minimum(step - 1, width - below * step)

    return jax.lax.fori_loop(0, passes, narrow, (low, width))[0]


def _sums(arrays: list[Int[Array, "B T V"]]) -> list[Int[Array, "B T"]]:
    """Sums over the vocabulary in one reading of what they are computed from, however many they are.

    Devices that split the vocabulary would exchange these one by one; sums apart, all at once.
    """
    add = lambda x, y: [a + b for a, b in zip(x, y, strict=True)]
    return jax.lax.reduce(arrays, [jnp.int32(0)] * len(arrays), add, (2,))
