"""Faults in the middle of a job: the command ends with its status, says why, and the next one completes the job."""

import gzip
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dflash_jax.infer.lines import zstd
from tests.soak.runs import Bench, answers, expect, mixed, same, wait_for_answers

# Runs the job with the n-th write of an answer failing.
WRITE_ERROR = """
import errno, io, itertools, os, sys
from dflash_jax.infer import journal
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
LINES = 40


class Fault:
    """One job in a folder of its own, and what happens to it."""

    def __init__(self, bench: Bench, rng: random.Random, room: Path, source: bytes):
        self.bench, self.rng, self.source, self.output = bench, rng, room / "in.jsonl", room / "out.jsonl"
        self.source.write_bytes(source)

    def half_done(self) -> None:
        """An output with some of the answers."""
        lines = self.output.with_name("whole.jsonl").read_bytes().splitlines(keepends=True)
        self.output.write_bytes(b"".join(lines[: self.rng.randint(1, len(lines) - 1)]))
        settings = self.output.with_name("whole.jsonl.settings.json").read_bytes()
        self.output.with_name("out.jsonl.settings.json").write_bytes(settings)

    def refused(self, *words: str) -> None:
        """The job is refused with status 2 and these words."""
        error = self.bench.run(self.source, self.output, expected=[2])
        expect(all(word in error for word in words), f"no {words} in: {error[-500:]}")

    # The faults ------------------------------------------------------------------------------------

    def file_size_limit(self) -> None:
        limit = ["bash", "-c", f'ulimit -f {self.rng.randint(2, 12)}; exec "$@"', "-"]
        wrap = [*limit, sys.executable, "-m", "dflash_jax.serve"]
        status, error = self.bench.end(self.bench.start(self.source, self.output, wrap=wrap))
        expect(status == 2 and "error: " in error, f"status {status}: {error[-500:]}")

    def write_error(self) -> None:
        name = self.rng.choice(["EIO", "EFBIG", "EROFS", "EBADF"])
        wrap = [sys.executable, "-c", WRITE_ERROR, name, str(self.rng.randrange(2 * LINES))]
        status, error = self.bench.end(self.bench.start(self.source, self.output, wrap=wrap))
        expect(status == 2 and "error: " in error, f"status {status} after {name}: {error[-500:]}")

    def full_disk(self) -> None:
        wrap = [sys.executable, "-c", WRITE_ERROR, "ENOSPC", str(self.rng.randrange(LINES))]
        status, error = self.bench.end(self.bench.start(self.source, self.output, wrap=wrap))
        expect(status == 0 and "no space left" in error, f"status {status}: {error[-500:]}")

    def deleted_output(self) -> None:
        process = self.bench.start(self.source, self.output)
        wait_for_answers(process, self.output)
        self.output.unlink()
        status, error = self.bench.end(process)
        expect(status == 2 and "deleted or replaced" in error, f"status {status}: {error[-500:]}")

    def torn_output(self) -> None:
        self.half_done()
        data = self.output.read_bytes()
        self.output.write_bytes(data[: self.rng.randrange(len(data))])

    def damaged_output(self) -> None:
        self.half_done()
        whole = self.output.read_bytes()
        lines = whole.splitlines(keepends=True)
        rubbish = self.rng.choice([b"rubbish\n", b"\n", b"\xff\n", b"\0\n", b"[]\n", b"{}\n", lines[0]])
        lines.insert(self.rng.randint(0, len(lines)), rubbish)
        self.output.write_bytes(b"".join(lines))
        self.refused("damaged in line")
        self.output.write_bytes(whole)

    def changed_settings(self) -> None:
        self.half_done()
        path = self.output.with_name("out.jsonl.settings.json")
        whole = path.read_bytes()
        if self.rng.random() < 0.3:
            path.unlink()
        else:
            path.write_bytes(self.rng.choice([b"", b"[]", b"\xff", whole[: len(whole) // 2], b"{}"]))
        self.refused("settings")
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
            lines.insert(at, b'{"id": "new", "prompt": "a"}\n')
        elif change == "edited":
            lines[at] = lines[at].replace(b"{", b'{"top_p": 0.3, ', 1)
        else:
            lines[at], lines[at - 1] = lines[at - 1], lines[at]
        self.source.write_bytes(b"".join(lines))
        self.refused("other settings", "input")
        self.source.write_bytes(whole)

    def changed_weights(self) -> None:
        self.half_done()
        weights = self.bench.pair / "target" / "model.safetensors"
        whole = weights.read_bytes()
        at = self.rng.randrange(-4000, -1)
        weights.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            self.refused("other settings", "target")
        finally:
            weights.write_bytes(whole)

    def cut_archive(self) -> None:
        name, compress = self.rng.choice([("gz", gzip.compress), ("zst", zstd.compress)])
        data = compress(self.source.read_bytes())
        archive = self.source.with_name(f"in.jsonl.{name}")
        archive.write_bytes(data[: self.rng.randrange(len(data))])
        error = self.bench.run(archive, self.output, expected=[2])
        expect(archive.name in error, f"the file is not named: {error[-500:]}")
        self.output.unlink(missing_ok=True)

    def one_signal(self) -> None:
        self._signal(1)

    def two_signals(self) -> None:
        self._signal(2)

    def _signal(self, times: int) -> None:
        process = self.bench.start(self.source, self.output)
        wait_for_answers(process, self.output)
        time.sleep(0.5 * self.rng.random())
        begin = time.monotonic()
        for _ in range(times):
            process.send_signal(self.rng.choice([signal.SIGINT, signal.SIGTERM]))
            time.sleep(0.3 * self.rng.random())
        status, error = self.bench.end(process)
        expect(status in (0, 130), f"status {status}: {error[-500:]}")
        expect(time.monotonic() - begin < 10, "it took more than 10 seconds to stop")


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """100 faults at scale 1, of every kind in turn."""
    room = bench.room("faults")
    source = "".join(json.dumps(line) + "\n" for line in mixed(rng, LINES)).encode()
    (room / "in.jsonl").write_bytes(source)
    bench.run(room / "in.jsonl", room / "whole.jsonl", expected=[0])
    whole = answers(room / "whole.jsonl")
    kinds: list[Callable[[Fault], None]] = [
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
    ]
    count, done = round(100 * scale), Counter[str]()
    for i in range(max(count, len(kinds))):
        fault = Fault(bench, rng, room, source)
        kind = kinds[i % len(kinds)]
        kind(fault)
        bench.run(fault.source, fault.output, expected=[0])
        same(answers(fault.output), whole)
        done[kind.__name__] += 1
        for path in room.glob("out.jsonl*"):
            path.unlink()
    return {"faults": sum(done.values()), "lost or doubled": 0, "differing": 0, "kinds": done}
