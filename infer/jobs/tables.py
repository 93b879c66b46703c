"""Tables as inputs and outputs of jobs: Parquet files, and datasets of the Hugging Face hub.

Rows are read as lines of JSON, a few at a time. The records of a finished job are written as a table, of which the
columns follow from `--fields` alone, and never from what the records hold.
"""

import io
import json
import logging
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_jax.files import Fields, Value, one_line, reading, replace_by, said
from dflash_jax.infer.jobs.journal import when_there_is_room
from dflash_jax.infer.jobs.record_fields import ALWAYS, CHOSEN

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("dflash_jax")
HUB = "hf://"  # of the names of datasets
MAGIC, SUFFIX = b"PAR1", ".parquet"
BATCH = 1024  # rows that are read at a time
GROUP = 8192  # records of a row group, at most
GROUP_BYTES = 2**24  # of the lines of a row group: those that do not fit begin the next
BUFFER = 2**20  # bytes of a column that are read at a time


def check_arrow() -> None:
    """Raises ValueError if Parquet cannot be read or written here."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error}; Parquet needs another package: pip install '.[parquet]' in the checkout") from error


def is_parquet(path: str) -> bool:
    """Whether a file is a table, or is named so."""
    if not Path(path).is_file():
        return False
    if path.lower().endswith(SUFFIX):
        return True
    with Path(path).open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parquet_lines(path: str) -> Iterator[bytes]:
    """The rows of a Parquet file as lines of JSON; see `_Lines`.

    Raises:
        ValueError: the file is damaged, or pyarrow is not installed.
        OSError: it cannot be read.
    """
    check_arrow()
    from pyarrow.parquet import ParquetFile

    lines = _Lines(path)
    with reading(Path(path)), ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file:
        for batch in file.iter_batches(BATCH):
            yield from lines(batch.to_pylist())


def dataset_lines(name: str) -> Iterator[bytes]:
    """The rows of a dataset as lines of JSON; see `_Lines`. They are streamed, not downloaded before.

    Args:
        name: `hf://OWNER/NAME`, with `/CONFIG` and `:SPLIT` behind it; without a split it is `train`.

    Raises:
        ValueError: no such dataset, it cannot be read, or the package that reads it is not installed.
    """
    match = re.fullmatch(rf"{HUB}(?:datasets/)?([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.-]+))?", name)
    if match is None:
        raise ValueError(f"{name} must be {HUB}OWNER/NAME[/CONFIG][:SPLIT]")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{error}; {HUB} needs another package: pip install '.[datasets]' in the checkout") from error
    where, config, split = match.groups()
    try:
        yield from _Lines(name)(load_dataset(where, config, split=split or "train", streaming=True))
    except Exception as error:  # of the hub, the network, or whatever reads the files
        raise ValueError(one_line(f"{name} cannot be read: {said(error)}")) from error


class _Lines:
    """Rows of a table as lines of JSON, without what JSON has no form for: nulls, also within a value, numbers that are
    not finite, which stand for nulls in many tables, and bytes, which a warning names.

    Args:
        source: name of the table.
    """

    def __init__(self, source: str):
        self._source, self._warned = source, set[str]()

    def __call__(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        for row in rows:
            known = {name: value for name, given in row.items() if (value := self._plain(given, name)) is not None}
            yield json.dumps(known, ensure_ascii=False, default=str).encode() + b"\n"

    def _plain(self, value: Value, column: str) -> Value:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            found = ((name, self._plain(inner, column)) for name, inner in value.items())
            return {name: inner for name, inner in found if inner is not None}
        if isinstance(value, list):
            return [self._plain(inner, column) for inner in value]
        if not isinstance(value, bytes):
            return value
        if column not in self._warned:
            self._warned.add(column)
            log.warning("%s: column %s has bytes, for which JSON has no form; they are left out", self._source, column)
        return None


def write_parquet(path: Path, records: Path, fields: Sequence[str] | None) -> None:
    """Writes the records of a finished job as a Parquet file, which takes the place of an older one when it is whole.

    Args:
        records: lines of JSON.
        fields: that records have besides those of every record; None are all but the input.

    Raises:
        OSError: it cannot be written; a full disk is waited for.
    """
    import pyarrow

    # What has no fixed form is JSON in a string.
    some, number = pyarrow.string(), pyarrow.int64()
    numbers = pyarrow.list_(pyarrow.int32())
    types = {
        "id": some,
        "index": number,
        "text": some,
        "token_ids": numbers,
        "finish_reason": some,
        "usage": pyarrow.struct({"prompt_tokens": number, "completion_tokens": number}),
        "speculation": pyarrow.struct({"steps": number, "acceptance_lengths": numbers, "tau": pyarrow.float64()}),
        "error": pyarrow.struct({"code": some, "message": some}),
    }
    columns = dict.fromkeys((*ALWAYS, *(CHOSEN if fields is None else fields)))
    schema = pyarrow.schema([(name, types.get(name, some)) for name in columns])
    when_there_is_room(path, lambda: replace_by(path, _pieces(records, schema, types.keys())))


class _Written(io.RawIOBase):
    """A file in memory, whose bytes are taken out as they come."""

    def __init__(self) -> None:
        self.pieces, self._size = list[bytes](), 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview | bytes) -> int:  # type: ignore[override]  # io has a type of its own for buffers
        self.pieces.append(bytes(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def taken(self) -> Iterator[bytes]:
        yield from self.pieces
        self.pieces.clear()


def _pieces(records: Path, schema: "pyarrow.Schema", fixed: Container[str]) -> Iterator[bytes]:
    """A Parquet file of the records, group by group."""
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetWriter

    def row(line: bytes) -> Fields:
        record = json.loads(line)
        plain = lambda name, value: json.dumps(value, ensure_ascii=False) if name not in fixed else value
        found = {name: plain(name, value) for name, value in record.items() if value is not None}
        return found | {"id": str(record["id"])}

    sink = _Written()
    with records.open("rb") as file, ParquetWriter(sink, schema, compression="zstd") as writer:
        for lines in _groups(file):
            writer.write_batch(RecordBatch.from_pylist([row(line) for line in lines], schema))
            yield from sink.taken()
    yield from sink.taken()


def _groups(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines by the row groups that they go into."""
    group, size = list[bytes](), 0
    for line in lines:
        if group and (len(group) == GROUP or size + len(line) > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
    if group:
        yield group
