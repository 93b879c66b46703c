"""Batch generation: `python -m dflash_jax.serve --target DIR --drafter DIR --input FILE --output FILE`."""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

EPILOG = """\
input lines   {"id"?, "prompt": str} | {"id"?, "messages": [...]} | {"id"?, "prompt_token_ids": [...]} |
              {"id"?, "turns": [...]} (first turn), with optional max_new_tokens, temperature, top_p,
              top_k, seed and stop (string or list)
output lines  {"id", "index", "text", "token_ids", "finish_reason", "usage", "speculation"} or
              {"id", "index", "error": {"code", "message"}}
exit status   0 all lines answered, 1 some line has an error record, 2 unusable arguments or files
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.serve",
        description="Lossless speculative generation for a file of prompts, or for one prompt to the terminal.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", metavar="FILE.jsonl", help="prompts, one JSON object a line")
    what.add_argument("--prompt", metavar="TEXT", help="stream the answer to one prompt to the terminal")
    parser.add_argument("--output", metavar="FILE.jsonl", help="answers, written as requests finish (needs --input)")
    parser.add_argument("--summary", metavar="FILE.json", help="write totals, tau and the acceptance histogram")
    parser.add_argument("--ordered", action="store_true", help="rewrite the output in input order at the end")
    add_model_arguments(parser)
    add_generation_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="noise of lines without a seed of their own (default 0)")
    parser.add_argument(
        "--max-length",
        type=int,
        help="prompt and answer tokens per row (default: what the longest line needs)",
    )
    parser.add_argument("--no-speculation", action="store_true", help="decode with the target alone")
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that loads a pair."""
    parser.add_argument("--target", required=True, metavar="DIR|ID", help="target checkpoint: directory or hub id")
    parser.add_argument("--drafter", metavar="DIR|ID", help="its DFlash drafter")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16; auto: float32 on CPU, else bfloat16"
    )


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that generates."""
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per answer (default 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="in (0, 1]; 1 keeps every token (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps every token (default)")
    parser.add_argument("--block-size", type=int, help="draft slots per step, up to the checkpoint's (default)")
    parser.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default 1)")
    parser.add_argument(
        "--proposals",
        choices=("coupled", "argmax", "independent"),
        default="coupled",
        help="how the drafter picks tokens at temperature > 0; never changes the answers",
    )


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.prompt is not None:
            return _answer(args)
        return _serve(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the answers finished so far are in the output", file=sys.stderr)
        return 130


def _serve(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    if not args.output:
        raise ValueError("--input needs --output FILE.jsonl")
    outputs = [Path(path) for path in (args.output, args.summary) if path]
    with Path(args.input).open("rb") as source:
        if len({path.resolve() for path in outputs}) < len(outputs):
            raise ValueError(f"--output and --summary are both {args.output}; choose two files")
        for path in outputs:  # before hours of work, not after
            if path.exists() and path.samefile(args.input):
                raise ValueError(f"{path} is the input; choose another file for the results")
            path.open("ab").close()
        pair, text, defaults = load(args)
        from dflash_jax.infer.jobs import answer_record, read_lines, rewrite_in_order, run_job, summarise

        lines = read_lines(source, text, defaults)
    engine = make_engine(args, pair, [line.request for line in lines if line.request])
    engine.warm_up()
    completions, failed = [], 0
    with progress_bar(len(lines), "request") as bar, Path(args.output).open("w", encoding="utf-8") as sink:
        for record, completion in run_job(engine, lines, partial(answer_record, text=text)):
            if record is not None:
                sink.write(json.dumps(record, ensure_ascii=False) + "\n")
                sink.flush()
                failed += "error" in record
                if completion:
                    completions.append(completion)
                bar.update()
            bar.set_postfix_str(engine_rates(engine))
    if args.ordered:
        rewrite_in_order(Path(args.output))
    if args.summary:
        summary = summarise(completions, failed, engine.stats, engine.width, time.perf_counter() - begin)
        Path(args.summary).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _answer(args: argparse.Namespace) -> int:
    if args.output or args.summary:
        raise ValueError("--prompt answers on the terminal; --output and --summary need --input")
    pair, text, defaults = load(args)
    from dataclasses import replace

    if text.has_chat_template:
        tokens = text.encode_chat([{"role": "user", "content": args.prompt}])
    else:
        tokens = text.encode(args.prompt)
    request = replace(defaults, prompt_token_ids=tokens, id="0")
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


def load(args: argparse.Namespace) -> tuple[tuple[Any, Any], Any, Any]:
    """Loads what the arguments name: (target, drafter or None), text, and the defaults of a request."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    speculative = not getattr(args, "no_speculation", False)
    if speculative and not args.drafter:
        raise ValueError("--drafter is needed to speculate; without one, say --no-speculation")
    from dflash_jax.sampling import check_sampling

    check_sampling(args.temperature, args.top_p, args.top_k)
    enable_compilation_cache()
    from dflash_jax.drafter import load_drafter
    from dflash_jax.infer.requests import Request
    from dflash_jax.infer.text import Text
    from dflash_jax.target import load_target

    drafter = load_drafter(args.drafter, dtype=args.dtype) if speculative else None
    target = load_target(args.target, dtype=args.dtype)
    if drafter:
        drafter.config.check_pair(target.config)
    text = Text(target.directory)
    stops = target.config.eos_token_ids
    if not stops and text.end_token is not None:
        stops = (text.end_token,)
    defaults = Request(
        (),
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.top_k,
        stop_token_ids=stops,
    )
    return (target, drafter), text, defaults


def make_engine(args: argparse.Namespace, pair: tuple[Any, Any], requests: list[Any]) -> Any:
    """An engine with room for the longest request, or for `--max-length`."""
    from dflash_jax.infer.engine import Engine

    length = getattr(args, "max_length", None)
    if length is None:
        vocab_size, most = pair[0].config.vocab_size, pair[0].config.max_position_embeddings
        fit = [r for r in requests if r.prompt_token_ids and max(r.prompt_token_ids) < vocab_size]
        needed = max((len(r.prompt_token_ids) + max(r.max_new_tokens, 1) for r in fit), default=1)
        length = min(-(-needed // 256) * 256, most or needed)
    try:
        return Engine(
            *pair,
            slots=args.batch_size,
            max_length=length,
            block_size=args.block_size if pair[1] else None,
            proposals=args.proposals,
            seed=getattr(args, "seed", 0),
        )
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"no memory for {args.batch_size} rows of {length} tokens; lower --max-length or --batch-size "
            f"({str(error).splitlines()[0]:.120})"
        ) from error


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place or none."""
    import os

    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "dflash_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def progress_bar(total: int, unit: str) -> Any:
    """A bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, file=sys.stderr, mininterval=0.5)


def engine_rates(engine: Any) -> str:
    """Tokens per second and tau so far, for a progress bar."""
    if not engine.stats.steps:
        return ""
    rate = f"{engine.stats.tokens_per_second:.0f} tok/s"
    return f"{rate} tau {engine.stats.tau:.2f}" if engine.drafter else rate


if __name__ == "__main__":
    sys.exit(main())
