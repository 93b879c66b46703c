"""Files: read with errors that name them, followed through links, written whole or not at all."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

BEGAN = time.time()  # when this process imported the package
FULL = (errno.ENOSPC, errno.EDQUOT)  # how a full disk is reported
MOST_DIGITS = 308  # of a whole number in a file of settings, so that it can become a float
LONGEST_WORD, LONGEST_LINE = 500, 4000  # characters in a message: of a word, such as a tensor's name, and in all

T = TypeVar("T")
Value = Any  # of JSON
Json = dict[str, Any]  # an object
Fields = Mapping[str, Any]  # the same, only to be read


def one_line(text: object) -> str:
    """A message as one line: line ends and what else cannot be printed are escaped, and very long words are cut."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    shown = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:200]}...{word[0][-100:]}", shown)
    return shown if len(shown) <= LONGEST_LINE else f"{shown[: LONGEST_LINE - 500]} ... {shown[-400:]}"


def said(error: BaseException) -> str:
    """What an exception says, so that it makes sense without a traceback."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    text = str(error)
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Makes one line that names the file or directory of whatever is raised while it is read. Yields the path.

    A damaged file may provoke anything in the code that reads it. What is not installed is not the file's fault.

    Raises:
        ValueError: for any exception but the following.
        OSError: the system refuses to read it.
        ImportError: a package is missing.
    """
    try:
        yield path
    except ImportError:
        raise
    except OSError as error:
        if error.errno is None:
            raise ValueError(_about(path, error)) from error
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error) == _about(path, error):
            raise
        raise ValueError(_about(path, error)) from error


def _about(path: Path, error: BaseException) -> str:
    """What an exception says, with the file it is about."""
    text, name = one_line(said(error)), one_line(path)
    if name in text:
        return text
    if (short := one_line(path.name)) and text.startswith(short):
        return name + text[len(short) :]
    return f"{name}: {text}"


def _whole_number(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def read_json(path: Path) -> Json:
    """The object in a JSON file.

    Raises:
        ValueError: it holds none; the message names the file.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(one_line(f"{path} must be a file"))
    with reading(path):
        data = path.read_bytes()
        try:
            value = json.loads(data.decode(), parse_int=_whole_number)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} must be JSON: {said(error)}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path} must hold a JSON object, found {json.dumps(value):.60}")
    return value


def read_json_lines(path: Path, read: Callable[[Json], T]) -> Iterator[tuple[bytes, T]]:
    """Every line of a file of JSON objects, and what `read` makes of its object.

    A last line without an end is left out: whoever wrote it was stopped in the middle.

    Raises:
        ValueError: a line is damaged; the message names the file and the line's number.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"expected an object, found {type(record).__name__}")
                found = read(record)
            except Exception as error:  # a damaged record may provoke anything
                raise ValueError(one_line(f"{path} is damaged in line {number}: {said(error):.100}")) from error
            yield line, found


def followed(path: Path) -> Path:
    """What a path names once all links are followed, whether it is there or not; raises OSError for links in a loop."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def cache_directory() -> Path:
    """Where this package keeps what it can make again: `$XDG_CACHE_HOME/dflash_jax`, or `~/.cache/dflash_jax`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def shown_path(path: Path) -> str:
    """A path as a user writes it: with ~ for the home directory."""
    with contextlib.suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def check_writable(path: Path) -> None:
    """Raises OSError if a file cannot be made or replaced there. Nothing that exists is opened or changed for that; a
    disk that is full now passes."""
    found = followed(path)
    if path.exists():
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if not stat.S_ISREG(mode):
            return
    directory = found.parent
    if not directory.is_dir():
        linked = f"{path} is a link to {found}: " if path.is_symlink() else ""
        raise FileNotFoundError(errno.ENOENT, f"{linked}there is no such directory", str(directory))
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno not in FULL:
            raise OSError(error.errno, f"no file can be made there ({error.strerror})", str(directory)) from error


def replace(path: Path, data: bytes) -> None:
    """Puts a file into the place of whatever is there; links stay. What is no file, such as `/dev/stdout`, is written
    to.

    Raises:
        OSError: naming the path.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = followed(path)
    beside = target.with_name(f".{secrets.token_hex(8)}.writing")  # nobody else's, and short where the name is long
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename, error.filename2 = str(path), None  # the one that the user knows of
        raise


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A new directory to fill. It then takes the place of `directory`, or, if it could not be filled, is removed; links
    stay."""
    target = followed(directory)
    beside, old = (target.with_name(f".{secrets.token_hex(8)}.{end}") for end in ("writing", "old"))
    beside.mkdir(parents=True)
    try:
        yield beside
        if target.exists():
            target.rename(old)
        beside.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        for left in (beside, old):
            shutil.rmtree(left, ignore_errors=True)


def write(path: Path, data: bytes) -> None:
    """`replace`, unless the file has these bytes already."""
    with contextlib.suppress(OSError):  # what cannot be read is replaced
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return
    replace(path, data)


def write_text(path: Path, text: str) -> None:
    """`write` of a text as UTF-8."""
    write(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")
