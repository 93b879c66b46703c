"""From words on a command line to an instance of a dataclass of options.

The text that a dataclass has for a field is its help. Nothing here imports jax, so that `--help` answers at once.
"""

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

import tyro

from dflash_jax.files import one_line, reading

T = TypeVar("T")
Options = Any  # a dataclass of options, an instance of one, or a union of subcommands
# Names that other tools have for our flags.
ALIASES = {
    "--model": "--target",
    "--draft-model": "--drafter",
    "--max-tokens": "--max-new-tokens",
    "--temp": "--temperature",
    "--lr": "--learning-rate",
    "--max-model-len": "--max-length",
    "--max-num-seqs": "--batch-size",
    "--quantise": "--quantize",
}
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
CONFIG = "--config"


@overload
def parse(
    options: type[T],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    common: Collection[str] = (),
    hidden: Collection[str] = (),
) -> T: ...
@overload
def parse(
    options: object,
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    common: Collection[str] = (),
    hidden: Collection[str] = (),
) -> Options: ...
def parse(
    options: Options,
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    common: Collection[str] = (),
    hidden: Collection[str] = (),
) -> Options:
    """The options of a command line: an instance of `options`, a dataclass or a union of subcommands.

    Wrong usage ends the process with status 2 and says why on stderr; an unknown flag names the nearest.

    Args:
        common: fields that `--help` shows, if not all; `--help-all` shows the others, too.
        hidden: fields that this command does not have.
    """
    if hidden:
        options = without(options, lambda name: name in hidden)
    known = flags(options)
    words = [_known_name(word, known) for word in (sys.argv[1:] if argv is None else argv)]
    more = ""
    if common and HELP_ALL in words:
        words = [HELP[1] if word == HELP_ALL else word for word in words]
    elif common and set(HELP) & set(words):
        options = without(options, lambda name: name not in common)
        if (asked := _asked(options, words)) is not None:
            others = _other_names(flags(asked))
            more = f"{HELP_ALL} shows all options.{f' Also understood: {others}' if others else ''}"
    config = (
        tyro.conf.OmitArgPrefixes,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.HelptextFromCommentsOff,
    )
    try:
        try:
            return tyro.cli(options, prog=prog, description=description, args=words, config=config)
        except SystemExit as ended:
            if more and not ended.code:
                print(more, flush=True)
            raise
    except BrokenPipeError:  # the reader of the help has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except SystemExit as wrong:
        if wrong.code:
            for line in _misspelt(known, words):
                print(line, file=sys.stderr)
        raise


def _known_name(word: str, known: Collection[str]) -> str:
    """A word, with our name for its flag if it is another tool's."""
    name, equals, value = word.partition("=")
    ours = ALIASES.get(name)
    return word if ours is None or name in known or ours not in known else ours + equals + value


def _asked(options: Options, words: Sequence[str]) -> Options | None:
    """The dataclass of options, or the subcommand of a union that the words begin with, if any."""
    if dataclasses.is_dataclass(options):
        return options
    return next((part for part in get_args(options) if get_args(part)[1].name == words[0]), None)


def _other_names(known: Collection[str]) -> str:
    shown = [f"{theirs} ({ours})" for theirs, ours in ALIASES.items() if ours in known and theirs != "--quantise"]
    return ", ".join(sorted(shown))


def _misspelt(known: Collection[str], argv: Sequence[str]) -> Iterator[str]:
    """The nearest flag for every unknown one. The library says so itself only if nothing else is wrong."""
    given = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
    for word in given:
        if word not in known and (near := difflib.get_close_matches(word, known, 1)):
            yield f"{word} is unknown; the nearest is {near[0]}"


def without(options: Options, dropped: Callable[[str], bool]) -> Options:
    """A dataclass of options, or a union of subcommands, without the fields whose names `dropped` is true for. These
    keep their defaults. Groups of options that have no others are left out, too."""
    if get_origin(options) is Annotated:
        inside, *marks = get_args(options)
        return Annotated[(without(inside, dropped), *marks)]
    if not dataclasses.is_dataclass(options):
        parts = get_args(options)
        union = without(parts[0], dropped)
        for part in parts[1:]:
            union = union | without(part, dropped)
        return union
    kind = options if isinstance(options, type) else type(options)
    hints, made = get_type_hints(kind, include_extras=True), []
    for part in dataclasses.fields(kind):
        if not part.init:
            continue
        hint = hints[part.name]
        inside = _group(part, hint)
        default = dataclasses.field(default=part.default, default_factory=part.default_factory)  # type: ignore[call-overload]
        if inside is None:
            if not dropped(part.name) or _required(part):
                continue
            made.append((part.name, tyro.conf.Suppress[hint], default))
        elif all(dropped(name) for name in _fields(inside)):
            made.append((part.name, tyro.conf.Suppress[hint], default))
        else:
            smaller = without(inside, dropped)
            if part.default_factory is not dataclasses.MISSING:
                default = dataclasses.field(default_factory=_smaller(smaller, part.default_factory))
            marks = [dataclasses.replace(mark, constructor_factory=None) for mark in get_args(hint)[1:]]
            made.append((part.name, Annotated[(smaller, *marks)] if marks else smaller, default))
    if not made:
        return kind
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclasses.make_dataclass(
        kind.__name__, made, bases=(kind,), frozen=True, kw_only=True, namespace=namespace
    )


def _smaller(kind: type, factory: Callable[[], object]) -> Callable[[], object]:
    return lambda: kind(**vars(factory()))


def _required(part: dataclasses.Field) -> bool:
    return part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING


def _group(part: dataclasses.Field, hint: object) -> type | None:
    """The dataclass of a field that is a group of options; None if it is one option."""
    found = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return found
    if part.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(made := part.default_factory()):
        return type(made)
    return None


def _fields(options: type, kind: type | None = None) -> Iterator[str]:
    """Names of all options of a dataclass and of the groups inside it; of those of a type only, if that is given."""
    hints = get_type_hints(options, include_extras=True)
    for part in dataclasses.fields(options):
        hint = hints[part.name]
        inside = _group(part, hint)
        if part.init and not (get_origin(hint) is Annotated and tyro.conf.Suppress in get_args(hint)):
            named = [part.name] if kind is None or hint is kind else []
            yield from named if inside is None else _fields(inside, kind)


def flags(options: Options) -> set[str]:
    """All flags of a dataclass, of those inside it, or of a union of them."""
    if get_origin(options) is Annotated:
        options = get_args(options)[0]
    if not dataclasses.is_dataclass(options):
        return {"--help"}.union(*(flags(part) for part in get_args(options)))
    kind = options if isinstance(options, type) else type(options)
    return {"--help", *map(flag, _fields(kind))}


def names_object(word: str) -> bool:
    """Whether a word names an object of a module, `module:Name`, and not a file."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", word) is not None and not Path(word).exists()


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def configured(argv: Sequence[str] | None, options: Options, hidden: Collection[str] = ()) -> list[str]:
    """Words of a command line, and behind them the options in the YAML file that its `--config` names, but for those
    that stand there themselves. A list gives several words, true a flag alone, and an object JSON.

    A file that cannot be read, or that is no mapping of options by their names, ends the process with status 2.

    Args:
        argv: None is the command line of this process.
        hidden: fields that the command does not have.
    """
    try:
        return _configured(sys.argv[1:] if argv is None else argv, options, hidden)
    except (ValueError, OSError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {one_line(why)}", file=sys.stderr)
        raise SystemExit(2) from error


def _configured(argv: Sequence[str], options: Options, hidden: Collection[str]) -> list[str]:
    joined = [word for given in argv for word in (given.split("=", 1) if given.startswith(f"{CONFIG}=") else [given])]
    if CONFIG not in joined or joined[-1] == CONFIG:
        return list(argv)
    import yaml

    path = Path(joined[joined.index(CONFIG) + 1])
    known = flags(options) - {flag(name) for name in (*hidden, *_positional(options))}
    with reading(path):
        try:
            found = yaml.safe_load(path.read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ValueError("must be a mapping of options, like `batch-size: 8`")
        named = {_known_name(flag(name.lstrip("-")), known): value for name, value in found.items()}
        if wrong := [name for name in named if name not in known or name == CONFIG]:
            raise ValueError("; ".join(_misspelt(known, wrong)) or f"this command has no option {wrong[0]} in a file")
        switches = {flag(name) for name in _fields(options, bool)}
        named = {name: _switched(name, value) if name in switches else value for name, value in named.items()}
    given = {_known_name(word, known).partition("=")[0] for word in joined}
    return joined + [word for name, value in named.items() if name not in given for word in _words(name, value)]


def _switched(name: str, value: object) -> bool | None:
    """What a file says of a flag without a value; a string is what YAML means without the quotes."""
    said = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    found = said.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(found, bool) or found is None:
        return found
    raise ValueError(f"{name.lstrip('-')} must be true or false, got {value!r:.60}")


def _positional(options: Options) -> list[str]:
    """Names of the fields that are no flags."""
    if not dataclasses.is_dataclass(options):
        return []
    hints = get_type_hints(options if isinstance(options, type) else type(options), include_extras=True)
    return [name for name, hint in hints.items() if tyro.conf.Positional in get_args(hint)]


def _words(name: str, value: object) -> list[str]:
    """A flag with its value."""
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]
