"""What rows that share memory bring: `python -m benchmarks.pages [memory | speed | samples]`.

    memory    64 rows of requests whose lengths are log-normal (mean 700, most 8,192): bytes of the caches against those
              of the tokens that are there at the peak, and how many rows of --max-length fit into the same memory
    speed     whole jobs in turns, with memory of their own and shared: lengths that differ, and lengths that do not
    samples   pages of 8 samples of a prompt of 2,000 tokens

A small pair with random weights in float32, as in `benchmarks.loads`; answers have fixed lengths.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.loads import VOCABULARY, small_pair
from dflash_jax import Engine, Request, SamplingParams
from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.cache import size_in_bytes
from dflash_jax.cache.pages import PAGE

MOST = 8192  # tokens of a request


def requests(lengths: Sequence[int], prompt: float = 0.3, samples: int = 1) -> list[Request]:
    """Requests of so many tokens each, a share of which are prompt."""
    rng, asked = np.random.default_rng(1), list[Request]()
    for i, length in enumerate(lengths):
        count = max(1, int(prompt * length))
        tokens = rng.integers(2, VOCABULARY - 2, count).tolist()
        params = SamplingParams(max(1, length - count), ignore_eos=True)
        asked += [Request(tokens, params, id=str(i), sample=sample) for sample in range(samples)]
    return asked


def mixed(count: int, mean: float = 700, most: int = MOST) -> list[int]:
    """Log-normal lengths, the longest of which is the most."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(0, 0.9, count))
    lengths = np.clip(lengths * mean / lengths.mean(), 16, most).astype(int)
    lengths[rng.integers(count)] = most
    return lengths.tolist()


def caches(engine: Engine) -> int:
    """Bytes of the caches of target and drafter."""
    state = engine.batch.state
    return size_in_bytes((state.target_cache, state.draft))


def memory(target: Any, _: Any) -> None:
    """The peak of a job of 192 requests in 64 rows, without a drafter."""
    lengths = mixed(192)
    for tokens in (48 * 1024, 24 * 1024):
        engine = Engine(target, None, slots=64, max_length=MOST, cache_tokens=tokens)
        for request in requests(lengths):
            engine.submit(request)
        table, peak = engine.batch.pages, (0, 0, 0)
        assert table is not None
        while engine.busy or engine.waiting:
            engine.step()
            held = table.tokens - table.free
            rows = [row for _, row in engine._admission.taken]
            there = sum(min(row.filled, len(row.prompt)) + len(row.completion.token_ids) - row.read for row in rows)
            peak = max(peak, (there, held, len(rows)))
        there, held, rows = peak
        alone = Engine(target, None, slots=1, max_length=MOST)
        of_token = caches(alone) / MOST
        print(
            f"{tokens} tokens: at the peak {there} tokens of {rows} rows; pages of {held / there:.3f} and caches of "
            f"{caches(engine) / there / of_token:.3f} times their bytes; {engine.stats.preempted} preempted; rows of "
            f"{MOST} in the same memory: {caches(engine) / caches(alone):.1f}"
        )


def speed(target: Any, drafter: Any, rounds: int = 3) -> None:
    """Tokens a second of whole jobs, as ratios."""
    jobs = {
        "lengths that differ": (requests(mixed(300, 60, 1024)), {"max_length": 1024}),
        "alike": (requests([160] * 100), {"max_length": 160}),
    }
    for name, (asked, given) in jobs.items():
        for slots in (8, 16):
            settings: dict[str, Any] = {"slots": slots, "block_size": "auto", **given}
            whole = -(-given["max_length"] // PAGE) * PAGE
            shared = slots * whole if name == "alike" else slots * PAGE + whole
            engines = {"alone": Engine(target, drafter, **settings)}
            engines["shared"] = Engine(target, drafter, cache_tokens=shared, **settings)
            seconds = {which: list[float]() for which in engines}
            for turn in range(rounds + 1):
                for which, engine in engines.items():
                    if not turn:
                        engine.warm_up()
                        continue
                    begin = time.perf_counter()
                    engine.generate(asked)
                    seconds[which].append(time.perf_counter() - begin)
            ratios = [a / b for a, b in zip(seconds["alone"], seconds["shared"], strict=True)]
            bytes_of = {which: caches(engine) for which, engine in engines.items()}
            print(
                f"{name}, {slots} rows: {statistics.median(ratios):.3f} times the tokens/s ({min(ratios):.3f} to "
                f"{max(ratios):.3f}) with {bytes_of['shared'] / bytes_of['alone']:.2f} times the memory"
            )


def samples(target: Any, drafter: Any) -> None:
    """The most pages that are used at a time."""
    engine = Engine(target, drafter, slots=8, max_length=4096, cache_tokens=8 * 4096, prefix_chunks=64)
    asked = requests([2048], prompt=2000 / 2048, samples=8)
    for request in asked:
        engine.submit(request)
    table, most = engine.batch.pages, 0
    assert table is not None
    while engine.busy or engine.waiting:
        engine.step()
        if all(not row.left for _, row in engine._admission.taken):  # all prompts are read
            most = max(most, (table.tokens - table.free) // table.pages.size)
    size = len(asked[0].prompt_token_ids)
    print(f"8 samples of {size} tokens and 48 new ones: {most} pages of {table.pages.size}; alone {-(-2048 // 128)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["memory", "speed", "samples"])
    what = parser.parse_args().what
    pair = random_pair(*small_pair(4, 2, 64, 32, 2 * MOST), dtype=jnp.float32)
    for name, measure in {"memory": memory, "speed": speed, "samples": samples}.items():
        if name in what:
            measure(*pair)


if __name__ == "__main__":
    main()
