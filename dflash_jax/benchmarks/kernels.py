"""`python -m dflash_jax.benchmarks.kernels`: the kernels and a whole step against the memory-bandwidth ceiling.

Attention: every shape of `shapes.py` at a context and batch, keys and values read per second. Step: a published pair
with random weights: autoregressive step, draft, verify, commit, and what their ratio means at a given tau. It runs
anywhere; the figures mean something on an accelerator.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from dflash_jax import files
from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.topologies import CHIPS
from dflash_jax.cli import optional, parse, parsed

# What a device calls itself, and its name in `topologies`.
KINDS = {"v5 lite": "v5e", "v6 lite": "v6e", "v7": "tpu7x"} | {name: name for name in CHIPS}
TAU = 6.49  # the paper's average on Qwen3-8B


def _numbers(given: Sequence[str]) -> tuple[int, ...]:
    if not given:
        raise ValueError("needs at least one number")
    return tuple(map(int, given))


Numbers = Annotated[tuple[int, ...], parsed(_numbers, "N [N ...]", "*")]


@dataclass(frozen=True)
class KernelOptions:
    """Options of `python -m dflash_jax.benchmarks.kernels`.

    Attributes:
        only: one part
        context: tokens
        batch: rows
        pair: of the step: a name of dflash_jax.benchmarks.presets
        dtype: float32 or bfloat16
        bandwidth: of the device's memory, if it is not known by name
        loops: repetitions inside one program
        json: write the figures to this file, too
    """

    only: Annotated[
        Literal["attention", "step"] | None, arg(metavar="attention|step", help_behavior_hint="(default: both)")
    ] = None
    context: Annotated[Numbers, arg(help_behavior_hint="(default: 1024 8192)")] = (1024, 8192)
    batch: Annotated[Numbers, arg(help_behavior_hint="(default: 1 8)")] = (1, 8)
    pair: str = "qwen3-8b"
    dtype: str = "bfloat16"
    bandwidth: Annotated[float | None, optional(float, "GB/s")] = None
    loops: int = 30
    json: Annotated[str | None, optional(str, "FILE")] = None


def parse_options(argv: Sequence[str] | None = None) -> KernelOptions:
    """The options of a command line."""
    description = (__doc__ or "").splitlines()[0]
    return parse(KernelOptions, argv, prog="python -m dflash_jax.benchmarks.kernels", description=description)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_options(argv)
    import jax

    from dflash_jax.benchmarks.presets import PAIRS

    if args.pair not in PAIRS:
        print(f"error: --pair must be one of {', '.join(PAIRS)}, got {args.pair}", file=sys.stderr)
        return 2
    kind = jax.devices()[0].device_kind
    ceiling = args.bandwidth * 1e9 if args.bandwidth else bandwidth(kind)
    figures: Figures = {"device": kind, "bandwidth": ceiling, "attention": [], "step": []}
    print(f"{kind}, memory bandwidth " + (f"{ceiling / 1e9:.0f} GB/s" if ceiling else "unknown (see --bandwidth)"))
    for batch in args.batch:
        for context in args.context:
            if args.only != "step":
                for row in attention(batch, context, args.dtype, args.loops, ceiling):
                    figures["attention"].append(row)
                    print(line(row), flush=True)
            if args.only != "attention":
                row = step(args.pair, batch, context, args.dtype, args.loops, ceiling)
                figures["step"].append(row)
                print(line(row), flush=True)
    if args.json:
        files.write_json(Path(args.json), figures)
    return 0


def bandwidth(kind: str) -> float | None:
    """The memory bandwidth of a device by its name, bytes a second, or None."""
    return next((CHIPS[chip].bandwidth for name, chip in KINDS.items() if name in kind.lower()), None)


def line(row: Figures) -> str:
    """A row of figures as text."""
    cells = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    return "   ".join(cells)


def attention(batch: int, context: int, dtype: str, loops: int, ceiling: float | None):
    """Yields the figures of every shape and every implementation that runs here."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.cache import KV
    from dflash_jax.kernels.block_attention import attend
    from dflash_jax.kernels.dispatch import PREFERRED, Name
    from dflash_jax.kernels.shapes import SHAPES

    backend = jax.default_backend()
    for name, shape in SHAPES.items():
        T, N, K, H = shape[:4]
        slots = -(-context // 128) * 128
        normal = lambda seed, *size: jax.random.normal(jax.random.key(seed), size, dtype)
        cache = KV(normal(0, batch, K, slots, H), normal(1, batch, K, slots, H) if shape.values is None else None)
        q, k, v = normal(2, batch, T, N, H), normal(3, batch, K, T, H), normal(4, batch, K, T, H)
        v = v[..., : shape.values]
        width = H * (2 if shape.values is None else 1)  # of what is read for a position and head
        lengths = jnp.full(batch, context, jnp.int32)
        positions = lengths[:, None] + jnp.arange(T)[None]
        sinks = normal(5, N) if shape.sinks else None
        read = min(context, shape.window or context) * batch * K * width * q.dtype.itemsize
        call = partial(
            attend,
            visible="causal" if shape.causal else "full",
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks,
        )
        names: list[Name] = ["xla", *([PREFERRED[backend]] if backend in PREFERRED else [])]
        for implementation in names:
            try:
                once = partial(call, implementation=implementation)
                seconds = looped(once, q, positions, k, v, cache, lengths, loops=loops)
            except ValueError:  # it declines
                continue
            row = {"attention": name, "rows": batch, "context": context, "by": implementation}
            row |= {"microseconds": 1e6 * seconds, "megabytes": read / 1e6}
            yield row | ({"of bandwidth": read / seconds / ceiling} if ceiling else {})


def looped(once: Callable, q: Any, *rest: Any, loops: int) -> float:
    """Seconds of one call, the median of five runs of a loop inside one program; each call waits for the last."""
    import jax
    import jax.numpy as jnp

    def loop(q, *rest):
        def again(_, x):
            out = once(x, *rest)  # of latents, narrower than the queries
            return jnp.concatenate([out, x[..., out.shape[-1] :]], axis=-1)

        return jax.lax.fori_loop(0, loops, again, q)

    program = jax.jit(loop)
    jax.block_until_ready(program(q, *rest))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(program(q, *rest))
        times.append((time.perf_counter() - begin) / loops)
    return sorted(times)[2]


def step(pair: str, batch: int, context: int, dtype: str, loops: int, ceiling: float | None) -> Figures:
    """Times of a pair's steps, the speedup they mean at the paper's tau, and their share of the bandwidth."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.benchmarks.costs import cost
    from dflash_jax.benchmarks.presets import PAIRS
    from dflash_jax.benchmarks.random_weights import random_pair
    from dflash_jax.benchmarks.step_times import StepTimes
    from dflash_jax.decoding.state import init_state
    from dflash_jax.decoding.step import speculative_step, step_functions
    from dflash_jax.infer.engine.engine import Engine

    target, drafter = random_pair(*PAIRS[pair], jnp.dtype(dtype))
    length = -(-(context + 64) // 128) * 128
    plain, speculative = (Engine(target, d, slots=batch, max_length=length) for d in (None, drafter))
    times = StepTimes(plain, speculative, context, loops)
    sampled = StepTimes(plain, speculative, context, loops, temperature=1.0)
    for _ in range(5):
        times.sample()
        sampled.sample()
    seconds = times.seconds()
    room = jax.eval_shape(lambda: init_state(target, None, batch, length, 1))
    # What products read of weights and cache; of the cache, as much as is filled.
    alone = lambda target, state: speculative_step(step_functions(target, None, 0), state)
    weights, cache = cost(alone, target, room).bytes_read
    read = weights + cache * context / length
    ratio = seconds["speculative"] / seconds["autoregressive"]
    row: Figures = {"step": pair, "rows": batch, "context": context}
    row |= {f"{name} ms": 1e3 * value for name, value in seconds.items()}
    row |= {"ratio": ratio, f"speedup at tau {TAU}": TAU / ratio}
    row["sampled / greedy"] = sampled.seconds()["speculative"] / seconds["speculative"]
    if ceiling:
        row["autoregressive of bandwidth"] = read / seconds["autoregressive"] / ceiling
    return row


if __name__ == "__main__":
    sys.exit(main())
