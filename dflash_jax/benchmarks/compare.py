"""What a benchmark measures: engines that take turns on the same requests."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy

from dflash_jax.benchmarks.experts import experts_hit
from dflash_jax.benchmarks.official import Official
from dflash_jax.benchmarks.step_times import StepTimes, samples_due
from dflash_jax.benchmarks.turns import side_by_side
from dflash_jax.infer.engine.chooser import block_sizes
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs.records import acceptance_summary


def compare(
    engines: dict[str, Engine], requests: Sequence[Request], official: Official | None, length: int
) -> tuple[dict[str, Any], dict[str, list[Completion]]]:
    """Runs every engine on every batch of requests in turn; returns figures, and each engine's answers.

    All are warmed up first. Tokens per second count tokens committed by steps over decode wall time, prefill
    excluded. The parts of a step (`StepTimes`, at `length` committed positions) take their turns between the
    batches, so that what else the machine does weighs on all alike.
    """
    target, widths = engines["speculative"].target, block_sizes(engines["speculative"].block_size)
    experts = any(layer.experts for layer in target.config.layers)
    steps = StepTimes(engines["autoregressive"], engines["speculative"], length, widths=widths[1:-1] if experts else ())
    for engine in engines.values():
        if not engine.choosers:
            engine.warm_up()
        engine.generate(requests[: engine.slots])
        engine.stats.reset()
    opponent = _Opponent(official, engines["speculative"].block_size) if official else None
    answers: dict[str, list[Completion]] = {name: [] for name in engines}
    size = engines["speculative"].slots
    starts = range(0, len(requests), size)
    for turn, start in enumerate(starts):
        batch = requests[start : start + size]
        for name, engine in engines.items():
            answers[name] += engine.generate(batch)
        for _ in range(samples_due(turn, len(starts))):
            steps.sample()
        if opponent:
            opponent.run(batch)
    if not all(engine.stats.decode_tokens for engine in engines.values()):
        raise ValueError("nothing was decoded: every answer ended with its first token; raise max_new_tokens")
    figures: dict[str, Any] = {name: _side(engine, answers[name]) for name, engine in engines.items()}
    speculative, plain = figures["speculative"], figures["autoregressive"]
    lengths = Counter(n for completion in answers["speculative"] for n in completion.acceptance_lengths)
    figures |= acceptance_summary(lengths, engines["speculative"].width)
    figures["speedup"] = speculative["tokens_per_second"] / plain["tokens_per_second"]
    figures["equal_outputs"] = sum(
        a.token_ids == b.token_ids for a, b in zip(answers["speculative"], answers["autoregressive"], strict=True)
    )
    for name in answers:
        if name not in ("speculative", "autoregressive"):
            figures[name]["tau_ratio"], figures[name]["tau_ratio_at_least"] = tau_ratio(
                answers["speculative"], answers[name]
            )
    seconds = steps.seconds()
    figures["step_seconds"], figures["step_length"] = seconds, length
    figures["device_loop_share"] = {
        name: engines[name].stats.steps * seconds[name] / engines[name].stats.decode_seconds
        for name in ("autoregressive", "speculative")
    }
    figures["fused_step_over_parts"] = steps.fused_over_parts()
    if experts:
        texts = zip(
            (r.prompt_token_ids for r in requests), (done.token_ids for done in answers["speculative"]), strict=True
        )
        figures["experts_hit"] = experts_hit(target, list(texts), widths)
    if opponent:
        figures |= opponent.figures(answers["speculative"], speculative, plain)
    return figures, answers


def tau_ratio(ours: Sequence[Completion], theirs: Sequence[Completion]) -> tuple[float, float]:
    """The ratio of two mean acceptance lengths over the same prompts, and its one-sided 95% lower bound; prompts are
    what is drawn by chance."""
    shares = []
    means = []
    for answers in (ours, theirs):
        steps = np.array([len(answer.acceptance_lengths) for answer in answers], float)
        tokens = np.array([sum(answer.acceptance_lengths) for answer in answers], float)
        means.append(tokens.sum() / steps.sum())
        shares.append(tokens / tokens.sum() - steps / steps.sum())  # what each prompt adds to log tau
    apart, ratio = shares[0] - shares[1], means[0] / means[1]
    if len(ours) < 2:
        return ratio, float("nan")
    error = np.sqrt(np.sum(apart**2) * len(ours) / (len(ours) - 1))
    return float(ratio), float(ratio * np.exp(-scipy.stats.norm.ppf(0.95) * error))


def compare_jobs(
    engines: dict[str, Engine], requests: Sequence[Request], rounds: int, official: Official | None, block_size: int
) -> dict[str, dict[str, Any]]:
    """Throughput of whole jobs, prompts included: in every round each engine answers all requests once, side by side.

    Args:
        official: answers them one at a time, with this block size, after the others.

    Returns:
        Per engine the tokens per second over all rounds, their ratio to the first engine's in the same round
        (geometric mean), the lower end of its one-sided 95% confidence interval, and the steps at each block size.
    """
    for engine in engines.values():
        if not engine.choosers:
            engine.warm_up()
        engine.generate(requests[: engine.slots])
        engine.stats.reset()

    def answer(r: Request) -> list[int]:
        assert official is not None
        return official.dflash(r.prompt_token_ids, r.params.max_new_tokens, r.params.ends, block_size)[0]

    if official:
        answer(requests[0])
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        round_rates = {name: turns.tokens_per_second for name, turns in side_by_side(engines, requests).items()}
        if official:
            begin = time.perf_counter()
            tokens = sum(map(len, map(answer, requests)))
            round_rates["official, one at a time"] = tokens / (time.perf_counter() - begin)
        for name, rate in round_rates.items():
            rates.setdefault(name, []).append(rate)
    first = np.log(next(iter(rates.values())))
    figures: dict[str, dict[str, Any]] = {}
    for name, measured in rates.items():
        ratio = np.log(measured) - first
        error = scipy.stats.t.ppf(0.95, rounds - 1) * scipy.stats.sem(ratio) if rounds > 1 else float("nan")
        figures[name] = {
            "tokens_per_second": float(np.mean(measured)),
            "ratio": float(np.exp(ratio.mean())),
            "lower_bound": float(np.exp(ratio.mean() - error)),
        }
        if engine := engines.get(name):
            used = engine.steps_by_block_size
            figures[name] |= {"tau": engine.stats.tau, "steps_by_block_size": used}
    return figures


def _side(engine: Engine, answers: list[Completion]) -> dict[str, Any]:
    stats = engine.stats
    lengths = [n for completion in answers for n in completion.acceptance_lengths]
    return {
        "tokens_per_second": stats.tokens_per_second,
        "tokens": stats.decode_tokens,
        "decode_seconds": stats.decode_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "steps": stats.steps,
        "tau": sum(lengths) / len(lengths) if lengths else None,
    }


class _Opponent:
    """Tallies the official implementation and transformers' generate."""

    def __init__(self, official: Official, block_size: int):
        self.official, self.block_size = official, block_size
        self.tokens: list[list[int]] = []
        self.lengths: list[int] = []
        self.seconds = self.generate_seconds = 0.0
        self.generate_tokens = 0
        self.warm = False

    def run(self, batch: Sequence[Request]) -> None:
        for request in batch:
            arguments = (request.prompt_token_ids, request.params.max_new_tokens, request.params.ends)
            if not self.warm:
                self.official.dflash(*arguments, self.block_size)
                self.official.generate(*arguments)
                self.warm = True
            tokens, lengths, seconds = self.official.dflash(*arguments, self.block_size)
            self.tokens.append(tokens)
            self.lengths += lengths
            self.seconds += seconds
            tokens, seconds = self.official.generate(*arguments)
            self.generate_tokens += len(tokens)
            self.generate_seconds += seconds
        time.sleep(0.5)  # its worker threads spin for a while after the last product

    def figures(self, ours: list[Completion], speculative: dict, plain: dict) -> dict[str, Any]:
        def side(tokens: int, seconds: float, rival: dict) -> dict[str, Any]:
            rate = tokens / seconds
            return {
                "tokens_per_second": rate,
                "tokens": tokens,
                "decode_seconds": seconds,
                "speedup_over": rival["tokens_per_second"] / rate,
            }

        official = side(sum(map(len, self.tokens)), self.seconds, speculative)
        official["tau"] = sum(self.lengths) / max(len(self.lengths), 1)
        official["equal_outputs"] = sum(a.token_ids == b for a, b in zip(ours, self.tokens, strict=True))
        return {
            "official": official,
            "transformers": side(self.generate_tokens, self.generate_seconds, plain),
        }
