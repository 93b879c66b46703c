"""Output files that a killed job continues: whole lines only, each key once, the settings saved beside them."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Hashable
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dflash_jax import files
from dflash_jax.files import Json

PAUSE = 10.0  # seconds between attempts to write to a full disk
LOOK = 0.2  # seconds between two checks for an interrupt meanwhile
FORMAT = 3  # of the settings file; raised when the content of the file changes. The first one had no number
REMEDY = "Continue it all the same with --force, or choose another output"

T = TypeVar("T")
_log = logging.getLogger("dflash_jax")


def when_there_is_room(path: Path, write: Callable[[], T], stopping: Callable[[], object] = lambda: False) -> T:
    """Returns what `write` returns; while the disk is full, says so and calls it again every `PAUSE` seconds.

    Args:
        path: what is written.
        stopping: asked meanwhile.

    Raises:
        KeyboardInterrupt: `stopping` is true.
        OSError: it cannot be written for another reason; names the file.
    """
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = str(path)
            if error.errno not in files.FULL:
                raise
            if not told:
                _log.warning("no space left for %s; nothing is lost, and the job continues when there is", path)
            told = True
            for _ in range(round(PAUSE / LOOK)):
                if stopping():
                    raise KeyboardInterrupt from error
                time.sleep(LOOK)


def settings_path(output: Path) -> Path:
    """Where the settings of an output are saved."""
    return output.with_name(output.name + ".settings.json")


def check_settings(output: Path, settings: Json, remedy: str = REMEDY) -> None:
    """Raises ValueError if an output was made with other settings, or nobody can tell; `remedy` is what to do.

    A field `x` with a field `x_fingerprint` beside it is a name for people, and may differ.
    """
    path, settings = settings_path(output), json.loads(json.dumps(settings))
    try:
        found = files.read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{output} exists without a readable {path.name} ({error}). {remedy}") from error
    if (version := found.pop("format", None)) != FORMAT:
        version = "none" if version is None else repr(version)
        raise ValueError(f"{path} must have the settings format {FORMAT}, found {version:.60}. {remedy}")
    differ = []
    for name in dict.fromkeys([*settings, *found]):
        was, now = found.get(name), settings.get(name)
        if was == now or f"{name}_fingerprint" in settings:
            continue
        if (label := name.removesuffix("_fingerprint")) != name:
            was, now = (f"{side.get(label)} (fingerprint {side.get(name)!s:.12})" for side in (found, settings))
            differ.append(f"{label} {was}, now {now}")
        else:
            differ.append(f"{name} {was!r:.60}, now {now!r:.60}")
    if differ:
        raise ValueError(files.one_line(f"{output} was made with other settings: {'; '.join(differ)}. {remedy}"))


def open_locked(path: Path, *, wait: bool) -> FileIO:
    """Opens a file to append to it and locks it until it is closed or the process ends.

    Only the file that has the name now counts: one that was unlinked while we waited for it is opened anew, for its
    lock keeps nobody out.

    Raises:
        BlockingIOError: another holds the lock, and we were not to wait.
    """
    if path.is_fifo():
        _log.info("%s is a pipe: waiting until another program reads it", path)
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


class Keys(Protocol):
    """Keys of records, as a set has them."""

    def add(self, key: Any, /) -> None: ...

    def __contains__(self, key: object, /) -> bool: ...

    def __len__(self) -> int: ...


class Journal:
    """JSON lines that are appended one by one, and found again.

    Args:
        path: the output; continued if it is there.
        settings: what the records depend on, written to `<name>.settings.json` beside it.
        key: identifies a record that was found; raises ValueError for one that does not belong here.
        force: continue even if the settings differ or cannot be read.
        remedy: what to do about other settings, for the error's end.
        stopping: asked while the disk is full; once it is true, KeyboardInterrupt is raised instead of waiting on.
        merged: whether others may take the finished file away before it is closed, as they do with parts.
        done: where the keys of the records found go, instead of a set of them.

    Attributes:
        done: keys of the records found.
        failed: how many of them are error records.

    Raises:
        ValueError: the file is no such output, is damaged other than at its end, was made with other settings, or
            another process is writing it.
        OSError: at the end of a `with`, see `append`.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Json,
        key: Callable[[Json], Hashable],
        *,
        force: bool = False,
        remedy: str = REMEDY,
        stopping: Callable[[], object] = lambda: False,
        merged: bool = False,
        done: Keys | None = None,
    ):
        self.path, self._stopping, self._merged = Path(path), stopping, merged
        self.done: Keys = set() if done is None else done
        self.failed = 0
        self._size = 0  # bytes of the records found and written
        try:
            self._file = when_there_is_room(self.path, lambda: open_locked(self.path, wait=False), stopping)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing {self.path}") from error
        try:
            if os.fstat(self._file.fileno()).st_size:
                if not force:
                    check_settings(self.path, settings, remedy)
                self._read(key)
            saved = settings_path(self.path)
            when_there_is_room(saved, lambda: files.write_json(saved, {"format": FORMAT} | settings), stopping)
        except BaseException:
            self._file.close()
            raise

    def _read(self, key: Callable[[Json], Hashable]) -> None:
        def read(record: Json) -> tuple[Hashable, bool]:
            if (name := key(record)) in self.done:
                raise ValueError(f"{name!r:.60} appears twice")
            return name, bool(record.get("error"))

        for line, (name, failed) in files.read_json_lines(self.path, read):
            self.done.add(name)
            self.failed += failed
            self._size += len(line)
        with self.path.open("rb+") as file:
            file.truncate(self._size)

    def append(self, record: Json) -> None:
        """Writes a record before it returns; while the disk is full, it says so and waits.

        Raises:
            OSError: it cannot be written, or another program deleted, replaced, emptied or changed the file since it
                was opened.
        """
        self._check_file()
        data = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")

        def write() -> None:
            nonlocal data
            while data:
                written = self._file.write(data)
                data, self._size = data[written:], self._size + written

        when_there_is_room(self.path, write, self._stopping)

    def _check_file(self, *, ended: bool = False) -> None:
        """Raises OSError unless the file has its place and its bytes."""
        found = os.fstat(self._file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size != self._size:
            raise OSError(
                f"{self.path} has {found.st_size} bytes, but {self._size} were written: another program emptied or "
                "changed it meanwhile. The same command continues with the answers that are left in it"
            )
        if ended and self._merged and not found.st_nlink:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(found, self.path.stat()):
                return
        raise FileNotFoundError(errno.ENOENT, "the output was deleted or replaced while it was written", str(self.path))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check_file(ended=True)
        finally:
            self.close()
