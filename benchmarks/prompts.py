"""What a stream of long prompts does to rows that decode: `python -m benchmarks.prompts [TARGET DRAFTER]`.

Rows are always busy: when an answer ends, the next request takes its place. One in four has a long prompt. For every
prefill budget (0 reads prompts between device calls) it prints, in milliseconds, the time between two deliveries of a
row (median, 99th percentile and their ratio), the time to the first token, and tokens a second. Without arguments the
pair has random weights.
"""

import argparse
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.loads import VOCABULARY, small_pair
from dflash_jax import Engine, Request, SamplingParams, load_drafter, load_target
from dflash_jax.benchmarks.random_weights import random_pair

SHORT, LONG, ANSWER = 32, 1536, 48  # tokens


def requests(count: int, vocabulary: int) -> list[Request]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt = rng.integers(2, vocabulary - 2, LONG if i % 4 == 3 else SHORT).tolist()
        made.append(Request(prompt, SamplingParams(ANSWER, ignore_eos=True), id=str(i)))
    return made


def stream(engine: Engine, asked: list[Request]) -> dict[str, float]:
    """Answers all requests, as many at a time as there are rows."""
    gaps, first, left = list[float](), list[float](), list(reversed(asked))
    begun, seen, done = dict[int, float](), dict[int, float](), 0
    start = time.perf_counter()
    while done < len(asked):
        while left and engine.busy + engine.waiting < engine.slots:
            begun[engine.submit(left.pop())] = time.perf_counter()
        events = engine.step()
        now = time.perf_counter()
        for ticket, completion in events:
            if ticket in seen:
                gaps.append(now - seen[ticket])
            else:
                first.append(now - begun[ticket])
            seen[ticket] = now
            done += bool(completion.finish_reason)
    seconds = time.perf_counter() - start
    share = lambda values, q: 1000 * float(np.quantile(values, q))
    return {
        "p50": share(gaps, 0.5),
        "p99": share(gaps, 0.99),
        "ratio": share(gaps, 0.99) / share(gaps, 0.5),
        "first p50": share(first, 0.5),
        "first p99": share(first, 0.99),
        "tokens/s": ANSWER * len(asked) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="target and drafter")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 32, 128, 256])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="most decoding steps of one device call")
    parser.add_argument("--requests", type=int, default=64)
    given = parser.parse_args()
    pair: tuple[Any, Any] = random_pair(*small_pair(4, 2, 256, 64, 2 * LONG), dtype=jnp.float32)
    if given.models:
        pair = load_target(given.models[0]), load_drafter(given.models[1])
    size = min(VOCABULARY, pair[0].config.vocab_size)
    asked = requests(given.requests, size)
    settings = {"slots": given.rows, "max_length": LONG + ANSWER, "steps_per_visit": given.steps}
    engines = {n: Engine(*pair, **settings, prefill_budget=n or None, block_size=8) for n in given.budgets}
    for engine in engines.values():
        engine.warm_up()
        engine.generate(asked[:4])
    for budget, engine in engines.items():
        figures = "  ".join(f"{name} {value:.1f}" for name, value in stream(engine, asked).items())
        print(f"budget {budget:4}: {figures}", flush=True)


if __name__ == "__main__":
    main()
