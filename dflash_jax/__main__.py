"""`dflash-jax COMMAND`, also `python -m dflash_jax COMMAND`, and the completion of its options in a shell."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from dflash_jax.version import __version__

COMMANDS = {
    "serve": "serve the OpenAI-compatible HTTP API, with a web page to try it",
    "chat": "chat with the model in the terminal",
    "generate": "answer one prompt",
    "batch": "answer a file of prompts",
    "bench": "measure speed and acceptance rate, with and without a drafter",
    "plan": "estimate memory, communication and step time for a TPU or GPU that you do not have",
    "train": "train a drafter for a target, evaluate and export it",
    "replay": "check a job's answers against the target: rounding, or an error?",
}
USAGE = """\
usage: dflash-jax COMMAND [OPTIONS]     (or python -m dflash_jax COMMAND)

commands:
{commands}

dflash-jax COMMAND --help shows its options, dflash-jax --version the version.

A first answer:
  dflash-jax generate "{prompt}"

Completion with the Tab key, in bash (in zsh, first: autoload -U bashcompinit && bashcompinit):
  eval "$(dflash-jax completion)"
"""
SCRIPT = """\
_dflash_jax() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} known=
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        known="{commands} --version --help"
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _dflash_jax dflash-jax
"""


def completion() -> str:
    """A script for bash that completes commands, subcommands and options."""
    from dflash_jax.benchmarks import arguments as measuring
    from dflash_jax.parsing import flags
    from dflash_jax.replay_job import ReplayOptions
    from dflash_jax.serve import ServeOptions
    from dflash_jax.terminal import ChatOptions
    from dflash_jax.train import arguments as training

    importlib.import_module("dflash_jax.drafters")  # its kinds have options of `train fit`
    words = lambda options: " ".join(sorted(flags(options)))
    unions: dict[str, Any] = {"bench": measuring.Mode, "train": training.Stage}
    cases = []
    for command, union in unions.items():
        parts = {get_args(part)[1].name: words(get_args(part)[0]) for part in get_args(union)}
        cases += [f'"{command} {part}") known="{known}" ;;' for part, known in parts.items()]
        cases.append(f'"{command} "*) known="{" ".join(parts)} --help" ;;')
    single = dict.fromkeys(("serve", "generate", "batch"), ServeOptions)
    single |= {"chat": ChatOptions, "plan": measuring.PlanOptions, "replay": ReplayOptions}
    for command, options in single.items():
        cases.append(f'"{command} "*) known="{words(options)}" ;;')
    return SCRIPT.format(cases="\n".join(f"            {case}" for case in cases), commands=" ".join(COMMANDS))


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """What a command runs; imported when it is asked for, so that each starts as fast as it can."""
    if name in ("bench", "benchmark"):
        from dflash_jax.benchmark import main

        return lambda argv: main(argv, prog=f"dflash-jax {name}")
    if name == "plan":
        from dflash_jax.plan import main

        return lambda argv: main(argv, prog="dflash-jax plan")
    if name == "train":
        from dflash_jax.train.__main__ import main

        return lambda argv: main(argv, prog="dflash-jax train")
    if name == "replay":
        from dflash_jax.replay_job import main

        return main
    from dflash_jax import commands

    return {"serve": commands.serve, "chat": commands.converse, "generate": commands.generate, "batch": commands.batch}[
        name
    ]


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else "--help"
    if name in COMMANDS or name == "benchmark":
        return _command(name)(given[1:])
    if given == ["completion"]:
        print(completion(), end="")
        return 0
    if given == ["--version"]:
        print(f"dflash-jax {__version__}")
        return 0
    from dflash_jax.bundled import PROMPT

    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {command:{width}}{what}" for command, what in COMMANDS.items())
    wrong = name not in ("--help", "-h")
    if wrong:
        print(f"error: dflash-jax has no command {name!r:.60}", file=sys.stderr)
    print(USAGE.format(commands=listed, prompt=PROMPT), end="", file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


def console() -> None:
    """The entry point `dflash-jax`."""
    from dflash_jax.infer.interrupt import exit_quietly
    from dflash_jax.process import answer_only

    if sys.argv[1:2] not in (["bench"], ["benchmark"]):  # which may compare with torch
        answer_only()
    exit_quietly(main())


if __name__ == "__main__":
    console()
