"""The input of a job: read once for what must be known of all its lines, and again as they are answered.

Of the lines themselves only a window is in memory, however many there are. Turning prompts into tokens takes longest;
threads do it while the device works.
"""

import hashlib
import logging
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.jobs.inputs import input_lines, input_paths
from dflash_jax.infer.jobs.lines import Line, Row, asks, line_of, read_row, renamed, repeated_ids
from dflash_jax.infer.jobs.sample import Sample
from dflash_jax.infer.plain import PROMPT_FIELDS
from dflash_jax.infer.text import Text

log = logging.getLogger("dflash_jax")
BATCH = 32  # lines that a thread turns into requests at a time
THREADS = 4
AHEAD = 16  # batches that are read ahead of those that are answered
RESTORE = "give it the lines that it had, and the same command continues"
PATIENCE = 5.0  # seconds between two lines that say how far reading is


class Names(Container[str]):
    """Many names, in eight bytes each.

    Two names are taken for one with a probability of 2**-64.
    """

    def __init__(self, hashes: np.ndarray):
        self.hashes, self._places = hashes, np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._places]

    def place(self, name: str) -> int | None:
        """Which of the names it is; None if it is none of them."""
        at = int(np.searchsorted(self._sorted, wanted := np.int64(hash(name))))
        return int(self._places[at]) if at < len(self._sorted) and self._sorted[at] == wanted else None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.place(name) is not None

    def repeated(self) -> np.ndarray:
        """Places of names that are there before."""
        return self._places[1:][self._sorted[1:] == self._sorted[:-1]]


class Answered(Container[str]):
    """Which lines of an input have an answer: a byte for each line.

    Attributes:
        flags: by the index of the line.
    """

    def __init__(self, lines: "JobInput"):
        self._place, self.flags = lines.place, np.zeros(lines.count, bool)

    def add(self, name: str) -> None:
        """Notes that the line with this id is answered."""
        self.flags[self._place(name)] = True

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (at := self._place(name)) is not None and bool(self.flags[at])

    def __len__(self) -> int:
        return int(np.count_nonzero(self.flags))


def _short(digest: bytes) -> int:
    """As much of a digest as shows that a line has changed."""
    return int.from_bytes(digest[:8], "little")


class JobInput:
    """The lines of an input.

    Args:
        names, without: see `inputs.input_lines`. What cannot be read twice, like standard input, is copied to disk.
        text, defaults: see `lines.line_of`.
        keep_rows: whether lines keep what was read.
        prompt_column: see `lines.line_of`.

    Attributes:
        count: how many lines there are, blank ones not counted.
        fingerprint: of all of them.
        sample: the first ones, and the ones that have most bytes, as requests.
        logprobs: most alternatives that one asks for; None if none does.
        constrained, growing: whether one has a constraint; whether one is a conversation of several turns.
        batches: whether one is an OpenAI batch line.

    Raises:
        ValueError: two lines with the same id, or a file that is damaged.
        OSError: a file that cannot be read.
    """

    def __init__(
        self,
        names: Sequence[str],
        text: Text,
        defaults: SamplingParams,
        without: Container[Path] = (),
        *,
        keep_rows: bool = False,
        prompt_column: str | None = None,
    ):
        self._paths, self._text, self._defaults = input_paths(names, without), text, defaults
        self._keep_rows, self._column = keep_rows, prompt_column
        again = all(Path(path).is_file() for path in self._paths)
        self._spool = None if again else tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this is there
        self.count, self.logprobs = 0, None
        self.constrained = self.growing = self.batches = False
        try:
            self._index(text)
        except BaseException:
            self.close()
            raise

    def _index(self, text: Text) -> None:
        """Reads all lines for what must be known of them."""
        sampled, digest = Sample[Row](), hashlib.sha256()
        named, given, self._digests = array("q"), array("q"), array("Q")
        for row, size in self._read(self._spool, progress=True):
            digest.update(row.digest)
            self._digests.append(_short(row.digest))
            if row.named:
                named.append(row.index)
                given.append(hash(str(row.id)))
            if self._column is None:
                self._note(row)
            sampled.add(size, row)
            self.count += 1
        self.fingerprint = digest.hexdigest()
        self._given = Names(np.array(given, np.int64))
        self._check_repeated()
        hashes = np.empty(self.count, np.int64)
        hashes[np.array(named, np.int64)] = np.array(given, np.int64)
        for index in np.setdiff1d(np.arange(self.count), named).tolist():
            hashes[index] = hash(renamed(Row(index, str(index)), self._given).id)
        self._names = Names(hashes)
        self.sample = list(self._made(sampled))
        if self.sample and all(line.error for line in self.sample):
            table = self._column is None and not any(set(PROMPT_FIELDS) & (row.fields or {}).keys() for row in sampled)
            hint = "; --prompt-column NAME says which field has the prompt" if table else ""
            log.warning("the first lines cannot be answered: %s%s", self.sample[0].error, hint)
        if (
            self._column is None
            and text.has_chat_template
            and any(isinstance((row.fields or {}).get("prompt"), str) for row in sampled)
        ):
            log.warning(
                "lines with a prompt are continued as plain text, although the target has a chat template; "
                'for an answer use {"messages": [{"role": "user", "content": ...}]}'
            )

    def _note(self, row: Row) -> None:
        """Notes what a row asks for."""
        count, constrained = asks(row)
        self.logprobs = max((n for n in (count, self.logprobs) if n is not None), default=None)
        self.constrained |= constrained
        turns = row.fields.get("turns") if row.fields else None
        self.growing |= isinstance(turns, list) and len(turns) > 1
        self.batches |= row.is_batch

    def _check_repeated(self) -> None:
        suspects = set(self._given.hashes[self._given.repeated()].tolist())
        if not suspects:
            return
        names = (str(row.id) for row, _ in self._read() if row.named)
        counts = Counter(name for name in names if hash(name) in suspects)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(repeated_ids(repeated))

    def close(self) -> None:
        """Removes the copy on disk, if there is one."""
        if self._spool is not None:
            self._spool.close()

    def place(self, name: str) -> int | None:
        """The index of the line with this id; None if there is none."""
        return self._names.place(name)

    def lines(self, wanted: Callable[[int, str], bool] = lambda index, name: True) -> Generator[Line, None, None]:
        """The lines in order, made into requests by threads, some ahead of what is asked for.

        Args:
            wanted: whether a line is, by its index and its id; others are not tokenized.

        Raises:
            ValueError: the input has changed since it was read first.
        """
        rows = (row for row in self._rows() if wanted(row.index, str(row.id)))
        pool, made = ThreadPoolExecutor(THREADS, "tokenize"), deque[Future[list[Line]]]()
        try:
            while True:
                while len(made) < AHEAD and (batch := list(islice(rows, BATCH))):
                    made.append(pool.submit(self._made, batch))
                if not made:
                    return
                yield from made.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _made(self, rows: Iterable[Row]) -> list[Line]:
        how = {"keep": self._keep_rows, "prompt_column": self._column}
        return [line_of(row, self._text, self._defaults, **how) for row in rows]

    def _rows(self) -> Iterator[Row]:
        """All rows, under their ids of this job."""
        index = -1
        for index, (row, _) in enumerate(self._read()):
            if index == self.count:  # lines that came since are another job's
                return
            if _short(row.digest) != self._digests[index]:
                raise ValueError(f"line {index} of the input has changed since the job began; {RESTORE}")
            yield renamed(row, self._given)
        if index + 1 < self.count:
            raise ValueError(f"the input has lost lines since the job began; {RESTORE}")

    def _read(self, copy: BinaryIO | None = None, *, progress: bool = False) -> Iterator[tuple[Row, int]]:
        """Every row and its size in bytes; copies all to a file if there is one. `progress`: logs how far it is."""
        if self._spool is not None and copy is None:
            self._spool.seek(0)
        stream = input_lines(self._paths) if self._spool is None or copy is not None else self._spool
        index, due = 0, time.perf_counter() + PATIENCE
        for raw in stream:
            if not raw.strip():
                continue
            if copy is not None:
                copy.write(raw if raw.endswith(b"\n") else raw + b"\n")
            row = read_row(raw, index)
            yield row if self._column is None else replace(row, is_batch=False), len(raw)
            index += 1
            if progress and (now := time.perf_counter()) > due:
                log.info("reading the input: %d lines ...", index)
                due = now + PATIENCE
