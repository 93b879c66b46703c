"""A pair's engines take turns on the same prompts: `python -m dflash_jax.benchmark compare`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy

from dflash_jax.benchmarks.arguments import CompareOptions, Figures
from dflash_jax.benchmarks.cells import relative_error, tokens_and_steps
from dflash_jax.benchmarks.experts import experts_hit
from dflash_jax.benchmarks.official import Official, Opponent
from dflash_jax.benchmarks.pairs import ask
from dflash_jax.benchmarks.step_times import StepTimes, samples_due
from dflash_jax.benchmarks.turns import acceptance, warm_up
from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.infer.engine.chooser import Draft, block_sizes
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion, Request


def measure(options: CompareOptions) -> Figures:
    """The figures of `benchmark compare`; see `text` for what they mean."""
    generation, engine_options = options.generation, EngineOptions(seed=options.seed)
    if options.official and (generation.temperature > 0 or generation.rows != 1):
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
        raise ValueError(f"--block-size {generation.block_size} drafts no tokens; choose a larger one")
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
    found: dict[str, list[Completion]] = {category: [] for category in sorted(set(categories))}
    for category, answer in zip(categories, answers, strict=True):
        found[category].append(answer)
    return {name: {"samples": len(side), "tau": acceptance(side)["tau"]} for name, side in found.items()}


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
    warm_up(engines, requests)
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
    ours, theirs = answers["speculative"], answers["autoregressive"]
    figures |= acceptance(ours, engines["speculative"].width)
    figures["speedup"] = speculative["tokens_per_second"] / plain["tokens_per_second"]
    figures["equal_outputs"] = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))
    for name, side in answers.items():
        if name not in ("speculative", "autoregressive"):
            figures[name]["tau_ratio"], figures[name]["tau_ratio_at_least"] = tau_ratio(ours, side)
    seconds = steps.seconds()
    figures["step_seconds"], figures["step_length"] = seconds, length
    figures["device_loop_share"] = {
        name: engines[name].stats.steps * seconds[name] / engines[name].stats.decode_seconds
        for name in ("autoregressive", "speculative")
    }
    figures["fused_step_over_parts"] = steps.fused_over_parts()
    if experts:
        texts = [(r.prompt_token_ids, done.token_ids) for r, done in zip(requests, ours, strict=True)]
        figures["experts_hit"] = experts_hit(target, texts, widths)
    if opponent:
        figures |= opponent.figures(ours, speculative, plain)
    return figures, answers


def tau_ratio(ours: Sequence[Completion], theirs: Sequence[Completion]) -> tuple[float, float]:
    """The ratio of two mean acceptance lengths over the same prompts, and its one-sided 95% lower bound; prompts are
    what is drawn by chance."""
    (tokens, steps), (their_tokens, their_steps) = tokens_and_steps([ours]), tokens_and_steps([theirs])
    ratio = float(tokens.sum() / steps.sum() / (their_tokens.sum() / their_steps.sum()))
    error = relative_error([tokens, their_steps], [steps, their_tokens])
    return ratio, float(ratio * np.exp(-scipy.stats.norm.ppf(0.95) * error))


def _side(engine: Engine, answers: list[Completion]) -> Figures:
    stats = engine.stats
    return {
        "tokens_per_second": stats.tokens_per_second,
        "tokens": stats.decode_tokens,
        "decode_seconds": stats.decode_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "steps": stats.steps,
        "tau": acceptance(answers)["tau"],
    }


def text(figures: Figures) -> str:
    """The figures as text."""
    rows = [
        ("", "tokens/s", "tokens", "decode s"),
        *(
            (name, f"{side['tokens_per_second']:.1f}", str(side["tokens"]), f"{side['decode_seconds']:.2f}")
            for name, side in figures.items()
            if isinstance(side, dict) and "tokens_per_second" in side
        ),
    ]
    lines = ["  ".join([row[0].ljust(28), *(cell.rjust(10) for cell in row[1:])]) for row in rows]
    seconds = figures["step_seconds"]
    histogram = " ".join(f"{k}:{n}" for k, n in enumerate(figures["acceptance_histogram"]) if n)
    lines += [
        "",
        f"speedup {figures['speedup']:.2f}   tau {figures['tau']:.3f}   block {figures['draft']}   "
        f"equal outputs {figures['equal_outputs']}/{figures['samples']}",
        f"acceptance lengths   {histogram}",
        "acceptance per position   " + " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"]),
        f"step ms at length {figures['step_length']}   "
        + "   ".join(f"{name} {1e3 * value:.2f}" for name, value in seconds.items()),
        f"fused step / its parts {figures['fused_step_over_parts']:.3f}   steps x step time / decode time   "
        + "   ".join(f"{name} {share:.3f}" for name, share in figures["device_loop_share"].items()),
    ]
    if "experts_hit" in figures:
        hit = "   ".join(f"{width} tokens {count:.1f}" for width, count in figures["experts_hit"].items())
        lines.append(f"experts hit per layer by a block of   {hit}")
    if "acceptance_by_category" in figures:
        lines.append("tau by category")
        for category, found in figures["acceptance_by_category"].items():
            tau = "-" if found["tau"] is None else f"{found['tau']:.3f}"
            lines.append(f"  {category or '(none)':24}{tau:>8}   {found['samples']} samples")
    if "correct" in figures:
        correct = "   ".join(f"{name} {count}" for name, count in figures["correct"].items())
        lines.append(f"correct answers of {figures['samples']}   {correct}")
    for name, side in figures.items():
        if isinstance(side, dict) and "tau_ratio" in side:
            ratio = f"this run's is {side['tau_ratio']:.3f} of it (at least {side['tau_ratio_at_least']:.3f})"
            lines.append(f"tau with {name.replace('_', ' ')} {side['tau']:.3f}   {ratio}")
    if "official" in figures:
        lines.append(
            f"speculative / official {figures['official']['speedup_over']:.2f}   autoregressive / transformers "
            f"{figures['transformers']['speedup_over']:.2f}   official tau {figures['official']['tau']:.3f}   "
            f"equal to official {figures['official']['equal_outputs']}/{figures['samples']}"
        )
    return "\n".join(lines)
