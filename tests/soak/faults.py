"""Faults in the middle of a job: the command ends with its status, says why, and the next one completes the job."""

import gzip
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dflash_jax.infer.jobs.inputs import zstd
from tests.soak.runs import TOGETHER, Bench, Run, answers, expect, same, token_lines

# Runs the job with the n-th write of an answer failing.
WRITE_ERROR = """
import errno, io, itertools, os, sys
from dflash_jax.infer.jobs import journal
from dflash_jax import serve
number, fails = getattr(errno, sys.argv[1]), int(sys.argv[2])
calls = itertools.count()
class Failing(io.FileIO):
    def write(self, data):
        if next(calls) == fails:
            raise OSError(number, os.strerror(number))
        return super().write(data[: len(data) // 2 + 1])  # and every write is a short one
path_open = journal.Path.open
def opened(path, mode="r", *more, **settings):
    if mode == "ab" and settings.get("buffering") == 0:
        return Failing(path, "ab")
    return path_open(path, mode, *more, **settings)
journal.Path.open = opened
journal.PAUSE = 0.5
sys.exit(serve.main(sys.argv[3:]))
"""
LINES = 24


class Fault:
    """One job in a folder of its own, and what happens to it.

    Args:
        whole: a folder with the job and its answers.
    """

    def __init__(self, bench: Bench, rng: random.Random, room: Path, whole: Path):
        self.bench, self.rng, self.whole = bench, rng, whole / "out.jsonl"
        self.source, self.output = room / "in.jsonl", room / "out.jsonl"
        self.target = bench.plain
        shutil.copy(whole / "in.jsonl", self.source)

    def start(self, *wrap: str) -> Run:
        return self.bench.start(self.source, self.output, plain=self.target, wrap=wrap)

    def begun(self) -> Run:
        """The job, which has written its first answer."""
        run = self.start()
        run.until_it_writes(self.output)
        return run

    def half_done(self) -> None:
        """An output with some of the answers."""
        lines = self.whole.read_bytes().splitlines(keepends=True)
        self.output.write_bytes(b"".join(lines[: self.rng.randint(1, len(lines) - 1)]))
        shutil.copy(f"{self.whole}.settings.json", f"{self.output}.settings.json")

    def fails(self, run: Run, *words: str) -> None:
        """The job ends with status 2 and these words."""
        status, error = run.wait()
        expect(status == 2 and "error: " in error, f"status {status}: {error[-500:]}")
        expect(all(word in error for word in words), f"no {words} in: {error[-500:]}")

    def ends(self) -> None:
        """The job, started again, has all answers."""
        self.bench.run(self.source, self.output, plain=self.target, expected=[0])
        same(answers(self.output), answers(self.whole))

    # The faults ------------------------------------------------------------------------------------

    def file_size_limit(self) -> None:
        limit = ["bash", "-c", f'ulimit -f {self.rng.randint(1, 4)}; exec "$@"', "-"]
        self.fails(self.start(*limit, sys.executable, "-m", "dflash_jax.serve"))

    def write_error(self) -> None:
        name = self.rng.choice(["EIO", "EFBIG", "EROFS", "EBADF"])
        self.fails(self.start(sys.executable, "-c", WRITE_ERROR, name, str(self.rng.randrange(2 * LINES))))

    def full_disk(self) -> None:
        run = self.start(sys.executable, "-c", WRITE_ERROR, "ENOSPC", str(self.rng.randrange(LINES)))
        status, error = run.wait()
        expect(status == 0 and "no space left" in error, f"status {status}: {error[-500:]}")

    def deleted_output(self) -> None:
        run = self.begun()
        self.output.unlink()
        self.fails(run, "deleted or replaced", self.output.name)

    def emptied_output(self) -> None:
        run = self.begun()
        os.truncate(self.output, 0)
        self.fails(run, "another program emptied", self.output.name)

    def torn_output(self) -> None:
        self.half_done()
        data = self.output.read_bytes()
        self.output.write_bytes(data[: self.rng.randrange(len(data))])

    def damaged_output(self) -> None:
        self.half_done()
        whole = self.output.read_bytes()
        lines = whole.splitlines(keepends=True)
        damage = self.rng.choice([b"no record\n", b"\n", b"\xff\n", b"\0\n", b"[]\n", b"{}\n", lines[0]])
        lines.insert(self.rng.randint(0, len(lines)), damage)
        self.output.write_bytes(b"".join(lines))
        self.fails(self.start(), "damaged in line")
        self.output.write_bytes(whole)

    def changed_settings(self) -> None:
        self.half_done()
        path = self.output.with_name("out.jsonl.settings.json")
        whole = path.read_bytes()
        if self.rng.random() < 0.3:
            path.unlink()
        else:
            path.write_bytes(self.rng.choice([b"", b"[]", b"\xff", whole[: len(whole) // 2], b"{}"]))
        self.fails(self.start(), "settings")
        path.write_bytes(whole)

    def changed_input(self) -> None:
        self.half_done()
        whole = self.source.read_bytes()
        lines = whole.splitlines(keepends=True)
        at = self.rng.randrange(len(lines))
        change = self.rng.choice(["lost", "added", "edited", "moved"])
        if change == "lost":
            del lines[at]
        elif change == "added":
            lines.insert(at, b'{"id": "new", "prompt_token_ids": [1]}\n')
        elif change == "edited":
            lines[at] = lines[at].replace(b"{", b'{"top_p": 0.3, ', 1)
        else:
            lines[at], lines[at - 1] = lines[at - 1], lines[at]
        self.source.write_bytes(b"".join(lines))
        self.fails(self.start(), "other settings", "input")
        self.source.write_bytes(whole)

    def changed_weights(self) -> None:
        self.half_done()
        self.target = shutil.copytree(self.bench.plain, self.output.parent / "target")
        weights = self.target / "model.safetensors"
        whole = weights.read_bytes()
        at = self.rng.randrange(-4000, -1)
        weights.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        self.fails(self.start(), "other settings", "target")
        weights.write_bytes(whole)

    def cut_archive(self) -> None:
        name, compress = self.rng.choice([("gz", gzip.compress), ("zst", zstd.compress)])
        data = compress(self.source.read_bytes())
        archive = self.source.with_name(f"in.jsonl.{name}")
        archive.write_bytes(data[: self.rng.randrange(len(data))])
        self.fails(self.bench.start(archive, self.output, plain=self.target), archive.name)

    def one_signal(self) -> None:
        run = self.begun()
        time.sleep(0.2 * self.rng.random())
        self._signal(run, 1)

    def two_signals(self) -> None:
        run = self.begun()
        time.sleep(0.2 * self.rng.random())
        self._signal(run, 2)

    def signals_while_compiling(self) -> None:
        cold = {"JAX_COMPILATION_CACHE_DIR": str(self.output.with_name("cache")), "XLA_FLAGS": ""}
        run = self.bench.start(self.source, self.output, plain=self.target, environment=cold)
        run.until(lambda: "compiling" in run.said)
        time.sleep(2 * self.rng.random())
        self._signal(run, self.rng.randint(1, 2))

    def _signal(self, run: Run, times: int) -> None:
        begin = time.monotonic()
        for _ in range(times):
            run.signal(self.rng.choice([signal.SIGINT, signal.SIGTERM]))
            time.sleep(0.3 * self.rng.random())
        status, error = run.wait()
        expect(status in (0, 130), f"status {status}: {error[-500:]}")
        expect(time.monotonic() - begin < 10, "it took more than 10 seconds to stop")


KINDS: tuple[Callable[[Fault], None], ...] = (
    Fault.emptied_output,
    Fault.signals_while_compiling,
    Fault.file_size_limit,
    Fault.write_error,
    Fault.full_disk,
    Fault.deleted_output,
    Fault.torn_output,
    Fault.damaged_output,
    Fault.changed_settings,
    Fault.changed_input,
    Fault.changed_weights,
    Fault.cut_archive,
    Fault.one_signal,
    Fault.two_signals,
)


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """150 faults at scale 1, of every kind in turn."""
    whole = bench.room("faults")
    source = "".join(json.dumps(line) + "\n" for line in token_lines(rng, LINES))
    (whole / "in.jsonl").write_text(source)
    bench.run(whole / "in.jsonl", whole / "out.jsonl", plain=bench.plain, expected=[0])
    seed = rng.random()

    def one(number: int) -> str:
        kind = KINDS[number % len(KINDS)]
        fault = Fault(bench, random.Random(f"{seed} {number}"), bench.room(f"fault{number}"), whole)
        kind(fault)
        fault.ends()
        shutil.rmtree(fault.output.parent)
        return kind.__name__

    with ThreadPoolExecutor(TOGETHER) as pool:
        done = Counter(pool.map(one, range(max(1, round(150 * scale)))))
    return {"faults": sum(done.values()), "lost or doubled": 0, "differing": 0, "kinds": done}
