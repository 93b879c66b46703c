"""Trains drafters: `python -m dflash_jax.train STAGE ...`."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.cli import add_generation_arguments, add_mesh_argument, add_model_arguments, progress_bar
from dflash_jax.train.config import TrainConfig, make_config, read_settings

EPILOG = """\
stages
  regenerate      the target answers prompts itself      prompts.jsonl -> answers.jsonl
  cache-features  writes its features once (optional)    answers.jsonl -> features/
  fit             trains; continues a run it finds       answers.jsonl -> run/
  evaluate        tau and speedup by real decoding       run/ or drafter, prompts.jsonl
  export          a Hugging Face directory               run/ -> drafter/
  plot            loss and tau over the steps            run/ -> plot.png
  pair            the bundled pair, from text on         nothing -> directory/pair/
  ablate          the paper's ablations on that pair     directory/ -> results.jsonl
exit status   0 done, 1 stopped on the way (what is done is kept), 2 unusable arguments or files
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.train",
        description="Trains a DFlash drafter for a target.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    stage = stages.add_parser("regenerate", help="answer prompts with the target")
    stage.add_argument("--input", required=True, metavar="FILE.jsonl", help="prompts, in every form `serve` takes")
    stage.add_argument("--output", required=True, metavar="FILE.jsonl", help="answers; continued if it exists")
    stage.add_argument("--seed", type=int, default=0, help="sampling noise (default 0)")
    stage.add_argument("--max-length", type=int, help="prompt and answer tokens per row")
    add_model_arguments(stage, bundled=False)
    add_generation_arguments(stage)
    stage.set_defaults(max_new_tokens=2048)

    stage = stages.add_parser("cache-features", help="write the target's features once")
    stage.add_argument("--out", required=True, metavar="DIR", help="feature cache; continued if it is there")
    stage.add_argument("--hidden", action="store_true", help="also what kl and total_variation need")
    _add_data_arguments(stage)

    stage = stages.add_parser("fit", help="train, or continue a run")
    stage.add_argument("--out", required=True, metavar="DIR", help="the run; continued if it is there")
    stage.add_argument("--features", metavar="DIR", help="a feature cache, instead of computing features online")
    stage.add_argument("--eval-prompts", metavar="FILE.jsonl", help="held-out prompts; decoded to choose `best`")
    stage.add_argument("--tensorboard", metavar="DIR", help="also log there")
    _add_data_arguments(stage)

    stage = stages.add_parser("evaluate", help="decode held-out prompts")
    stage.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="held-out prompts")
    stage.add_argument("--run", metavar="DIR", help="a run's `best`, else its newest checkpoint, instead of --drafter")
    stage.add_argument("--step", type=int, help="a checkpoint of the run instead")
    stage.add_argument("--max-samples", type=int, help="the first so many prompts")
    stage.add_argument("--json", metavar="FILE", help="write all figures")
    add_model_arguments(stage, bundled=False)
    add_generation_arguments(stage)

    stage = stages.add_parser("export", help="write a drafter for this package, dflash, vLLM and SGLang")
    stage.add_argument("--run", required=True, metavar="DIR", help="made by fit")
    stage.add_argument("--step", type=int, help="checkpoint (default: `best` if the run was evaluated, else newest)")
    stage.add_argument("--out", required=True, metavar="DIR", help="a new directory")
    stage.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 (default) or float16")

    stage = stages.add_parser("plot", help="draw loss and tau")
    stage.add_argument("--run", required=True, metavar="DIR", help="made by fit")
    stage.add_argument("--out", required=True, metavar="FILE.png")

    stage = stages.add_parser("pair", help="make the bundled pair")
    stage.add_argument("--out", required=True, metavar="DIR", help="all stages' results; continued if it is there")

    stage = stages.add_parser("ablate", help="train and decode one drafter per row of the table")
    stage.add_argument(
        "--pair", metavar="DIR", help="made by pair (default: the bundled pair, whose answers are made first)"
    )
    stage.add_argument("--out", required=True, metavar="DIR", help="runs and results.jsonl; continued if it is there")
    stage.add_argument("--rows", metavar="A;B", help="names of rows (default: all)")
    stage.add_argument("--steps", type=int, default=300, help="of each row (default 300)")
    stage.add_argument("--samples", type=int, default=64, help="held-out problems to decode (default 64)")
    return parser


def _add_data_arguments(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--target", required=True, metavar="DIR|ID", help="target checkpoint")
    stage.add_argument("--data", required=True, metavar="FILE.jsonl", help="made by regenerate")
    stage.add_argument("--config", metavar="FILE", help="YAML or JSON of settings")
    add_mesh_argument(stage, "rows and parameters over all of them")
    stage.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,I/N",
        help="this is process I (from 0) of N that train together, with the first at HOST:PORT; without a value as the "
        "environment says (TPU pods, Slurm)",
    )
    stage.add_argument("--init-from", metavar="DIR|ID", help="continue from a published drafter")
    settings = stage.add_argument_group("settings (the paper's recipe by default; they win over --config)")
    texts = _attribute_texts()
    for field in dataclasses.fields(TrainConfig):
        default = "" if field.default in ((), None) else f" (default {field.default})"
        text = (texts[field.name] + default).replace("%", "%%")
        settings.add_argument("--" + field.name.replace("_", "-"), metavar="X", help=text)


def _attribute_texts() -> dict[str, str]:
    """What the docstring of `TrainConfig` says of each setting."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (TrainConfig.__doc__ or "").split("Attributes:")[-1].splitlines():
        named = re.match(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if named:
            names = named[1].split(", ")
        for name in names:
            texts[name] = (texts.get(name, "") + " " + (named[2] if named else line.strip())).strip()
    return texts


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
        from dflash_jax.sharding import join

        join(args.distributed)
    from dflash_jax.cli import choose_mesh, enable_compilation_cache

    enable_compilation_cache()
    from dflash_jax.checkpoint import read_json, resolve
    from dflash_jax.drafter import load_drafter
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
            max_new_tokens=config.evaluate_max_new_tokens,
            temperature=config.evaluate_temperature,
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
    from dflash_jax.drafter import load_drafter
    from dflash_jax.sampling import check_sampling
    from dflash_jax.target import load_target
    from dflash_jax.train.evaluate import evaluate, read_prompts
    from dflash_jax.train.fit import load_run

    check_sampling(args.temperature, args.top_p, args.top_k, args.min_p)
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
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
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
    from dflash_jax.checkpoint import parse_dtype
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
    from dflash_jax.train.pair import Recipe, build

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
    from dflash_jax.train.ablations import ROWS, ablate

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
