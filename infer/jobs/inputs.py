"""Inputs of jobs: files, globs, compression, standard input, tables."""

import contextlib
import gzip
import io
import os
import sys
import zlib
from collections.abc import Container, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import BinaryIO

from dflash_jax.infer.jobs.tables import HUB, MAGIC, dataset_lines, is_parquet, parquet_lines

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What compressed files begin with. Those of the second table cannot be read here.
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SKIPPABLE = bytes(range(0x50, 0x60)), b"\x2a\x4d\x18"  # frames of zstandard without contents: first byte, the others
OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip", b"\x04\x22\x4d\x18": "lz4"}
HEAD = 512  # bytes by which a file is known


def input_lines(names: Sequence[str], without: Container[Path] = ()) -> Iterator[bytes]:
    """Lines of files one after the other: paths or globs; `-` is standard input. What a file begins with, not its name,
    says whether it is compressed, by gzip or zstandard, or a Parquet file, of which every row is a line. `hf://` begins
    the name of a dataset; see `tables.dataset_lines`.

    Args:
        without: see `input_paths`.

    Raises:
        ValueError: a glob that matches nothing, a compressed file that is damaged, cut short or empty, or a table that
            cannot be read.
        OSError: a file that cannot be read.
    """
    for path in input_paths(names, without):
        if path.startswith(HUB) or is_parquet(path):
            yield from dataset_lines(path) if path.startswith(HUB) else parquet_lines(path)
            continue
        lines = 0
        try:
            with opened(path) as file:
                for line in file:
                    yield line
                    lines += 1
        except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
            raise ValueError(f"{path} is damaged after line {lines}: {error}") from error


def input_paths(names: Sequence[str], without: Container[Path] = ()) -> list[str]:
    """The files that `input_lines` reads, globs expanded in order of name.

    Args:
        without: paths with links followed that a glob does not mean, such as the job's own output.
    """
    paths: list[str] = []
    for name in names:
        if name == "-" or name.startswith(HUB) or Path(name).exists():
            found = [name]
        else:
            found = sorted(path for path in glob(name, recursive=True) if Path(os.path.realpath(path)) not in without)
        if not found and any(character in name for character in "*?["):
            raise ValueError(f"{name} matches no file")
        paths += found or [name]
    return paths


class _Joined(io.RawIOBase):
    """The bytes that were read of a stream already, and the rest of it."""

    def __init__(self, head: bytes, rest: BinaryIO):
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # io has a type of its own for buffers
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file, or standard input for `-`, decompressed if it is compressed.

    Raises:
        ValueError: it is compressed in a way that is not supported.
        EOFError: its name says that it is compressed, and it is not. While it is read, this, `BadGzipFile`, `ZstdError`
            or `zlib.error` say that it is damaged.
        OSError: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        raw = sys.stdin.buffer if path == "-" else stack.enter_context(Path(path).open("rb"))
        head = raw.read(HEAD)
        plain = io.BufferedReader(_Joined(head, raw), 2**16)
        if head.startswith(GZIP):
            yield stack.enter_context(gzip.GzipFile(fileobj=plain, mode="rb"))  # type: ignore[arg-type]
        elif head.startswith(ZSTANDARD) or (head[:1] in SKIPPABLE[0] and head[1:4] == SKIPPABLE[1]):
            yield stack.enter_context(zstd.ZstdFile(plain, "rb"))  # type: ignore[arg-type]
        else:
            if head.startswith(MAGIC):
                raise ValueError(f"{path} is a Parquet file, which cannot be read from a pipe; name the file")
            if other := next((kind for magic, kind in OTHERS.items() if head.startswith(magic)), None):
                raise ValueError(f"{path} is compressed with {other}; gzip and zstandard can be read")
            if path.lower().endswith((".gz", ".zst")):
                raise EOFError(
                    "it is neither gzip nor zstandard; if it is plain text, rename it" if head else "it is empty"
                )
            yield plain
