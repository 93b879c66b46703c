"""The commands of `dflash-jax` that answer prompts, each with those options of `serve` that it uses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from tyro.conf import Positional, arg

from dflash_jax.bundled import PROMPT
from dflash_jax.cli import log_to_stderr
from dflash_jax.infer.interrupt import exit_status
from dflash_jax.pairs import completed
from dflash_jax.parsing import configured, parse
from dflash_jax.serve import DESCRIPTION, FILES, MODELS, ROWS, SAMPLING, RayOptions, ServeOptions, parse_command, run
from dflash_jax.serve_http import HttpOptions
from dflash_jax.terminal import ChatOptions, chat

ADDRESS = "127.0.0.1:8000"
OF_JOBS = ("input", "output", "force", "stats_interval", "summary", *ROWS, "processes")
OF_SERVERS = tuple(HttpOptions.__dataclass_fields__)
OF_CLUSTERS = tuple(RayOptions.__dataclass_fields__)
SERVE = f"""\
Serves the OpenAI-compatible HTTP API, with a web page to try it, at {ADDRESS} by default.

  examples      dflash-jax serve --model Qwen/Qwen3-8B --batch-size 8
                dflash-jax serve --config serve.yaml
"""
GENERATE = f"""\
Streams the answer to one prompt to the terminal.

  example       dflash-jax generate "{PROMPT}"
"""
BATCH = """\
Answers a file of prompts. A killed job continues with the same command.

  example       dflash-jax batch prompts.jsonl --output answers.jsonl --batch-size 8
"""
CHAT = """\
Chats with the model in the terminal. Models are loaded and compiled once.
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ServeOptions):
    """Options of `dflash-jax generate`.

    Attributes:
        prompt: prompt to answer
    """

    prompt: Annotated[Positional[str], arg(metavar="PROMPT")] = field()


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ServeOptions):
    """Options of `dflash-jax batch`.

    Attributes:
        input: prompts, one JSON object per line: files or globs, plain, .gz or .zst; or rows of Parquet files (needs
            the extra `parquet`) or of a dataset, hf://OWNER/NAME[/CONFIG][:SPLIT] (needs the extra `datasets`); - reads
            standard input
    """

    input: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE.jsonl", help_behavior_hint="(required)")] = field()


def serve(argv: Sequence[str]) -> int:
    """`dflash-jax serve`."""
    common = (
        "host",
        "port",
        "max_length",
        "batch_size",
        "api_key",
        "served_model_name",
        "tool_format",
        *MODELS,
        "config",
    )
    hidden = ("prompt", *OF_JOBS, *OF_CLUSTERS)
    return run(parse_command(ServeOptions, argv, "dflash-jax serve", SERVE, common, hidden, ADDRESS))


def generate(argv: Sequence[str]) -> int:
    """`dflash-jax generate PROMPT`."""
    hidden = ("http", "batch_size", *OF_JOBS, *OF_SERVERS, *OF_CLUSTERS)
    common = ("prompt", *MODELS, *SAMPLING, "block_size", "config")
    return run(parse_command(GenerateOptions, argv, "dflash-jax generate", GENERATE, common, hidden))


def batch(argv: Sequence[str]) -> int:
    """`dflash-jax batch FILE ... --output FILE`."""
    formats = DESCRIPTION[DESCRIPTION.index("  input lines") : DESCRIPTION.index("  models")]
    status = DESCRIPTION[DESCRIPTION.index("  exit status") :]
    hidden = ("http", "prompt", *OF_SERVERS)
    common = (*FILES, "summary", *MODELS, *SAMPLING, "config")
    return run(parse_command(BatchOptions, argv, "dflash-jax batch", BATCH + "\n" + formats + status, common, hidden))


def converse(argv: Sequence[str]) -> int:
    """`dflash-jax chat`."""
    common = frozenset(("system", *MODELS, *SAMPLING, "max_length", "block_size", "config"))
    options = parse(ChatOptions, configured(argv, ChatOptions), prog="dflash-jax chat", description=CHAT, common=common)
    log_to_stderr()

    def work() -> int:
        models = completed(options.models, speculative=not options.no_speculation)
        return chat(replace(options, models=models))

    return exit_status(work)
