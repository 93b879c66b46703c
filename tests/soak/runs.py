"""Jobs as processes of their own: started, killed, and looked at afterwards."""

import json
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.jobs import models_of, options_of

TOGETHER = 2  # jobs at a time
LONGEST = 300.0  # seconds in which every command must have ended
FAST_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class SoakError(AssertionError):
    """Something was lost, doubled, different, hung or crashed."""


def expect(true: bool, what: str) -> None:
    """Raises SoakError unless it is true."""
    if not true:
        raise SoakError(what)


class Run:
    """A command that was started.

    Args:
        log: for what it writes to the terminal.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    @property
    def number(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def said(self) -> str:
        """What it has written to the terminal."""
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Status and error output; raises SoakError if it does not end, or ends with a traceback."""
        try:
            status = self._process.wait(LONGEST)
        except subprocess.TimeoutExpired as expired:
            self._process.kill()
            self._process.wait()
            raise SoakError(f"a command hung; it had said: {self.said[-2000:]}") from expired
        expect("Traceback" not in self.said, f"a command ended with a traceback: {self.said[-2000:]}")
        return status, self.said

    def until(self, true: Callable[[], bool]) -> None:
        """Waits until something is true, or the command has ended."""
        deadline = time.monotonic() + LONGEST
        while not self.ended and not true():
            expect(time.monotonic() < deadline, f"nothing happened; it had said: {self.said[-2000:]}")
            time.sleep(0.01)

    def until_it_writes(self, output: Path) -> None:
        """Waits until it has written more answers, or has ended."""
        size = lambda: output.stat().st_size if output.exists() else 0
        before = size()
        self.until(lambda: size() > before)


class Bench:
    """A directory for jobs of one tiny pair, whose programs are compiled once.

    Attributes:
        pair: `target`, with a tokenizer, and `drafter`.
        plain: the target alone; jobs of token ids without a drafter begin soonest.
    """

    def __init__(self, directory: Path):
        self.directory, self.pair, self.plain = directory, directory / "pair", directory / "plain"
        kept = {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILER} | kept

    def room(self, name: str) -> Path:
        """A new folder."""
        room = self.directory / name
        room.mkdir()
        return room

    def start(
        self,
        source: Path,
        output: Path,
        *more: str,
        plain: Path | None = None,
        wrap: Sequence[str] = (),
        environment: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Run:
        """Starts a job.

        Args:
            plain: a target that answers without a drafter, instead of the pair.
            wrap: the first words of its command, before its options.
            environment: variables besides.
        """
        models = ["--target", str(plain), "--no-speculation"] if plain else models_of(self.pair)
        module = list(wrap) or [sys.executable, "-m", "dflash_jax.serve"]
        command = [*module, *models, *options_of([str(source)], output), "--batch-size", "4", *more]
        return Run(command, self.environment | environment, output.with_name(output.name + ".log"))

    def run(self, source: Path, output: Path, *more: str, expected: Sequence[int] = (0, 1), **how: Any) -> str:
        """Runs a job to its end, and returns what it said; raises SoakError for another status."""
        status, error = self.start(source, output, *more, **how).wait()
        expect(status in expected, f"status {status}, expected {list(expected)}: {error[-2000:]}")
        return error


def answers(path: Path) -> dict[str, Any]:
    """What the records of an output say, by id; raises SoakError if one is there twice."""
    found: dict[str, Any] = {}
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        name = str(record.get("custom_id", record["id"]))
        expect(name not in found, f"{name} has two records")
        found[name] = _lasting(record)
    return found


def _lasting(record: dict[str, Any]) -> Any:
    """A record without what may change from run to run: names, times, how the steps went, last digits."""
    if record.get("error"):
        return record["error"]["code"]
    if "custom_id" in record:
        return [choice.get("text", choice.get("message")) for choice in record["response"]["body"]["choices"]]
    samples = record.get("samples") or record.get("turns") or [record]
    return [(one["token_ids"], one["text"], one["finish_reason"]) for one in samples]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises SoakError unless both hold the same answers."""
    expect(found.keys() == expected.keys(), f"lost or invented: {sorted(found.keys() ^ expected.keys())[:5]}")
    differing = [name for name in found if found[name] != expected[name]]
    expect(not differing, f"{len(differing)} answers differ, such as {differing[:5]}")


def mixed(rng: random.Random, count: int, most_tokens: int = 60) -> list[dict[str, Any]]:
    """Good lines of every kind."""
    return [good_line(rng, f"m{i}", most_tokens) for i in range(count)]


def good_line(rng: random.Random, name: str, most_tokens: int = 12) -> dict[str, Any]:
    """A line that can be answered."""
    words = lambda: "".join(rng.choices("abcdefgh ,.?", k=rng.randint(1, 40)))
    settings: dict[str, Any] = {"temperature": rng.choice([0, 0.7, 1.5])}
    for field, value in (
        ("top_p", rng.choice([0.5, 0.9, 1])),
        ("top_k", rng.randint(1, 30)),
        ("min_p", 0.05),
        ("repetition_penalty", 1.3),
        ("presence_penalty", -0.5),
        ("frequency_penalty", 0.5),
        ("seed", rng.randint(0, 2**31 - 1)),
        ("stop", rng.choice(["a", ["b ", ".,"]])),
        ("n", rng.randint(1, 3)),
    ):
        if rng.random() < 0.2:
            settings[field] = value
    most = rng.randint(1, most_tokens)
    kind = rng.choice(["prompt", "messages", "prompt_token_ids", "turns", "chat", "text"])
    if kind in ("chat", "text"):
        asked = {"messages": [{"role": "user", "content": words()}]} if kind == "chat" else {"prompt": words()}
        url = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = asked | settings | {"max_tokens": most}
        return {"custom_id": name, "method": "POST", "url": url, "body": body}
    if kind == "turns":
        settings.pop("n", None)
    asked = {
        "prompt": words(),
        "messages": [{"role": "user", "content": words()}],
        "prompt_token_ids": rng.choices(range(60), k=rng.randint(1, 40)),
        "turns": [words() for _ in range(rng.randint(1, 3))],
    }[kind]
    return {"id": name, kind: asked, "max_new_tokens": most} | settings


def token_lines(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Good lines of token ids."""
    return [
        {
            "id": f"t{i}",
            "prompt_token_ids": rng.choices(range(60), k=rng.randint(1, 30)),
            "max_new_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "n": rng.choice([1, 1, 2]),
        }
        for i in range(count)
    ]
