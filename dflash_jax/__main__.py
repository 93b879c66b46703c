"""`python -m dflash_jax`: which commands there are, and the completion of their options in a shell."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": "answer one prompt, a file of prompts, or HTTP requests",
    "benchmark": "measure speed and acceptance, with and without a drafter",
    "train": "train a drafter for a target, evaluate and export it",
    "plan": "memory, collectives and step times on accelerators that are not here",
}
USAGE = """\
python -m dflash_jax.COMMAND [OPTIONS]; each has --help

commands:
{commands}

A first answer:
  python -m dflash_jax.serve --prompt "Anna has 24 apples and buys 18 more. How many apples does Anna have now?"

Completion of options with the Tab key, in bash:
  eval "$(python -m dflash_jax completion)"
and in zsh, before that line:
  autoload -U bashcompinit && bashcompinit
"""
# Whatever is no command of ours is left to file names.
SCRIPT = """\
_dflash_jax() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} module= stage= known= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{COMP_WORDS[i]}}" in
            -m) module=${{COMP_WORDS[i + 1]}}; stage=${{COMP_WORDS[i + 2]}} ;;
        esac
    done
    COMPREPLY=()
    case "$module $stage" in
{cases}
        *) if [ "${{COMP_WORDS[COMP_CWORD - 1]}}" = -m ]; then known="{modules}"; fi ;;
    esac
    COMPREPLY=($(compgen -W "$known" -- "$word"))
}}
complete -o default -F _dflash_jax python python3
"""


def completion() -> str:
    """A script for bash that completes modules, subcommands and options."""
    from typing import Any, get_args

    from dflash_jax.benchmarks import arguments as measuring
    from dflash_jax.cli import flags
    from dflash_jax.serve import ServeOptions
    from dflash_jax.train import arguments as training

    importlib.import_module("dflash_jax.drafters")  # its kinds have options of `train fit`
    words = lambda options: " ".join(sorted(flags(options)))
    commands: dict[str, Any] = {"benchmark": measuring.Mode, "train": training.Stage}
    cases = []
    for command, union in commands.items():
        parts = {get_args(part)[1].name: words(get_args(part)[0]) for part in get_args(union)}
        cases += [f'"dflash_jax.{command} {part}") known="{known}" ;;' for part, known in parts.items()]
        cases.append(f'"dflash_jax.{command} "*) known="{" ".join(parts)} --help" ;;')
    for command, options in {"serve": ServeOptions, "plan": measuring.PlanOptions}.items():
        cases.append(f'"dflash_jax.{command} "*) known="{words(options)}" ;;')
    modules = " ".join(f"dflash_jax.{command}" for command in COMMANDS)
    return SCRIPT.format(cases="\n".join(f"        {case}" for case in cases), modules=modules)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given == ["completion"]:
        print(completion(), end="")
        return 0
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {command:{width}}{what}" for command, what in COMMANDS.items())
    wrong = bool(given) and given not in (["--help"], ["-h"])
    if wrong:
        print(f"error: python -m dflash_jax takes no {given[0]!r:.60}", file=sys.stderr)
    print(USAGE.format(commands=listed), end="", file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
