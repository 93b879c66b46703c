"""Batch generation: `python -m dflash_jax.serve --input FILE --output FILE [--target DIR --drafter DIR]`."""

import argparse
import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from dflash_jax.cli import (
    LOG_PAUSE,
    add_generation_arguments,
    add_model_arguments,
    engine_rates,
    load,
    make_engine,
    progress_bar,
    warm_up,
)

EPILOG = """\
input lines   {"id"?, "prompt": str} | {"id"?, "messages": [...]} | {"id"?, "prompt_token_ids": [...]} |
              {"id"?, "turns": [...]} (a conversation, turn by turn), with optional max_new_tokens,
              temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty,
              seed, n, logprobs (how many alternatives) and stop (string or list); or OpenAI batch lines
              {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body"}
output lines  {"id", "index", "text", "token_ids", "finish_reason", "usage", "speculation", "turns"?} or
              {"id", "index", "error": {"code", "message"}}; OpenAI batch output for batch lines
stopping      a job that was killed goes on with the same command; an interrupt finishes what is in
              progress, a second one stops at once
exit status   0 all lines answered, 1 some line has an error record, 2 unusable arguments or files,
              130 interrupted
"""


HTTP_LENGTH = 4096  # tokens of a row where --max-length does not say


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.serve",
        description="Lossless speculative generation for a file of prompts, or for one prompt to the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input",
        nargs="+",
        metavar="FILE.jsonl",
        help="prompts, one JSON object a line: files or globs, plain, .gz or .zst; - is standard input",
    )
    what.add_argument("--prompt", metavar="TEXT", help="stream the answer to one prompt to the terminal")
    what.add_argument("--http", metavar="HOST:PORT", help="serve OpenAI's HTTP interface (needs dflash-jax[server])")
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="answers, written as requests finish (needs --input); continued if it is there",
    )
    parser.add_argument("--force", action="store_true", help="continue an output that was made with other settings")
    parser.add_argument(
        "--stats-interval",
        type=float,
        metavar="SECONDS",
        help=f"print figures every so often (default: {LOG_PAUSE:.0f} where there is no terminal); 0 prints none",
    )
    parser.add_argument("--summary", metavar="FILE.json", help="write totals, tau and the acceptance histogram")
    parser.add_argument("--ordered", action="store_true", help="rewrite the output in input order at the end")
    parser.add_argument(
        "--processes",
        metavar="I/N",
        help="this is process I (from 0) of N that share job and storage: each answers every N-th line, the last one "
        "merges; any number of processes continues what others left",
    )
    add_model_arguments(parser)
    add_generation_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="noise of lines without a seed of their own (default 0)")
    parser.add_argument(
        "--max-length",
        type=int,
        help="prompt and answer tokens per row (default: what the longest line needs)",
    )
    http = parser.add_argument_group("with --http")
    http.add_argument("--api-key", metavar="KEY", help="bearer key that requests must carry (or DFLASH_API_KEY)")
    http.add_argument("--max-request-bytes", type=int, default=2**20, help="of a request body (default 1 MiB)")
    parser.add_argument(
        "--prefix-chunks",
        type=int,
        metavar="N",
        help="chunks of prompts (32 tokens where all prompts are short, else 256) to keep for those that begin alike "
        "(default: what is of use, in no more memory than the slots take); 0 keeps none",
    )
    parser.add_argument("--no-speculation", action="store_true", help="decode with the target alone")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it regrets the absence of torch, which nobody needs here
    try:
        if args.prompt is not None:
            return _answer(args)
        if args.http is not None:
            return _http(args)
        return _serve(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; the answers finished so far are in the output, and the same command continues",
            file=sys.stderr,
        )
        return 130


def _serve(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    if not args.output:
        raise ValueError("--input needs --output FILE.jsonl")
    from dflash_jax.infer import parts
    from dflash_jax.infer.interrupt import stop_signals
    from dflash_jax.infer.jobs import (
        Tally,
        answer_record,
        job_settings,
        record_id,
        rewrite_in_order,
        run_job,
        summarise,
    )
    from dflash_jax.infer.journal import Journal
    from dflash_jax.infer.lines import input_lines, input_paths, read_lines

    if args.block_size is None:
        args.block_size = "auto"
    output = Path(args.output)
    others = [Path(path) for path in (args.output, args.summary) if path]
    if len({path.resolve() for path in others}) < len(others):
        raise ValueError(f"--output and --summary are both {args.output}; choose two files")
    for path in others:  # before hours of work, not after
        for source in input_paths(args.input):
            if path.exists() and source != "-" and path.samefile(source):
                raise ValueError(f"{path} is the input; choose another file for the results")
        path.open("ab").close()
    process, processes = _share(args.processes)
    in_parts = processes > 1 or bool(parts.found_parts(output))
    pair, text, defaults = load(args)
    lines = read_lines(input_lines(args.input), text, defaults)
    known = {str(line.id) for line in lines}

    def key(record: dict[str, Any]) -> str:
        if (name := record_id(record)) not in known:
            raise ValueError(f"id {name!r:.60} is not in the input")
        return name

    noted = job_settings(pair[0], text, defaults, args.seed, args.max_length)
    written = parts.part_path(output, process, processes) if in_parts else output
    if in_parts and not args.force:
        parts.check_settings(output, noted)
    with Journal(written, noted, key, force=args.force) as journal, stop_signals() as stopping:
        mine = [line for i, line in enumerate(lines) if i % processes == process]
        done, failed = journal.done, journal.failed
        if in_parts:  # whoever answered a line of ours
            found = parts.answered(output)
            done = {str(line.id) for line in mine} & found.keys()
            failed = sum(bool(json.loads(found[name]).get("error")) for name in done)
        left = [line for line in mine if str(line.id) not in done]
        if done:
            print(f"{len(mine) - len(left)} lines are done, {len(left)} left", file=sys.stderr)
        tally = Tally()
        requests = [line.request for line in lines if line.request for _ in range(min(line.n, 2))]
        engine = make_engine(args, pair, requests, growing=any(line.later for line in lines))
        if left:
            warm_up(engine)
        report = _Reporter(engine, len(left), args.stats_interval)
        job = run_job(engine, left, partial(answer_record, text=text), text, admit=lambda: not stopping)
        for record, turns in job:
            if record is not None:
                journal.append(record)
                failed += bool(record.get("error"))
                for completion in turns:
                    tally.add(completion)
            report.update(record is not None)
        report.close()
    unfinished = len(left) - report.finished
    if in_parts and not unfinished and not parts.merge(output, lines):
        print("this process is done; the job is when the others are", file=sys.stderr)
    if args.ordered and not in_parts and not unfinished:
        rewrite_in_order(output, lines)
    if args.summary:
        wall = time.perf_counter() - begin
        summary = summarise(tally, len(lines), failed, engine.stats, engine.width, wall)
        summary |= {"resumed": len(done), "unfinished": unfinished}
        summary["steps_by_block_size"] = (
            engine.chooser.used if engine.chooser else {engine.block_size: engine.stats.steps}
        )
        summary |= {"process": process, "processes": processes}
        Path(f"{args.summary}.{process}" if processes > 1 else args.summary).write_text(
            json.dumps(summary, indent=2) + "\n", encoding="utf-8"
        )
    if unfinished:
        print(f"stopped; {unfinished} lines are left, which the same command continues with", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _share(text: str | None) -> tuple[int, int]:
    """Which of how many processes this is."""
    process, _, processes = (text or "0/1").partition("/")
    if not (process.isdecimal() and processes.isdecimal() and int(process) < int(processes)):
        raise ValueError(f"--processes must be I/N with I from 0 to N - 1, got {text!r}")
    return int(process), int(processes)


class _Reporter:
    """A bar on a terminal, and a line of figures every so many seconds if that is asked for, or in a log."""

    def __init__(self, engine: Any, total: int, interval: float | None):
        self._engine, self._last = engine, time.perf_counter()
        self._interval = LOG_PAUSE if interval is None and not sys.stderr.isatty() else interval
        self._bar = progress_bar(total, "request", in_logs=False)
        self.finished = 0

    def update(self, finished: bool) -> None:
        self.finished += finished
        self._bar.update(int(finished))
        self._bar.set_postfix_str(engine_rates(self._engine), refresh=False)
        now = time.perf_counter()
        if self._interval and now - self._last >= self._interval:
            self._last = now
            engine = self._engine
            line = (
                f"{self.finished}/{self._bar.total} done   {engine_rates(engine)}   slots {engine.busy}/{engine.slots}"
            )
            self._bar.write(f"{line}   waiting {engine.waiting}   memory {memory_mib():.0f} MiB", file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def memory_mib() -> float:
    """Memory in use: of the first device where it tells, else resident memory of this process."""
    import jax

    found = jax.devices()[0].memory_stats()
    if found and "bytes_in_use" in found:
        return found["bytes_in_use"] / 2**20
    with contextlib.suppress(OSError, IndexError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return float("nan")


def _answer(args: argparse.Namespace) -> int:
    if args.output or args.summary:
        raise ValueError("--prompt answers on the terminal; --output and --summary need --input")
    pair, text, defaults = load(args)
    from dflash_jax.infer.requests import Request

    if text.has_chat_template:
        tokens = text.encode_chat([{"role": "user", "content": args.prompt}])
    else:
        tokens = text.encode(args.prompt)
    request = Request(tokens, defaults, id="0")
    engine = make_engine(args, pair, [request])
    engine.check(request)
    engine.warm_up()
    shown, completion = "", None
    for _, completion in engine.stream([request]):
        answer = text.decode(completion.token_ids)
        if not completion.finish_reason:
            answer = answer.removesuffix("\ufffd")  # the rest of a character may still come
        print(answer[len(shown) :], end="", flush=True)
        shown = answer
    print()
    if completion is not None and completion.tau is not None:
        print(f"[{len(completion.token_ids)} tokens, {engine_rates(engine)}]", file=sys.stderr)
    return 0


def _http(args: argparse.Namespace) -> int:
    host, _, port = args.http.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--http must be HOST:PORT, got {args.http!r}")
    if args.output or args.summary:
        raise ValueError("--http answers over the network; --output and --summary need --input")
    try:
        import uvicorn

        from dflash_jax.infer.lines import MOST_ALTERNATIVES
        from dflash_jax.infer.server import Worker, make_app
    except ImportError as error:
        raise ValueError(f"{error}; the server needs more packages: pip install 'dflash-jax[server]'") from error
    if args.block_size is None:
        args.block_size = "auto"
    pair, text, defaults = load(args)
    if args.max_length is None:
        args.max_length = min(pair[0].config.max_position_embeddings or HTTP_LENGTH, HTTP_LENGTH)
    engine = make_engine(args, pair, [], logprobs=MOST_ALTERNATIVES, growing=True)
    warm_up(engine)
    worker = Worker(engine)
    app = make_app(
        worker,
        text,
        defaults,
        model=Path(pair[0].directory).name or "target",
        api_key=args.api_key or os.environ.get("DFLASH_API_KEY"),
        max_bytes=args.max_request_bytes,
    )
    worker.start()
    try:
        uvicorn.run(app, host=host.strip("[]"), port=int(port), log_level="info")
    finally:
        worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
