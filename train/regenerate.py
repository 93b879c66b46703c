"""Stage one: the target answers the prompts itself. No other choice matters as much (method, section 8)."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax import files
from dflash_jax.data.datasets import training_prompts
from dflash_jax.engines import engine_for, needs_of_lines
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.interrupt import stop_signals
from dflash_jax.infer.jobs.answering import Answering, job_settings
from dflash_jax.infer.jobs.journal import Journal
from dflash_jax.infer.jobs.lines import Line, read_lines
from dflash_jax.infer.progress import counted, engine_rates, progress_bar, warm_up
from dflash_jax.loading import load
from dflash_jax.train.arguments import RegenerateOptions


def answer_record(line: Line, turns: Sequence[Completion]) -> dict[str, Any]:
    """The output line of an answer: the token ids of prompt and answer, and the loss mask over both, 1 on every
    answer token, its end token included. If a drafter helped, also the tokens after which its blocks began."""
    assert line.request is not None
    prompt, answer = list(line.request.prompt_token_ids), turns[0].token_ids
    committed = turns[0].acceptance_lengths
    record = {
        "id": line.id,
        "index": line.index,
        "prompt_token_ids": prompt,
        "response_token_ids": answer,
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
        "finish_reason": turns[0].finish_reason,
    }
    if committed and sum(committed) == len(answer) - 1:
        record["anchors"] = np.cumsum([len(prompt), *committed[:-1]]).tolist()
    return record


def main(options: RegenerateOptions) -> int:
    """The stage `regenerate`; returns its exit status: 1 if some line has an error record."""
    generation, engine_options, models = options.generation, options.engine, options.models
    output = Path(options.output)
    files.check_writable(output)
    with training_prompts(options.input) as source:
        loaded = load(models, generation, speculative=bool(models.drafter))
        target, text, defaults = loaded.target, loaded.text, loaded.defaults
        lines = read_lines(source, text, defaults)
    fixed = engine_options.fixed(generation, models.drafter)
    more = engine_options.seed, engine_options.max_length, fixed, models.overrides, engine_options.cache_dtype
    settings = job_settings(target.directory, target.dtype.name, text, defaults, lines, *more)
    known = {line.index for line in lines}

    def index(record: dict[str, Any]) -> int:
        if record["index"] not in known:
            raise ValueError(f"index {record['index']!r:.60} is not in the input")
        return record["index"]

    keep = partial(Journal, output, settings, index, remedy="Remove it, or choose another output")
    with stop_signals() as stopping, keep(stopping=lambda: stopping) as answers:
        lines = [line for line in lines if line.index not in answers.done]
        if answers.done:
            print(f"{counted(len(answers.done), 'line')} done, {len(lines)} left", file=sys.stderr)
        if not lines:
            return 1 if answers.failed else 0
        needs = needs_of_lines(target.config, lines, engine_options)
        engine = engine_for(loaded, needs, generation, engine_options)
        cut, failed = _answer(engine, lines, answers, lambda: not stopping)
        if stopping:
            raise KeyboardInterrupt
    if cut:
        print(f"{cut} of {len(lines)} answers were cut at {generation.max_new_tokens} tokens", file=sys.stderr)
    if failed:
        print(f"{counted(failed, 'line')} with an error record", file=sys.stderr)
    return 1 if failed else 0


def _answer(engine: Engine, lines: Sequence[Line], answers: Journal, admit: Callable[[], bool]) -> tuple[int, int]:
    """Writes the records of the lines; returns how many answers were cut, and how many lines failed. `admit` says
    whether further lines are begun."""
    warm_up(engine, admit)
    failed = cut = 0
    with (
        progress_bar(len(lines), "answer") as bar,
        contextlib.closing(Answering(engine, answer_record).run(lines, admit)) as records,
    ):
        for record, _ in records:
            if record is not None:
                answers.append(record)
                failed += "error" in record
                cut += record.get("finish_reason") == "length"
                bar.update()
            bar.set_postfix_str(engine_rates(engine), refresh=False)
    return cut, failed
