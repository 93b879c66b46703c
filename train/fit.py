"""The stage `fit`: trains a drafter, or continues a run."""

import contextlib
import importlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.progress import duration, progress_bar
from dflash_jax.target import Target
from dflash_jax.train.arguments import FitOptions, settings_given
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.evaluate import evaluate, read_prompts
from dflash_jax.train.features import FeatureCache
from dflash_jax.train.metrics import Metrics
from dflash_jax.train.opening import open_run
from dflash_jax.train.prepare import prepare
from dflash_jax.train.run import Judge, Run

# Of the metrics: what each is called, and its format.
SHOWN = {
    "loss": ("loss", ".3f"),
    "teacher_forced_tau": ("tau (teacher-forced)", ".3f"),
    "tau": ("tau (decoded)", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "labels_per_second": ("labels/s", ",.0f"),
    "share_of_peak": ("of the chip's operations", ".1%"),
}


def main(options: FitOptions) -> int:
    """Runs the stage; returns its exit status."""
    config, target, data, drafter, raw = prepare(options.source, settings_given(options.settings))
    features = None
    if options.features:
        hidden = config.losses.distill or drafter.needs_target_logits
        features = FeatureCache(options.features, target, drafter.taps, data.examples, hidden)
    judge = _judge(options, target, config)
    run = open_run(options.output, target, drafter, raw, data.examples, config, features=features, evaluate=judge)
    print(ahead(run), file=sys.stderr)
    with _logs(options, config) as logs:
        _train(run, logs)
    print(outcome(run))
    return 0


def ahead(run: Run) -> str:
    """What the run will take, in words."""
    config, done = run.config, int(run.state.step)
    left = run.steps - done
    if not left:
        return f"all {run.steps:,} steps are done"
    epochs = left * config.batch_size / run.packing.rows_of_an_epoch
    return (
        f"{f'{done:,} of {run.steps:,} steps are done; ' if done else ''}"
        f"{left:,} optimizer steps of {config.batch_size} sequences of {config.length:,} tokens: "
        f"{left * config.batch_size * config.length:,} tokens, {epochs:.3g} epochs"
    )


def outcome(run: Run) -> str:
    """What came of a run that has ended, and how it goes on, in words; `metrics.jsonl` has all figures."""
    lines = run.log.lines()
    parts = [f"{run.steps:,} steps done"]
    if losses := [line["loss"] for line in lines if line.get("loss") is not None]:
        parts.append(f"loss {losses[-1]:.3f}")
    if judged := [line for line in lines if line.get("tau") is not None]:
        best = max(judged, key=lambda line: (line["tau"], line["step"]))  # of equal ones the last is kept
        parts.append(f"best tau {best['tau']:.2f} on held-out prompts, after step {best['step']:,}")
    place = shlex.quote(str(run.directory))
    return f"{', '.join(parts)}; the run is in {place}\nnext: dflash-jax train export --run {place} --output DIR"


def _judge(options: FitOptions, target: Target, config: TrainConfig) -> Judge | None:
    """What decodes the held-out prompts, if there are any."""
    if not options.evaluate_prompts:
        if config.evaluate_every:
            raise ValueError("evaluate_every needs --evaluate-prompts FILE.jsonl")
        return None
    arguments = dict(options.chat_template_kwargs)
    requests = read_prompts(options.evaluate_prompts, target, config.evaluate_samples, arguments)
    params = SamplingParams(config.evaluate_max_new_tokens, config.evaluate_temperature)
    decode = partial(evaluate, target, requests=requests, params=params, block_size=config.block_size)
    return lambda drafter: decode(drafter) | {"chat_template_kwargs": arguments}


Log = Callable[[int, dict[str, float]], object]  # takes the metrics of a step


@contextlib.contextmanager
def _logs(options: FitOptions, config: TrainConfig) -> Iterator[list[Log]]:
    """Where else metrics go; raises ValueError for a tracker that is not installed."""
    logs, ends = list[Log](), contextlib.ExitStack()
    if options.tensorboard:
        from tensorboardX import SummaryWriter

        writer = ends.enter_context(SummaryWriter(options.tensorboard))
        logs.append(lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()])
    if options.tracker:
        try:
            tracker = importlib.import_module(options.tracker)
        except ImportError as error:
            raise ValueError(f"{error}; --tracker {options.tracker} needs pip install {options.tracker}") from error
        tracker.init(project="dflash_jax", name=Path(options.output).name, config=config.named())
        ends.callback(tracker.finish)
        logs.append(lambda step, values: tracker.log(values, step=step))
    with ends:
        yield logs


def _train(run: Run, logs: Sequence[Log]) -> None:
    """Trains to the end, with a progress bar. The time left follows from the steps after the first, which compiles."""
    begun = int(run.state.step)
    with progress_bar(run.steps, "step", done=begun, estimate=False) as bar:
        bar.set_postfix_str("compiling")

        def report(step: int, metrics: Metrics) -> None:
            shown = [f"{name} {metrics[k]:{how}}" for k, (name, how) in SHOWN.items() if metrics.get(k)]
            if (rate := metrics.get("steps_per_second")) and step < run.steps:
                shown.insert(0, f"{duration((run.steps - step) / rate)} left")
            bar.set_postfix_str(" ".join(shown), refresh=False)
            bar.update(step - bar.n)
            if step == begun + 2:
                bar.refresh()  # the first that knows how long is left
            values = {name: value for name, value in metrics.items() if isinstance(value, float)}
            for log in logs:
                log(step, values)

        run.fit(report)
