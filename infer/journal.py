"""Output files that a killed job continues: whole lines only, each key once, the settings noted beside them."""

import errno
import fcntl
import json
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from dflash_jax.files import write_json

FULL = (errno.ENOSPC, errno.EDQUOT)
PAUSE = 10.0  # seconds between attempts to write to a full disk


class Journal:
    """JSON lines that are appended one by one, and found again.

    Args:
        path: the output; continued if it is there.
        settings: what the records depend on, written to `<name>.settings.json` beside it.
        key: identifies a record that was found; raises ValueError for one that does not belong here.
        force: continue even if the settings differ.

    Attributes:
        done: keys of the records found.
        failed: how many of them are error records.

    Raises:
        ValueError: the file is no such output, is damaged other than at its end, was made with other settings, or
            another process is writing it.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        key: Callable[[dict[str, Any]], Hashable],
        *,
        force: bool = False,
    ):
        self.path = Path(path)
        self.done: set[Hashable] = set()
        self.failed = 0
        beside = self.path.with_name(self.path.name + ".settings.json")
        self._file = self.path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ValueError(f"another process is writing {self.path}") from error
        try:
            if self.path.stat().st_size:
                if not force:
                    self._check_settings(beside, settings)
                self._read(key)
            write_json(beside, settings)
        except BaseException:
            self._file.close()
            raise

    def _check_settings(self, beside: Path, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} exists without a readable {beside.name}; remove it or choose another"
            ) from error
        if differ := [name for name in settings if found.get(name) != settings[name]]:
            raise ValueError(
                f"{self.path} was made with other settings: "
                + "; ".join(f"{name} {found.get(name)!r:.60}, now {settings[name]!r:.60}" for name in differ)
            )

    def _read(self, key: Callable[[dict[str, Any]], Hashable]) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # torn by the kill
                try:
                    record = json.loads(line)
                    name = key(record)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{self.path} is damaged in line {number}: {error!s:.100}") from error
                if name in self.done:
                    raise ValueError(f"{self.path} is damaged in line {number}: {name!r:.60} is there twice")
                self.done.add(name)
                self.failed += bool(record.get("error"))
                end += len(line)
        with self.path.open("rb+") as file:
            file.truncate(end)

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record before it returns; while the disk is full, it says so and waits."""
        data = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        said = False
        while data:
            try:
                data = data[self._file.write(data) :]
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not said:
                    print(
                        f"no space left for {self.path}; nothing is lost: the job goes on when there is",
                        file=sys.stderr,
                    )
                said = True
                time.sleep(PAUSE)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
