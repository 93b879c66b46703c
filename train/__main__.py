"""Trains drafters: `python -m dflash_jax.train STAGE ...`."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax import files
from dflash_jax.cli import log_to_stderr
from dflash_jax.infer.interrupt import exit_quietly, exit_status, stop_signals
from dflash_jax.infer.progress import engine_rates, progress_bar, warm_up
from dflash_jax.train.arguments import (
    AblateOptions,
    CacheFeaturesOptions,
    DataOptions,
    EvaluateOptions,
    ExportOptions,
    FitOptions,
    PairOptions,
    PlotOptions,
    RegenerateOptions,
    parse_stage,
    settings_given,
)
from dflash_jax.train.config import NotFiniteError, StageError, TrainConfig, make_config, read_settings

if TYPE_CHECKING:
    from dflash_jax.drafters.base import Drafter
    from dflash_jax.target import Target
    from dflash_jax.train.data import Dataset


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_stage(argv)
    log_to_stderr()
    stages: dict[type, Callable[[Any], int]] = {
        RegenerateOptions: _regenerate,
        CacheFeaturesOptions: _cache_features,
        FitOptions: _fit,
        EvaluateOptions: _evaluate,
        ExportOptions: _export,
        PlotOptions: _plot,
        PairOptions: _pair,
        AblateOptions: _ablate,
    }

    def work() -> int:
        try:
            return stages[type(options)](options)
        except (NotFiniteError, StageError) as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 1

    continues = not isinstance(options, EvaluateOptions | ExportOptions | PlotOptions)
    return exit_status(
        work,
        interrupted=f"interrupted{'; the same command continues' if continues else ''}",
        packages="training needs more packages: pip install '.[train]' in the checkout",
    )


def _regenerate(options: RegenerateOptions) -> int:
    from dflash_jax.data.datasets import training_prompts
    from dflash_jax.engines import engine_for, needs_of_lines
    from dflash_jax.infer.jobs import job_settings, run_job
    from dflash_jax.infer.lines import read_lines
    from dflash_jax.loading import load
    from dflash_jax.train.regenerate import answer_record, journal

    generation, engine_options = options.generation, options.engine
    files.check_writable(Path(options.output))
    with training_prompts(options.input) as source:
        loaded = load(options.models, generation, speculative=bool(options.models.drafter))
        target, text, defaults = loaded.target, loaded.text, loaded.defaults
        lines = read_lines(source, text, defaults)
    fixed = engine_options.fixed(generation, options.models.drafter)
    seed, max_length = engine_options.seed, engine_options.max_length
    more = seed, max_length, fixed, options.models.overrides
    settings = job_settings(target.directory, target.dtype.name, text, defaults, lines, *more)
    with (
        stop_signals() as stopping,
        journal(Path(options.output), settings, lines, lambda: stopping) as output,
    ):
        admit = lambda: not stopping
        lines = [line for line in lines if line.index not in output.done]
        if output.done:
            print(f"{len(output.done)} lines are done, {len(lines)} left", file=sys.stderr)
        if not lines:
            return 1 if output.failed else 0
        engine = engine_for(loaded, needs_of_lines(target.config, lines, engine_options), generation, engine_options)
        warm_up(engine, admit)
        failed = cut = 0
        with (
            progress_bar(len(lines), "answer") as bar,
            contextlib.closing(run_job(engine, lines, answer_record, admit=admit)) as records,
        ):
            for record, _ in records:
                if record is not None:
                    output.append(record)
                    failed += "error" in record
                    cut += record.get("finish_reason") == "length"
                    bar.update()
                bar.set_postfix_str(engine_rates(engine), refresh=False)
        if stopping:
            raise KeyboardInterrupt
    if cut:
        print(f"{cut} of {len(lines)} answers were cut at {generation.max_new_tokens} tokens", file=sys.stderr)
    if failed:
        print(f"{failed} lines have an error record", file=sys.stderr)
    return 1 if failed else 0


class Prepared(NamedTuple):
    """What the stages that read training data begin with."""

    config: TrainConfig
    target: "Target"
    data: "Dataset"
    drafter: "Drafter"
    raw: dict[str, Any]  # the drafter's config.json


def _prepare(options: DataOptions, overrides: dict[str, Any]) -> Prepared:
    given = read_settings(options.config, overrides)
    make_config(given)  # complain before anything is loaded
    if options.distributed is not None:
        from dflash_jax.mesh import join

        join(options.distributed)
    from dflash_jax.loading import choose_mesh, enable_compilation_cache, target_config, use_kernels

    use_kernels(options.kernels)
    enable_compilation_cache()
    from dflash_jax.checkpoint import resolve
    from dflash_jax.drafters import kind_named, kind_of, laid_out
    from dflash_jax.drafters.config import with_mask_token
    from dflash_jax.drafters.loading import load_drafter, read_drafter_config
    from dflash_jax.target import load_target
    from dflash_jax.train.data import read_examples
    from dflash_jax.train.drafters import choose_mask_token, converted, frequent_tokens, new_drafter, with_block_size

    kind_named(given.get("drafter", "dflash"))
    started, raw = None, {}
    if options.init_from:
        depth = target_config(options.target, options.target_config).num_hidden_layers
        place = resolve(options.target, "target")
        where = {"num_target_layers": depth, "target": place, "overrides": options.drafter_config}
        started = load_drafter(options.init_from, dtype="float32", **where)
        raw = laid_out(read_drafter_config(options.init_from, options.drafter_config))
        raw = {"num_target_layers": depth, **with_mask_token(raw, place)}
        own = {"num_layers": started.config.num_hidden_layers, "target_layer_ids": list(started.taps)}
        own["mask_token_id"] = getattr(started.config, "mask_token_id", None)
        if fixed := [name for name in own if name in given]:
            raise ValueError(f"--init-from decides {', '.join(fixed)}; leave them out")
        given = {"block_size": started.config.block_size, "drafter": kind_of(raw)} | given | own
    config = make_config(given)
    mesh = choose_mesh(options.mesh, training=True)
    target = load_target(options.target, dtype=config.dtype, mesh=mesh, overrides=options.target_config)
    data = read_examples(options.data, config.length, target.config.vocab_size)
    print(
        f"{len(data.examples)} conversations; {data.cut} cut to {config.length} tokens, "
        f"{data.without_answer} without an answer to learn left out",
        file=sys.stderr,
    )
    if started is not None:
        started.config.check_pair(target.config)
        started, raw = converted(target, started, raw, config)
        return Prepared(config, target, data, *with_block_size(started, raw, config.block_size))
    mask = choose_mask_token(target, config.mask_token_id)
    vocabulary = frequent_tokens(data.examples, config.draft_vocab_size)
    return Prepared(config, target, data, *new_drafter(target, config, mask, vocabulary))


def _cache_features(options: CacheFeaturesOptions) -> int:
    config, target, data, drafter, _ = _prepare(options.source, settings_given(options.settings))
    from dflash_jax.train.features import write_features

    with progress_bar(len(data.examples), "conversation") as bar:
        done_so_far = write_features(
            options.output, target, drafter.taps, data.examples, config.length, hidden=options.hidden
        )
        for done in done_so_far:
            bar.update(done - bar.n)
    return 0


def _fit(options: FitOptions) -> int:
    config, target, data, drafter, raw = _prepare(options.source, settings_given(options.settings))
    from functools import partial

    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.train.evaluate import evaluate, read_prompts
    from dflash_jax.train.features import FeatureCache
    from dflash_jax.train.fit import Run

    features, evaluation = None, None
    if options.features:
        features = FeatureCache(options.features, target, drafter.taps, data.examples, config.losses.distill)
    if config.evaluate_every and not options.evaluate_prompts:
        raise ValueError("evaluate_every needs --evaluate-prompts FILE.jsonl")
    if options.evaluate_prompts:
        arguments = dict(options.chat_template_kwargs)
        requests = read_prompts(options.evaluate_prompts, target, config.evaluate_samples, arguments)
        params = SamplingParams(config.evaluate_max_new_tokens, config.evaluate_temperature)
        decode = partial(evaluate, target, requests=requests, params=params, block_size=config.block_size)
        evaluation = lambda drafter: decode(drafter) | {"chat_template_kwargs": arguments}
    run = Run(options.output, target, drafter, raw, data.examples, config, features=features, evaluate=evaluation)
    writer = None
    if options.tensorboard:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(options.tensorboard)
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


def _evaluate(options: EvaluateOptions) -> int:
    if bool(options.run) == bool(options.models.drafter):
        raise ValueError("give either --run or --drafter")
    if options.step is not None and not options.run:
        raise ValueError("--step needs --run")

    from dflash_jax.drafters.loading import load_drafter
    from dflash_jax.loading import choose_mesh, enable_compilation_cache, models_on_mesh, target_config, use_kernels
    from dflash_jax.mesh import spread
    from dflash_jax.sharding import shardings
    from dflash_jax.target import load_target
    from dflash_jax.train.drafters import cast
    from dflash_jax.train.evaluate import evaluate, read_prompts
    from dflash_jax.train.fit import load_run

    models, generation = options.models, options.generation
    params = generation.sampling()
    params.check()
    if options.json:
        files.check_writable(Path(options.json))
    if options.store_sharpness:
        if not models.drafter or not Path(models.drafter).is_dir():
            raise ValueError("--store-sharpness needs --drafter, a directory whose config.json it may change")
        if params.temperature == 0 or generation.proposals != "calibrated":
            raise ValueError("--store-sharpness needs a --temperature above 0, and --proposals calibrated")
    use_kernels(models.kernels)
    enable_compilation_cache()
    described = target_config(models.target, models.target_config)
    mesh = choose_mesh(models.mesh, models_on_mesh(models, described))
    target = load_target(models.target, dtype=models.dtype, mesh=mesh, overrides=models.target_config)
    if options.run:
        drafter, _ = load_run(options.run, options.step)
        drafter = drafter.replace(params=cast(drafter.params, target.dtype))
        if mesh is not None:
            drafter = spread(drafter, shardings(drafter, mesh)).replace(mesh=mesh)
    else:
        assert models.drafter
        where = {"num_target_layers": target.config.num_hidden_layers, "target": target.directory}
        drafter = load_drafter(models.drafter, dtype=models.dtype, mesh=mesh, overrides=models.drafter_config, **where)
    drafter.config.check_pair(target.config)
    figures = evaluate(
        target,
        drafter,
        read_prompts(options.prompts, target, options.max_samples, generation.chat_template_kwargs),
        params=params,
        block_size=generation.block_size,
        tree=generation.tree,
        proposals=generation.proposals,
        batch_size=generation.batch_size,
        baseline=True,
    )
    figures["chat_template_kwargs"] = dict(generation.chat_template_kwargs)
    rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"])
    print(f"tau {figures['tau']:.3f}   speedup {figures['speedup']:.2f}   over {figures['samples']} prompts")
    print(f"acceptance per position   {rates}")
    if options.json:
        files.write_json(Path(options.json), figures)
    if options.store_sharpness:
        from dflash_jax.train.drafters import store_sharpness

        store_sharpness(Path(models.drafter or ""), figures["proposal_sharpness"])
        print("sharpness by depth   " + " ".join(f"{c:g}" for c in figures["proposal_sharpness"]))
    return 0


def _export(options: ExportOptions) -> int:
    from dflash_jax.config import parse_dtype
    from dflash_jax.train.drafters import save_drafter
    from dflash_jax.train.fit import load_run

    if Path(options.output).exists():
        raise ValueError(f"{options.output} exists; choose a new directory")
    drafter, raw = load_run(options.run, options.step)
    save_drafter(options.output, drafter, raw, parse_dtype(options.dtype))
    print(f"wrote {options.output}")
    return 0


def _plot(options: PlotOptions) -> int:
    from dflash_jax.train.plot import plot

    plot(options.run, options.output)
    return 0


def _pair(options: PairOptions) -> int:
    from dflash_jax.train.toy.pair import Recipe, build

    recipe = Recipe()
    with progress_bar(recipe.pretrain["max_steps"], "step") as bar:

        def progress(step: int, steps: int, loss: float) -> None:
            bar.update(step - bar.n)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

        pair = build(options.output, recipe, main, progress)
    print(f"wrote {pair}")
    return 0


def _ablate(options: AblateOptions) -> int:
    from dflash_jax.loading import enable_compilation_cache
    from dflash_jax.train.plot import plot_ablations
    from dflash_jax.train.toy.ablations import ROWS, ablate, read_results

    enable_compilation_cache()
    names = [name.strip() for name in options.rows.split(";")] if options.rows else list(ROWS)

    def report(result: dict[str, Any]) -> None:
        print(
            f"{result['row']:22} decoded at {result['decoded_block']:2}   tau {result['tau']:.3f}   "
            f"per prompt {result['tau_mean_of_prompts']:.3f} +- {result['tau_deviation_over_prompts']:.3f}",
            flush=True,
        )

    ablate(options.output, options.pair, names, steps=options.steps, samples=options.samples, stage=main, report=report)
    if options.plot:
        results = read_results(Path(options.output) / "results.jsonl", options.steps, options.samples)
        plot_ablations(list(results), options.plot)
    return 0


if __name__ == "__main__":
    exit_quietly(main())
