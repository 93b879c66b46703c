"""Autoregressive against speculative decoding in one run: `python -m dflash_jax.benchmark`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_jax.cli import add_generation_arguments, add_model_arguments, load, make_engine, use_bundled_pair

PROBLEM_SEED = 2  # of the held-out problems; any other asks other questions


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.benchmark",
        description="Measures speedup, tau and the cost of a step; autoregressive and speculative decoding "
        "take turns on the same prompts, both warmed up.",
    )
    parser.add_argument(
        "--dataset",
        help="problems (held-out ones of the bundled pair, and its default), gsm8k (default for other targets), "
        "math500, aime25, humaneval, mbpp, livecodebench, mt-bench or a local FILE.jsonl",
    )
    parser.add_argument("--max-samples", type=int, default=24, help="prompts, after the official shuffle (default 24)")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="ROUNDS",
        help="instead: all prompts as one job, prefill included, that often, side by side without speculation, at each "
        "block size, with auto, and one prompt at a time; with --block-size, only without speculation and at that",
    )
    parser.add_argument(
        "--untrained", action="store_true", help="random weights in the drafter's place: nothing it proposes is right"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--seed", type=int, default=0, help="sampling noise (default 0)")
    parser.add_argument(
        "--official",
        action="store_true",
        help="also run the official torch implementation (greedy, batch 1, CPU)",
    )
    add_model_arguments(parser)
    add_generation_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.json:
            Path(args.json).open("ab").close()
        figures = measure(args)
        shown = job_table(figures) if args.jobs else table(figures)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shown)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; see `table` for what the figures mean."""
    if args.official and (args.temperature > 0 or (args.batch_size != 1 and not args.jobs)):
        raise ValueError("--official compares greedy decoding at batch size 1 only")
    if use_bundled_pair(args) and args.dataset is None:
        args.dataset = "problems"
    args.dataset = args.dataset or "gsm8k"
    samples, is_correct = questions(args.dataset, args.max_samples)
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs needs at least one round, got {args.jobs}")
    (target, drafter), text, defaults = load(args)
    if args.untrained:
        drafter = untrained(drafter)
    from dflash_jax.benchmarks.compare import compare, compare_jobs

    prompts = [
        text.encode_chat([{"role": "user", "content": question}]) if text.has_chat_template else text.encode(question)
        for question in samples
    ]
    from dflash_jax.infer.requests import Request

    requests = [Request(prompt, defaults, id=str(i)) for i, prompt in enumerate(prompts)]
    settings = {
        "dataset": args.dataset,
        "samples": len(requests),
        "temperature": args.temperature,
        "batch_size": args.batch_size,
        "max_new_tokens": args.max_new_tokens,
    }
    official = None
    if args.official:
        from dflash_jax.benchmarks.official import Official

        official = Official(target.directory, args.drafter)
    if args.jobs:
        from dflash_jax.infer.chooser import block_sizes

        def engine(block_size: int | str, **changes: Any) -> Any:
            pair = (target, None if block_size == 1 else drafter)
            return make_engine(argparse.Namespace(**vars(args) | {"block_size": block_size} | changes), pair, requests)

        sizes = (*block_sizes(drafter.config.block_size), "auto") if args.block_size is None else (1, args.block_size)
        names = {1: "autoregressive", "auto": "auto"}
        engines = {names.get(size, f"block {size}"): engine(size) for size in sizes}
        if args.batch_size > 1 and args.block_size is None:
            engines["one at a time, autoregressive"] = engine(1, batch_size=1)
            engines["one at a time"] = engine(drafter.config.block_size, batch_size=1)
        figures = compare_jobs(engines, requests, args.jobs, official, drafter.config.block_size)
        return settings | {"rounds": args.jobs, "engines": figures}
    engines = {
        "autoregressive": make_engine(args, (target, None), requests),
        "speculative": make_engine(args, (target, drafter), requests),
    }
    if args.temperature > 0 and args.proposals != "argmax":
        argmax = argparse.Namespace(**{**vars(args), "proposals": "argmax"})
        engines["argmax_proposals"] = make_engine(argmax, (target, drafter), requests)
    if engines["speculative"].drafter is None:
        raise ValueError(f"--block-size {args.block_size} proposes nothing; choose a larger one to compare")
    length = sum(map(len, prompts)) // len(prompts) + args.max_new_tokens // 2
    figures, answers = compare(engines, requests, official, length)
    if is_correct is not None:
        figures["correct"] = {
            name: sum(is_correct(i, text.decode(done.token_ids) or "") for i, done in enumerate(side))
            for name, side in answers.items()
        }
    return {
        **settings,
        "block_size": engines["speculative"].block_size,
        **figures,
    }


def untrained(drafter: Any) -> Any:
    """The drafter with random weights in the place of its matrices."""
    import jax

    leaves, tree = jax.tree.flatten(drafter.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = lambda x, key: jax.random.normal(key, x.shape, x.dtype) / x.shape[-1] ** 0.5 if x.ndim > 1 else x
    return drafter.replace(params=jax.tree.unflatten(tree, map(noise, leaves, keys)))


def questions(dataset: str, count: int) -> tuple[list[str], Callable[[int, str], bool] | None]:
    """First user turns of a dataset, and, for made problems, whether a text answers the i-th."""
    if dataset != "problems":
        from dflash_jax.benchmarks.datasets import load_dataset

        return [turns[0] for turns in load_dataset(dataset, count)], None
    from dflash_jax.train.toy.problems import is_correct, problems

    if count < 1:
        raise ValueError(f"max_samples must be at least 1, got {count}")
    chosen = list(islice(problems(PROBLEM_SEED, held_out=True), count))
    return [problem.question for problem in chosen], lambda i, text: is_correct(chosen[i], text)


def table(figures: dict[str, Any]) -> str:
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
        f"speedup {figures['speedup']:.2f}   tau {figures['tau']:.3f}   block size {figures['block_size']}   "
        f"equal outputs {figures['equal_outputs']}/{figures['samples']}",
        f"acceptance lengths   {histogram}",
        "acceptance per position   " + " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"]),
        f"step ms at length {figures['step_length']}   "
        + "   ".join(f"{name} {1e3 * value:.2f}" for name, value in seconds.items()),
        f"fused step / its parts {figures['fused_step_over_parts']:.3f}   steps x step time / decode time   "
        + "   ".join(f"{name} {share:.3f}" for name, share in figures["device_loop_share"].items()),
    ]
    if "correct" in figures:
        correct = "   ".join(f"{name} {count}" for name, count in figures["correct"].items())
        lines.append(f"correct answers of {figures['samples']}   {correct}")
    if "argmax_proposals" in figures:
        lines.append(f"tau with argmax proposals {figures['argmax_proposals']['tau']:.3f}")
    if "official" in figures:
        lines.append(
            f"speculative / official {figures['official']['speedup_over']:.2f}   autoregressive / transformers "
            f"{figures['transformers']['speedup_over']:.2f}   official tau {figures['official']['tau']:.3f}   "
            f"equal to official {figures['official']['equal_outputs']}/{figures['samples']}"
        )
    return "\n".join(lines)


def job_table(figures: dict[str, Any]) -> str:
    """The figures of `--jobs` as text."""
    what = f"{figures['samples']} prompts of {figures['dataset']}, {figures['batch_size']} at a time"
    lines = [
        f"{what}, {figures['rounds']} rounds",
        f"{'':32}{'tokens/s':>10}{'ratio':>8}{'at least':>10}{'tau':>7}   steps by block size",
    ]
    for name, side in figures["engines"].items():
        steps = " ".join(f"{size}:{count}" for size, count in side.get("steps_by_block_size", {}).items())
        lines.append(
            f"{name:32}{side['tokens_per_second']:10.1f}{side['ratio']:8.3f}{side['lower_bound']:10.3f}"
            f"{side.get('tau') or float('nan'):7.2f}   {steps}"
        )
    return "\n".join([*lines, "ratio: of tokens per second to the first line's, with its one-sided 95% bound"])


if __name__ == "__main__":
    sys.exit(main())
