"""`dflash-jax replay`: every answer of a finished job against the target, one token after the other; see `replay`."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from tyro.conf import Positional, arg

from dflash_jax.cli import MODEL, GenerationOptions, NamedModelOptions, check_least, log_to_stderr, optional
from dflash_jax.files import Json, read_json, read_json_lines, write_json
from dflash_jax.infer.interrupt import exit_status
from dflash_jax.infer.progress import counted, progress_bar
from dflash_jax.parsing import parse

if TYPE_CHECKING:
    from dflash_jax.infer.engine.replay import Replay
    from dflash_jax.infer.jobs.lines import Line
    from dflash_jax.target import Target

DESCRIPTION = """\
Checks the answers of a job: computes the target's own choice for every token, without a drafter, and compares. If two
tokens score almost the same, rounding may choose either: a near tie. Anything else is an error.

  example       dflash-jax replay answers.jsonl --input prompts.jsonl --target DIR

  exit status   0 every token is the target's choice or a near tie, 1 some token is neither, 2 unusable arguments or
                files, 130 interrupted
"""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of `dflash-jax replay`.

    Attributes:
        answers: output of a job, with its settings file beside it
        input: prompts of the job, as they were given to it
        max_samples: check the first N answers only
        json: write the results of every answer
    """

    answers: Annotated[Positional[str], arg(metavar="FILE.jsonl")]
    input: Annotated[tuple[str, ...], arg(metavar="FILE.jsonl [FILE.jsonl ...]")]
    models: Annotated[NamedModelOptions, MODEL]
    max_samples: Annotated[int | None, optional(int, "N", "all")] = None
    json: Annotated[str | None, optional(str, "FILE.json")] = None


class Checked(NamedTuple):
    """An answer and what its replay says."""

    id: str
    sample: int
    tokens: int
    replay: "Replay"

    @property
    def wrong(self) -> bool:
        """Whether rounding does not explain it."""
        return self.replay.mismatches > self.replay.near_ties


def main(argv: Sequence[str]) -> int:
    common = frozenset("answers input max_samples json target mesh dtype quantize".split())
    log_to_stderr()
    options = parse(ReplayOptions, argv, prog="dflash-jax replay", description=DESCRIPTION, common=common)
    return exit_status(lambda: _replayed(options))


def _replayed(options: ReplayOptions) -> int:
    check_least(options, max_samples=1)
    from dflash_jax.checkpoint.fingerprint import fingerprint
    from dflash_jax.infer.jobs.job_input import JobInput
    from dflash_jax.infer.jobs.journal import settings_path
    from dflash_jax.infer.jobs.records import record_id
    from dflash_jax.infer.jobs.tables import is_parquet
    from dflash_jax.loading import load

    table = Path(options.answers)
    path = table.with_name(f"{table.name}.jsonl") if is_parquet(options.answers) else table
    settings = read_json(settings_path(path))
    if missing := [
        name for name in ("target_fingerprint", "input_fingerprint", "stop_token_ids") if name not in settings
    ]:
        raise ValueError(f"{settings_path(path)} has no {missing[0]}; is {path} the output of a job?")
    loaded = load(options.models, _generation(settings), speculative=False)
    target = loaded.target.replace(cache_dtype=settings.get("cache_dtype"))
    if target.directory and fingerprint(target.directory) != settings["target_fingerprint"]:
        raise ValueError(f"{path} was made with another target, {settings.get('target')!s:.200}")
    defaults = replace(loaded.defaults, stop_token_ids=(), eos_token_ids=tuple(settings["stop_token_ids"]))
    own = frozenset(Path(os.path.realpath(one)) for one in (table, path, settings_path(path)))
    column = settings.get("prompt_column")
    with contextlib.closing(JobInput(options.input, loaded.text, defaults, own, prompt_column=column)) as lines:
        if lines.fingerprint != settings["input_fingerprint"]:
            raise ValueError(f"{path} was made with another input, of {settings.get('input')}")
        answers, skipped = dict[str, list[tuple[int, list[int]]]](), 0
        for _, (name, found) in read_json_lines(path, lambda record: (record_id(record), [*_answers(record)])):
            if options.max_samples is None or len(answers) < options.max_samples:
                answers |= {name: found} if found else {}
                skipped += not found
        checked = list[Checked]()
        with progress_bar(sum(map(len, answers.values())), "answer") as bar:
            for line in lines.lines(lambda index, name: name in answers):
                for sample, tokens in answers[str(line.id)] if not line.later else ():
                    checked.append(_check(target, line, sample, tokens, settings["seed"]))
                    bar.update()
                skipped += bool(line.later)
    if options.json:
        write_json(Path(options.json), [_figures(one) for one in checked])
    return _report(checked, skipped)


def _generation(settings: Json) -> GenerationOptions:
    """The options of the job that has these settings, as far as they are the requests' own."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "chat_template_kwargs")
    return GenerationOptions(**{name: settings[name] for name in (*names, "tool_format") if name in settings})


def _answers(record: Json) -> Iterator[tuple[int, list[int]]]:
    """The answers of a record that can be replayed, by their samples: not those of errors, and of OpenAI's batches,
    which have no token ids."""
    if "error" not in record and "turns" not in record:
        for sample, answer in enumerate(record.get("samples") or [record]):
            if tokens := answer.get("token_ids"):
                yield sample, tokens


def _check(target: "Target", line: "Line", sample: int, tokens: Sequence[int], seed: int) -> Checked:
    from dflash_jax.infer.engine.replay import replay

    request = line.request
    assert request is not None
    asked = target, request.prompt_token_ids, tokens, request.params
    found = replay(*asked, seed=seed, request_id=request.id, sample=sample)
    return Checked(str(line.id), sample, len(tokens), found)


def _figures(one: Checked) -> Json:
    return {"id": one.id, "sample": one.sample, "tokens": one.tokens, **one.replay._asdict()}


def _report(checked: Sequence[Checked], skipped: int) -> int:
    """Prints what was found; returns the exit status."""
    wrong = [one for one in checked if one.wrong]
    for one in wrong[:10]:
        print(
            f"{one.id}, sample {one.sample}: token {one.replay.worst_index} is {one.replay.worst_gap:.3g} below the "
            "target's choice"
        )
    tokens, ties = sum(one.tokens for one in checked), sum(one.replay.near_ties for one in checked)
    more = f"; {counted(skipped, 'record')} without an answer that can be replayed" if skipped else ""
    found = counted(len(checked), "answer"), counted(tokens, "token"), counted(ties, "near tie")
    print(f"{found[0]}, {found[1]}: {found[2]}, {counted(len(wrong), 'answer')} with errors{more}")
    if not checked:
        raise ValueError("no answer could be replayed")
    return 1 if wrong else 0
