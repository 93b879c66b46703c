"""Log-probabilities of the tokens of a prompt: how likely the target finds each after those before it.

No row of an engine is used, and none of its programs: a cache of its own lasts for one prompt, which is read in chunks.
Shapes: B rows, the first of which is read (a mesh wants one for each part), C tokens of a chunk.
"""

from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.cache import Cache, commit, once_read
from dflash_jax.decoding.logprobs import Logprobs, log_probabilities
from dflash_jax.decoding.state import TargetModel
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import MOST_ALTERNATIVES
from dflash_jax.mesh import entered, rows_of
from dflash_jax.models.attention import Inputs
from dflash_jax.sharding import pin, settled

SHORT = 64  # tokens of a prompt that needs no more than a short chunk


class Scores(NamedTuple):
    """Of the tokens of a prompt but the first, which nothing comes before: the log-probability of each, and (token,
    log-probability) of the likeliest in its place, in order."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def chunk_of(engine: Engine, prompt: Sequence[int]) -> int:
    """Tokens of a chunk in which this prompt is read; each size is a program."""
    chunk = min(engine.config.prefill_chunk, engine.max_length)
    return min(chunk, SHORT) if len(prompt) <= SHORT else chunk


def compile_scores(engine: Engine, chunk: int) -> None:
    """Compiles the program that reads such chunks, if it is not yet; other threads may use the engine meanwhile."""
    target, rows = engine.target, rows_of(engine.target.mesh)
    tokens, counts = np.zeros((rows, chunk), np.int32), np.zeros(rows, np.int32)
    cache = _cache(engine, chunk)
    with entered(target.mesh):
        _read.lower(target, cache, tokens, tokens, counts, counts).compile()


def read_scores(engine: Engine, prompt: Sequence[int]) -> Generator[None, None, Scores]:
    """Reads a prompt with the target of an engine; pauses after each chunk, so that the engine can make a step.

    Args:
        prompt: no longer than `engine.max_length`.
    """
    target, found = engine.target, Scores([], [])
    rows, chunk = rows_of(target.mesh), chunk_of(engine, prompt)
    cache = _cache(engine, chunk)
    for start in range(0, len(prompt) - 1, chunk):
        tokens, following = np.zeros((rows, chunk), np.int32), np.zeros((rows, chunk), np.int32)
        lengths, counts = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        count = min(chunk, len(prompt) - 1 - start)
        tokens[0, :count] = prompt[start : start + count]
        following[0, :count] = prompt[start + 1 : start + 1 + count]
        lengths[0], counts[0] = start, count
        with entered(target.mesh):
            cache, scores = _read(target, cache, tokens, following, lengths, counts)
        chosen, top, ids = (x[0, :count].tolist() for x in jax.device_get((scores.chosen, scores.top, scores.ids)))
        found.logprobs.extend(chosen)
        found.top.extend([*zip(*one, strict=True)] for one in zip(ids, top, strict=True))
        yield
    return found


def _cache(engine: Engine, chunk: int) -> Cache:
    """An empty one; where there is no mesh, bound to the device as those of later chunks are, which one program serves
    then."""
    target = engine.target
    with entered(target.mesh):
        cache = _empty(target, rows_of(target.mesh), engine.max_length, chunk)
    return settled(cache) if target.mesh is None else cache


@partial(jax.jit, static_argnums=(1, 2, 3))
def _empty(target: TargetModel, rows: int, room: int, chunk: int) -> Cache:
    return pin(target.init_cache(rows, room, chunk))


@partial(jax.jit, donate_argnums=1)
def _read(
    target: TargetModel,
    cache: Cache,
    tokens: Int[Array, "B C"],
    following: Int[Array, "B C"],
    lengths: Int[Array, " B"],
    counts: Int[Array, " B"],
) -> tuple[Cache, Logprobs]:
    """Commits the next tokens of a prompt, and scores those that follow each."""
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    ((hidden, _, fresh),) = target.forward_all([Inputs(tokens, positions, None, lengths, None, counts=counts)], cache)
    cache = commit(cache, fresh, lengths, once_read(counts, hidden))
    most = min(MOST_ALTERNATIVES, target.config.vocab_size)
    return pin(cache), log_probabilities(target.unembed(hidden), following, counts > 0, most)
