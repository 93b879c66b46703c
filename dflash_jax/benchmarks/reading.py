"""`python -m dflash_jax.benchmarks.reading`: a prompt in chunks against the same prompt one token at a time.

Each is one compiled loop of passes and commits of the same target. For targets with linear attention the gated delta
rule of one layer is timed alone, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from tyro.conf import arg

from dflash_jax import files
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.random_weights import random_target
from dflash_jax.cache import Cache, commit
from dflash_jax.cli import optional
from dflash_jax.config import Raw
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.kernels.delta_rule import advance, read_block, read_prompt
from dflash_jax.models.linear_attention import LinearAttentionConfig
from dflash_jax.parsing import parse
from dflash_jax.target import Target, load_target


@dataclass(frozen=True)
class ReadingOptions:
    """Options of `python -m dflash_jax.benchmarks.reading`.

    Attributes:
        target: Hugging Face id or directory, or a name of dflash_jax.benchmarks.presets (random weights)
        layers: of a target named by a preset, the first ones alone
        width: of a target named by a preset, whose MLPs shrink with it; heads stay as they are
        tokens: of the prompt
        chunk: tokens of a pass
        rounds: times each is measured, in turns
        dtype: float32 or bfloat16
        json: write the figures, too
    """

    target: Annotated[str, arg(metavar="ID|DIR|NAME")]
    layers: Annotated[int | None, optional(int, "N", "all")] = None
    width: Annotated[int | None, optional(int, "N", "the model's")] = None
    tokens: int = 4096
    chunk: int = 512
    rounds: int = 3
    dtype: str = "float32"
    json: Annotated[Path | None, optional(Path, "FILE")] = None


def main(argv: Sequence[str] | None = None) -> int:
    description = "A prompt in chunks against the same prompt one token at a time."
    options = parse(ReadingOptions, argv, prog="python -m dflash_jax.benchmarks.reading", description=description)
    return exit_status(lambda: _shown(options))


def _shown(options: ReadingOptions) -> int:
    figures = measure(options)
    for name, one in figures.items():
        chunks, single = one["chunks"], one["one at a time"]
        text = f"{name}: {1e3 * chunks:.1f} ms in chunks, {1e3 * single:.1f} one at a time"
        print(f"{text}, {single / chunks:.1f} times as long")
    if options.json:
        files.write_json(options.json, figures)
    return 0


def measure(options: ReadingOptions) -> dict[str, dict[str, float]]:
    """Seconds of the whole prompt: the best of the rounds, of the model and of the gated delta rule alone.

    Raises:
        ValueError: the prompt is not a whole number of chunks, or a size is given for a checkpoint.
    """
    if options.tokens < 1 or options.chunk < 1 or options.tokens % options.chunk:
        raise ValueError(f"--tokens must be a multiple of --chunk, got {options.tokens} and {options.chunk}")
    if options.target in PAIRS:
        raw = _cut(PAIRS[options.target][0], options.layers, options.width)
        target = random_target(raw, jnp.dtype(options.dtype))
    elif options.layers or options.width:
        raise ValueError("--layers and --width are for targets of dflash_jax.benchmarks.presets")
    else:
        target = load_target(options.target, dtype=options.dtype)
    widths = {"chunks": options.chunk, "one at a time": 1}
    tokens = jax.random.randint(jax.random.key(0), (1, options.tokens), 0, target.config.vocab_size)
    cache = target.init_cache(1, options.tokens, options.chunk)
    model = {name: partial(_read, target, tokens, cache, width) for name, width in widths.items()}
    figures = {"model": _in_turns(model, options.rounds)}
    linear = [x.mixer for x in target.config.layers if isinstance(x.mixer, LinearAttentionConfig)]
    if linear:
        inputs = _inputs(linear[0], options.tokens)
        alone = {name: partial(_read_alone, *inputs, width) for name, width in widths.items()}
        figures["gated delta rule of one layer"] = _in_turns(alone, options.rounds)
    return figures


def _cut(raw: Raw, layers: int | None, width: int | None) -> Raw:
    """A configuration with fewer layers, and of another width."""
    if "text_config" in raw:
        return {**raw, "text_config": _cut(raw["text_config"], layers, width)}
    changed = dict(raw)
    if layers:
        changed["num_hidden_layers"] = layers
        if "layer_types" in raw:
            changed["layer_types"] = raw["layer_types"][:layers]
    if width:
        for name in ("intermediate_size", "moe_intermediate_size"):
            if raw.get(name):
                changed[name] = -(-raw[name] * width // raw["hidden_size"])
        changed["hidden_size"] = width
    return changed


def _in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + rounds):  # the first compiles
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - begin)
    return {name: min(taken[1:]) for name, taken in times.items()}


@partial(jax.jit, static_argnames="width")
def _read(target: Target, tokens: Int[Array, "1 T"], cache: Cache, width: int) -> Cache:
    """The cache after all tokens, `width` of which are read in a pass."""
    kept = jnp.full(1, width, jnp.int32)

    def once(i: Int[Array, ""], cache: Cache) -> Cache:
        lengths = jnp.full(1, i * width, jnp.int32)
        block = jax.lax.dynamic_slice_in_dim(tokens, i * width, width, axis=1)
        positions = lengths[:, None] + jnp.arange(width)[None]
        _, _, fresh = target.forward(block, positions, None, cache, lengths)
        return commit(cache, fresh, lengths, kept)

    return jax.lax.fori_loop(0, tokens.shape[1] // width, once, cache)


def _inputs(linear: LinearAttentionConfig, tokens: int) -> tuple[tuple[Array, ...], Array]:
    """Random q, k, v, g and beta of a prompt, and an empty state."""
    K, G, H, Hv = linear.num_key_heads, linear.shared, linear.key_head_dim, linear.value_head_dim
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (1, tokens, K, H)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (1, tokens, K, G, Hv))
    g, beta = -jax.random.uniform(keys[3], (1, tokens, K, G)), jax.random.uniform(keys[4], (1, tokens, K, G))
    return (q * H**-0.5, k, v, g, beta), jnp.zeros((1, K, G, H, Hv))


@partial(jax.jit, static_argnames="width")
def _read_alone(inputs: tuple[Array, ...], state: Float[Array, "1 K G H Hv"], width: int) -> tuple[Array, Array]:
    """The state after the prompt, and the sum of all outputs, which keeps them from being left out."""

    def once(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, total = carry
        q, k, v, g, beta = (jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1) for x in inputs)
        if width > 1:
            out, state = read_prompt(q, k, v, g, beta, state)
        else:
            out, u = read_block(q, k, v, g, beta, state, None)
            state = advance(state, k, u, g, jnp.ones(1, jnp.int32))
        return state, total + jnp.sum(out)

    return jax.lax.fori_loop(0, inputs[0].shape[1] // width, once, (state, jnp.zeros(())))


if __name__ == "__main__":
    exit_quietly(main())
