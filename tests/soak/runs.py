"""Jobs as processes of their own: started, killed, and looked at afterwards."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.jobs import command

LONGEST = 120.0  # seconds in which every command must have ended


class SoakError(AssertionError):
    """Something was lost, doubled, different, hung or crashed."""


def expect(true: bool, what: str) -> None:
    """Raises SoakError unless it is true."""
    if not true:
        raise SoakError(what)


class Bench:
    """A directory for jobs of one tiny pair, whose programs are compiled once."""

    def __init__(self, directory: Path):
        self.directory, self.pair = directory, directory / "pair"
        self.environment = os.environ | {"XDG_CACHE_HOME": str(directory / "cache"), "JAX_PLATFORMS": "cpu"}

    def room(self, name: str) -> Path:
        """A new folder."""
        room = self.directory / name
        room.mkdir()
        return room

    def start(self, source: Path, output: Path, *more: str, wrap: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Starts a job; `wrap` are the first words of its command, before `-m`."""
        module = list(wrap) or [sys.executable, "-m", "dflash_jax.serve"]
        arguments = [*module, *command(self.pair, [str(source)], output, "--batch-size", "4", *more)]
        return subprocess.Popen(arguments, stderr=subprocess.PIPE, env=self.environment, text=True, errors="replace")

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Status and error output; raises SoakError if it does not end."""
        try:
            _, error = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired as expired:
            process.kill()
            _, error = process.communicate()
            raise SoakError(f"a command hung; it had said: {error[-2000:]}") from expired
        expect("Traceback" not in error, f"a command ended with a traceback: {error[-2000:]}")
        return process.returncode, error

    def run(self, source: Path, output: Path, *more: str, expected: Sequence[int] = (0, 1)) -> str:
        """Runs a job to its end; raises SoakError for another status."""
        status, error = self.end(self.start(source, output, *more))
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


def wait_for_answers(process: subprocess.Popen[str], output: Path) -> None:
    """Waits until a job has written something more, or has ended."""
    begin = output.stat().st_size if output.exists() else 0
    deadline = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < deadline:
        if output.exists() and output.stat().st_size > begin:
            return
        time.sleep(0.01)
