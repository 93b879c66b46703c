"""Trains drafters: `python -m dflash_jax.train STAGE ...`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.cli import progress_bar
from dflash_jax.train.arguments import build_parser
from dflash_jax.train.config import TrainConfig, make_config, read_settings


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    stages = {
        "regenerate": _regenerate,
        "cache-features": _cache_features,
        "fit": _fit,
        "evaluate": _evaluate,
        "export": _export,
        "plot": _plot,
        "pair": _pair,
        "ablate": _ablate,
    }
    try:
        return stages[args.stage](args)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"error: {error}; training needs more packages: pip install 'dflash-jax[train]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "NotFiniteError":
            raise
        print(f"stopped: {error}", file=sys.stderr)
        return 1


def _regenerate(args: argparse.Namespace) -> int:
    from dflash_jax.cli import engine_rates, load, make_engine
    from dflash_jax.infer.interrupt import stop_signals
    from dflash_jax.infer.jobs import job_settings, run_job
    from dflash_jax.infer.lines import read_lines
    from dflash_jax.train.regenerate import answer_record, journal

    args.no_speculation = not args.drafter
    output = Path(args.output)
    with Path(args.input).open("rb") as source:
        pair, text, defaults = load(args)
        lines = read_lines(source, text, defaults)
    noted = job_settings(pair[0], text, defaults, args.seed, args.max_length)
    with journal(output, noted, lines) as book, stop_signals() as stopping:
        lines = [line for line in lines if line.index not in book.done]
        if book.done:
            print(f"{len(book.done)} lines are done, {len(lines)} left", file=sys.stderr)
        if not lines:
            return 1 if book.failed else 0
        engine = make_engine(args, pair, [line.request for line in lines if line.request])
        engine.warm_up()
        failed = cut = 0
        with progress_bar(len(lines), "answer") as bar:
            for record, _ in run_job(engine, lines, answer_record, admit=lambda: not stopping):
                if record is not None:
                    book.append(record)
                    failed += "error" in record
                    cut += record.get("finish_reason") == "length"
                    bar.update()
                bar.set_postfix_str(engine_rates(engine), refresh=False)
        if stopping:
            raise KeyboardInterrupt
    if cut:
        print(f"{cut} of {len(lines)} answers were cut at {args.max_new_tokens} tokens", file=sys.stderr)
    if failed:
        print(f"{failed} lines have an error record", file=sys.stderr)
    return 1 if failed else 0


def _prepare(args: argparse.Namespace) -> tuple[TrainConfig, Any, Any, Any, dict[str, Any]]:
    """(settings, target, dataset, drafter, its config.json)"""
    overrides = {}
    for field in dataclasses.fields(TrainConfig):
        given = getattr(args, field.name)
        if given is not None:
            import yaml

            overrides[field.name] = yaml.safe_load(given) if field.type is not str else given
    given = read_settings(args.config, overrides)
    make_config(given)  # complain before anything is loaded
    if args.distributed is not None:
        from dflash_jax.mesh import join

        join(args.distributed)
    from dflash_jax.cli import choose_mesh, enable_compilation_cache

    enable_compilation_cache()
    from dflash_jax.checkpoint import read_json, resolve
    from dflash_jax.drafters.dflash import load_drafter
    from dflash_jax.target import load_target
    from dflash_jax.train.data import read_examples
    from dflash_jax.train.drafters import choose_mask_token, new_drafter, with_block_size

    started, raw = None, {}
    if args.init_from:
        directory = resolve(args.init_from, "drafter")
        started, raw = load_drafter(directory, dtype="float32"), read_json(directory / "config.json")
        own = {
            "num_layers": started.config.num_hidden_layers,
            "target_layer_ids": list(started.taps),
            "mask_token_id": started.config.mask_token_id,
        }
        if fixed := [name for name in own if name in given]:
            raise ValueError(f"--init-from decides {', '.join(fixed)}; leave them out")
        given = {"block_size": started.config.block_size} | given | own
    config = make_config(given)
    target = load_target(args.target, dtype=config.dtype, mesh=choose_mesh(args.mesh, args.target, None, training=True))
    data = read_examples(args.data, config.length, target.config.vocab_size)
    print(
        f"{len(data.examples)} conversations; {data.cut} cut to {config.length} tokens, "
        f"{data.without_answer} without an answer to learn left out",
        file=sys.stderr,
    )
    if started is not None:
        started.config.check_pair(target.config)
        return config, target, data, *with_block_size(started, raw, config.block_size)
    mask = choose_mask_token(target, config.mask_token_id)
    return config, target, data, *new_drafter(target, config, mask)


def _cache_features(args: argparse.Namespace) -> int:
    config, target, data, drafter, _ = _prepare(args)
    from dflash_jax.train.features import write_features

    with progress_bar(len(data.examples), "conversation") as bar:
        for done in write_features(args.out, target, drafter.taps, data.examples, config.length, hidden=args.hidden):
            bar.update(done - bar.n)
    return 0


def _fit(args: argparse.Namespace) -> int:
    config, target, data, drafter, raw = _prepare(args)
    from functools import partial

    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.train.evaluate import evaluate, read_prompts
    from dflash_jax.train.features import FeatureCache
    from dflash_jax.train.fit import Run

    features, judge = None, None
    if args.features:
        distill = bool(config.kl or config.total_variation)
        features = FeatureCache(args.features, target, drafter.taps, data.examples, distill)
    if config.evaluate_every and not args.eval_prompts:
        raise ValueError("evaluate_every needs --eval-prompts FILE.jsonl")
    if args.eval_prompts:
        judge = partial(
            evaluate,
            target,
            requests=read_prompts(args.eval_prompts, target, config.evaluate_samples),
            params=SamplingParams(config.evaluate_max_new_tokens, config.evaluate_temperature),
            block_size=config.block_size,
        )
    run = Run(args.out, target, drafter, raw, data.examples, config, features=features, evaluate=judge)
    writer = None
    if args.tensorboard:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(args.tensorboard)
    with progress_bar(run.steps, "step") as bar:
        bar.update(int(run.state.step))

        def report(step: int, metrics: dict[str, Any]) -> None:
            bar.update(step - bar.n)
            shown = {"loss": "loss", "teacher_forced_tau": "tau (teacher-forced)", "tau": "tau (decoded)"}
            bar.set_postfix_str(
                " ".join(f"{shown[k]} {metrics[k]:.3f}" for k in shown if metrics.get(k)), refresh=False
            )
            if writer:
                for name, value in metrics.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, step)

        metrics = run.fit(report)
    if writer:
        writer.close()
    print(json.dumps({name: value for name, value in metrics.items() if isinstance(value, int | float)}))
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    if bool(args.run) == bool(args.drafter):
        raise ValueError("give either --run or --drafter")
    if args.step is not None and not args.run:
        raise ValueError("--step is of a --run")
    import jax

    from dflash_jax.cli import choose_mesh, enable_compilation_cache
    from dflash_jax.drafters.dflash import load_drafter
    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.target import load_target
    from dflash_jax.train.evaluate import evaluate, read_prompts
    from dflash_jax.train.fit import load_run

    params = SamplingParams(args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.min_p)
    params.check()
    enable_compilation_cache()
    mesh = choose_mesh(args.mesh, args.target, args.drafter)
    target = load_target(args.target, dtype=args.dtype, mesh=mesh)
    if args.run:
        drafter, _ = load_run(args.run, args.step)
        drafter = drafter.replace(params=jax.tree.map(lambda x: x.astype(target.dtype), drafter.params))
    else:
        drafter = load_drafter(args.drafter, dtype=args.dtype, mesh=mesh)
    drafter.config.check_pair(target.config)
    figures = evaluate(
        target,
        drafter,
        read_prompts(args.prompts, target, args.max_samples),
        params=params,
        block_size=args.block_size,
        proposals=args.proposals,
        batch_size=args.batch_size,
        baseline=True,
    )
    rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"])
    print(f"tau {figures['tau']:.3f}   speedup {figures['speedup']:.2f}   over {figures['samples']} prompts")
    print(f"acceptance per position   {rates}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _export(args: argparse.Namespace) -> int:
    from dflash_jax.config import parse_dtype
    from dflash_jax.train.drafters import save_drafter
    from dflash_jax.train.fit import load_run

    if Path(args.out).exists():
        raise ValueError(f"{args.out} exists; choose a new directory")
    drafter, raw = load_run(args.run, args.step)
    save_drafter(args.out, drafter, raw, parse_dtype(args.dtype))
    print(f"wrote {args.out}")
    return 0


def _plot(args: argparse.Namespace) -> int:
    from dflash_jax.train.plot import plot

    plot(args.run, args.out)
    return 0


def _pair(args: argparse.Namespace) -> int:
    from dflash_jax.train.toy.pair import Recipe, build

    recipe = Recipe()
    with progress_bar(recipe.pretrain["max_steps"], "step") as bar:

        def progress(step: int, steps: int, loss: float) -> None:
            bar.update(step - bar.n)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

        pair = build(args.out, recipe, main, progress)
    print(f"wrote {pair}")
    return 0


def _ablate(args: argparse.Namespace) -> int:
    from dflash_jax.cli import enable_compilation_cache
    from dflash_jax.train.toy.ablations import ROWS, ablate

    enable_compilation_cache()
    names = [name.strip() for name in args.rows.split(";")] if args.rows else list(ROWS)

    def report(result: dict[str, Any]) -> None:
        print(
            f"{result['row']:22} decoded at {result['decoded_block']:2}   tau {result['tau']:.3f}   "
            f"per prompt {result['tau_mean_of_prompts']:.3f} +- {result['tau_deviation_over_prompts']:.3f}",
            flush=True,
        )

    ablate(args.out, args.pair, names, steps=args.steps, samples=args.samples, stage=main, report=report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
