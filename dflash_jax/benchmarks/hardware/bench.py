"""What the items of a report share: the pair that is measured, its engines, and looped steps, compiled once."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.benchmarks.presets import PAIRS, reduced
from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.benchmarks.step_times import Looped, fused
from dflash_jax.drafters.base import Drafter
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.graphs import graph_options
from dflash_jax.target import Target

RUNS = 5  # of a loop, whose median counts
KEPT = 4  # programs, with their caches


class StepKind(NamedTuple):
    """A step that is timed.

    Attributes:
        speculative: or plain.
        rows, context: of the batch; committed tokens of each row.
        tree: nodes; 0 is a chain.
        graphs: see `EngineConfig.gpu_graphs`.
    """

    speculative: bool
    rows: int = 1
    context: int = 1024
    tree: int = 0
    graphs: str = "auto"


class Bench:
    """A pair of models at a time, with random weights.

    Args:
        quantize: what is quantized of the report's own pair.
        small: toy sizes, to try the command itself.
        loops: steps of a device call.
    """

    def __init__(self, pair: str, *, quantize: Mapping[str, str] | None = None, small: bool = False, loops: int = 20):
        self.pair, self.small, self.loops = pair, small, 2 if small else loops
        self.quantize = dict(quantize or {})
        self.dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
        self._made: tuple[str, tuple[Target, Drafter]] | None = None
        self._looped: dict[StepKind, tuple[Looped, float]] = {}

    def models(self, pair: str | None = None) -> tuple[Target, Drafter]:
        """The pair of this name, or the one of the report; it takes the place of the last."""
        name = pair or self.pair
        if self._made is None or self._made[0] != name:
            self.clear()
            raw = reduced(*PAIRS[name]) if self.small else PAIRS[name]
            how = self.quantize if name == self.pair else None
            self._made = name, random_pair(*raw, how, dtype=self.dtype)
            jax.block_until_ready([model.params for model in self._made[1]])
        return self._made[1]

    def forget(self) -> None:
        """Compiles the next steps anew, as under another policy."""
        self._looped.clear()

    def clear(self) -> None:
        """Leaves the device's memory to what comes next."""
        self._made = None
        self._looped.clear()

    def step(self, kind: StepKind, pair: str | None = None) -> tuple[Looped, float]:
        """A loop of such steps, and the seconds until it had run once. The last few are kept."""
        target, drafter = self.models(pair)
        if kind.graphs == "auto":
            kind = kind._replace(graphs="on" if graph_options("auto") else "off")
        if kind not in self._looped:
            while len(self._looped) >= KEPT:
                self._looped.pop(next(iter(self._looped)))
            context = self.context(kind.context)
            length = -(-(context + 128) // 128) * 128
            config: dict[str, Any] = {"slots": kind.rows, "max_length": length, "gpu_graphs": kind.graphs}
            engine = Engine(target, drafter if kind.speculative else None, tree=kind.tree or None, **config)
            how = {"block_size": engine.block_size, "proposals": "calibrated", "nodes": engine.tree}
            step: Callable = partial(fused, **how) if kind.speculative else partial(fused, block_size=0)
            begin = time.perf_counter()
            looped = Looped(step, engine, context, self.loops, 0.0)
            self._looped[kind] = looped, time.perf_counter() - begin
        return self._looped[kind]

    def context(self, tokens: int) -> int:
        return min(tokens, 64) if self.small else tokens

    def milliseconds(self, kind: StepKind, pair: str | None = None) -> tuple[float, float]:
        """Of one step, the median; and seconds until the program had run once, most of which compile it."""
        looped, first = self.step(kind, pair)
        times = sorted(looped.seconds() for _ in range(RUNS))
        return 1e3 * times[RUNS // 2], first


def weight_bytes(target: Target, *, embedding: bool = False) -> int:
    """What a step reads of the target: all weights but the table of embeddings, unless it is the head as well."""
    total = sum(x.nbytes for x in jax.tree.leaves(target.params))
    if not embedding and not target.config.tie_word_embeddings:
        total -= sum(x.nbytes for x in jax.tree.leaves(target.params["embed_tokens"]))
    return total
