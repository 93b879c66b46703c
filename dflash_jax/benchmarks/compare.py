"""A pair's engines take turns on the same prompts: `python -m dflash_jax.benchmark compare`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy

from dflash_jax.benchmarks import tables
from dflash_jax.benchmarks.arguments import CompareOptions, Figures
from dflash_jax.benchmarks.experts import experts_hit
from dflash_jax.benchmarks.official import Official, Opponent
from dflash_jax.benchmarks.pairs import ask
from dflash_jax.benchmarks.step_times import StepTimes, samples_due
from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.infer.engine.chooser import Draft, block_sizes
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs.records import acceptance_summary

text = tables.table


def measure(options: CompareOptions) -> Figures:
    """The figures of `benchmark compare`; see `tables` for what they mean.

    Raises:
        ValueError: an option is unusable, or nothing was decoded.
        OSError: a file cannot be read.
    """
    generation, engine_options = options.generation, EngineOptions(seed=options.seed)
    if options.official and (generation.temperature > 0 or generation.batch_size != 1):
        raise ValueError("--official compares greedy decoding at batch size 1 only")
    asked = ask(options)
    official = Official(asked.loaded.target.directory, asked.source) if options.official else None
    engines = {
        "autoregressive": asked.engine(generation, engine_options, speculative=False),
        "speculative": asked.engine(generation, engine_options),
    }
    for name, changed in _variants(generation).items():
        engines[name] = asked.engine(changed, engine_options)
    ours = engines["speculative"]
    if ours.drafter is None:
        raise ValueError(f"--block-size {generation.block_size} proposes nothing; choose a larger one to compare")
    prompts = [len(request.prompt_token_ids) for request in asked.requests]
    length = sum(prompts) // len(prompts) + generation.max_new_tokens // 2
    figures, answers = compare(engines, asked.requests, official, length)
    if asked.is_correct is not None:
        decode, is_correct = asked.loaded.text.decode, asked.is_correct
        figures["correct"] = {
            name: sum(is_correct(i, decode(done.token_ids) or "") for i, done in enumerate(side))
            for name, side in answers.items()
        }
    categories = [sample.category for sample in asked.samples]
    if any(categories):
        figures["acceptance_by_category"] = by_category(categories, answers["speculative"])
    draft = Draft(ours.block_size, ours.tree)
    return {**asked.settings, "block_size": draft.block_size, "tree": draft.nodes, "draft": draft.label, **figures}


def _variants(generation: GenerationOptions) -> dict[str, GenerationOptions]:
    """Other ways to propose, whose tau is compared with what was asked for."""
    kinds = ("argmax", "coupled") if generation.temperature > 0 else ()
    changed = {f"{kind}_proposals": replace(generation, proposals=kind) for kind in kinds}
    if generation.tree:
        chain = replace(generation, tree=0)
        changed["chain"] = chain
        changed |= {f"chain_{kind}_proposals": replace(chain, proposals=kind) for kind in kinds}
    asked = (generation.proposals, generation.tree)
    return {name: other for name, other in changed.items() if (other.proposals, other.tree) != asked}


def by_category(categories: Sequence[str], answers: Sequence[Completion]) -> dict[str, Figures]:
    """Samples and mean acceptance length of each kind of task."""
    found: dict[str, Figures] = {}
    for category in sorted(set(categories)):
        of_kind = [answer for answer, its in zip(answers, categories, strict=True) if its == category]
        lengths = [n for answer in of_kind for n in answer.acceptance_lengths]
        found[category] = {"samples": len(of_kind), "tau": sum(lengths) / len(lengths) if lengths else None}
    return found


def compare(
    engines: dict[str, Engine], requests: Sequence[Request], official: Official | None, length: int
) -> tuple[Figures, dict[str, list[Completion]]]:
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
    opponent = Opponent(official, engines["speculative"].block_size) if official else None
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
    figures: Figures = {name: _side(engine, answers[name]) for name, engine in engines.items()}
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


def _side(engine: Engine, answers: list[Completion]) -> Figures:
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
