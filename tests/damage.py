"""Damaged files, made at random, and what every reader must make of them: a result, or one line that names the file."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_jax import load_drafter, load_target
from dflash_jax.checkpoint import gguf
from dflash_jax.checkpoint.fingerprint import fingerprint
from dflash_jax.data.datasets import load_dataset
from dflash_jax.files import LONGEST_LINE, reading
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.jobs import parts
from dflash_jax.infer.jobs.inputs import input_lines
from dflash_jax.infer.jobs.journal import Journal, check_settings
from dflash_jax.infer.jobs.lines import read_lines
from dflash_jax.infer.jobs.records import record_id, rewrite_in_order
from dflash_jax.infer.text import Text
from dflash_jax.loading import target_config
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import read_settings
from dflash_jax.train.data import read_examples
from dflash_jax.train.plot import read_metrics
from dflash_jax.train.step import TrainState
from dflash_jax.vocabulary import decodable_tokens
from tests import gguf_files, tiny
from tests.soak.runs import Bench

DEEP = b"[" * 100_000
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1.5, 1e308, float("nan"), float("inf"), "", "a\nb",
    "\ud800", "x" * 5000, [], {}, [[]], [None], ["\udfff"], [2**40], [1.5], {"a": {"b": []}}, [{"id": None}], "../x",
]  # fmt: skip

Reader = Callable[[Path], object]


def bytes_of(rng: random.Random, whole: bytes) -> bytes:
    """A file with one fault in its bytes."""
    at = rng.randrange(len(whole) + 1)
    kind = rng.randrange(7)
    if kind == 0:
        return whole[:at]
    if kind == 1:
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 2:
        return rng.choice([b"", b"\n", b"\0" * 9, b"\xff\xfe{}", b"\xef\xbb\xbf" + whole, b"[]", b"null", b'"a"', b"7"])
    if kind == 3:
        return rng.choice([DEEP, b'{"a":' * 100_000, whole[:at] + DEEP + whole[at:]])
    if kind == 4:
        return whole[:at] + rng.choice([b"\xff", b"\0", b"\n", b"\r\n", b"{", b'"', b"9" * 5000]) + whole[at:]
    if kind == 5:
        return whole[:at] + whole[at + rng.randint(1, 50) :]
    return rng.randbytes(rng.randint(1, 200))


def values_of(rng: random.Random, whole: bytes) -> bytes:
    """JSON, or lines of it, with a value of another kind at a place that may lie deep inside, or an object's key
    missing or new."""
    lines = whole.splitlines(keepends=True) if b"}\n{" in whole else [whole]
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    places = list(_places(value))
    where, key = rng.choice(places) if places else (None, None)
    kind = rng.randrange(10)
    if where is None or kind == 0:
        value = rng.choice(VALUES)
    elif kind == 1 and isinstance(where, dict):
        del where[key]
    elif kind == 2 and isinstance(where, dict):
        where[rng.choice(["new", "a\nb", "n" * 10**6, "\ud800", ""])] = rng.choice(VALUES)
    else:
        where[key] = rng.choice(VALUES)
    lines[at] = json.dumps(value).encode() + (b"\n" if len(lines) > 1 else b"")
    return b"".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list inside, with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def check(reader: Reader, place: Path) -> str:
    """What the reader says of a damaged file: nothing if it can be read.

    Raises:
        AssertionError: it raises something else than it should, or more than a line, or one that names no file.
    """
    try:
        reader(place)
    except (ValueError, OSError) as error:
        line = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        assert line.isprintable(), f"no line: {line[:500]!r}"
        assert str(place) in line, f"names no file: {line[:500]!r}"
        assert len(line) <= LONGEST_LINE, f"{len(line)} characters: {line[:500]!r}"
        return line
    return ""


def _journal(path: Path) -> None:
    with Journal(path, {"seed": 0, "target": "t"}, record_id) as book:
        if "new" not in book.done:
            book.append({"id": "new"})


def _shared(path: Path) -> None:
    check_settings(path, {"seed": 0, "target": "t"})
    parts.answered(path, 0, {}.get)
    rewrite_in_order(path, {}.get)


def _input(path: Path) -> None:
    with reading(path):
        lines = read_lines(input_lines([str(path)]), Text(""), SamplingParams())
    for line in lines:
        assert (line.request is None) != (line.error is None)


STATE = TrainState(jnp.asarray(4), {"a": jnp.arange(300.0)}, {"count": jnp.asarray(4)})


def _checkpoint(place: Path) -> None:
    checkpoints = Checkpoints(place)
    found = checkpoints.restore(STATE)
    checkpoints.close()
    assert np.array_equal(found.params["a"], STATE.params["a"])


class Case:
    """A file or directory, the files in it that are damaged, and how it is read.

    Args:
        make: writes it whole under a path.
        reader: reads it.
        files: those to damage, by their paths inside; none where it is a single file.
        weight: how often it is taken.
    """

    def __init__(self, make: Callable[[Path], object], reader: Reader, files: tuple[str, ...] = (), weight: int = 4):
        self.make, self.reader, self.files, self.weight = make, reader, files, weight


def _lines(*rows: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _job(path: Path) -> None:
    with Journal(path, {"seed": 0, "target": "t"}, record_id) as book:
        for i in range(4):
            book.append({"id": f"r{i}", "error": None if i else {"code": "x"}, "token_ids": [1, 2]})


def _saved(place: Path) -> None:
    checkpoints = Checkpoints(place)
    for step in (2, 4):
        checkpoints.save(STATE.replace(step=jnp.asarray(step)))
    checkpoints.close()


def _target(place: Path) -> None:
    tiny.write_target(place, tiny.target_config())
    (place / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


def cases() -> dict[str, Case]:
    answer = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5], "loss_mask": [0, 0, 1, 1, 1], "anchors": [2]}
    metrics = {"step": 1, "loss": 1.5, "teacher_forced_tau": 1.0}, {"step": 1, "tau": 1.2}
    line = {"prompt_token_ids": [1, 2], "temperature": 0.5, "top_k": 3, "stop": ["a"], "n": 2}
    config = "config.json", "generation_config.json"
    text = "tokenizer.json", "tokenizer_config.json"
    settings = {"block_size": 4, "anchors": 7, "learning_rate": 1e-3, "drafter": "dflash", "kl": 0.5}
    return {
        "lines": Case(_lines(*({"id": str(i)} | line for i in range(3))), _input),
        "output": Case(_job, _journal),
        "parts": Case(_job, _shared),
        "examples": Case(_lines(*[answer] * 3), lambda path: read_examples(path, 16, 64)),
        "settings": Case(_lines(settings), read_settings, weight=1),
        "data.jsonl": Case(_lines({"turns": ["a"]}, {"prompt": "b"}), lambda path: load_dataset(str(path))),
        "run": Case(lambda place: _lines(*metrics)(_made(place) / "metrics.jsonl"), read_metrics, ("metrics.jsonl",)),
        "config": Case(_target, lambda place: target_config(str(place)), ("config.json",)),
        "target": Case(_target, load_target, (*config, "model.safetensors"), weight=1),
        "drafter": Case(
            lambda place: tiny.write_drafter(place, tiny.drafter_config()),
            load_drafter,
            ("config.json", "model.safetensors"),
            weight=1,
        ),
        "fingerprint": Case(_target, fingerprint, (*config, "model.safetensors")),
        "vocabulary": Case(tiny.write_tokenizer, lambda place: decodable_tokens(place, 80), text),
        "text": Case(tiny.write_tokenizer, lambda place: Text(str(place)), text, weight=1),
        "model.gguf": Case(gguf_files.write, gguf.unpack, weight=1),
        "checkpoints": Case(_saved, _checkpoint, ("4",), weight=1),
    }


def _made(place: Path) -> Path:
    place.mkdir()
    return place


class Damage:
    """Cases in a folder, whole; each damaged copy lies in the folder `now`, and is read there."""

    def __init__(self, folder: Path):
        self.folder, self.cases = folder, cases()
        (folder / "whole").mkdir()
        for name, case in self.cases.items():
            case.make(folder / "whole" / name)
            if error := check(case.reader, self._copied(name)):
                raise AssertionError(f"the undamaged {name} cannot be read: {error}")

    def _copied(self, name: str) -> Path:
        shutil.rmtree(self.folder / "now", ignore_errors=True)
        (self.folder / "now").mkdir()
        for part in (name, f"{name}.settings.json"):
            path, copy = self.folder / "whole" / part, self.folder / "now" / part
            if path.is_dir():
                shutil.copytree(path, copy)
            elif path.exists():
                shutil.copy(path, copy)
        return self.folder / "now" / name

    def one(self, name: str, rng: random.Random) -> str:
        """Damages one file of a case; returns what its reader says."""
        place, case = self._copied(name), self.cases[name]
        files = [place / rng.choice(case.files)] if case.files else [place]
        if files[0].is_dir():
            files = sorted(path for path in files[0].rglob("*") if path.is_file())
        elif name in ("output", "parts"):
            files.append(place.with_name(f"{name}.settings.json"))
        path = rng.choice(files)
        whole, structured = path.read_bytes(), path.suffix in (".json", ".jsonl", "")
        try:
            damaged = (values_of if structured and rng.random() < 0.6 else bytes_of)(rng, whole)
        except ValueError:  # no JSON
            damaged = bytes_of(rng, whole)
        path.write_bytes(damaged)
        if rng.random() < 0.02:
            path.unlink()
        try:
            return check(case.reader, place)
        except Exception as error:
            kept = self.folder / "kept"
            if not kept.exists():
                shutil.copytree(self.folder / "now", kept)
            raise AssertionError(f"{name}, {path.name}: {type(error).__name__}: {error}; see {kept}") from error


def run(folder: Path, rng: random.Random, rounds: int) -> dict[str, dict[str, int]]:
    """So many rounds, in each of which every case is damaged as often as its weight says; returns how many were read
    and how many refused."""
    damage = Damage(folder)
    counts = {name: {"read": 0, "refused": 0} for name in damage.cases}
    for _ in range(rounds):
        for name, case in damage.cases.items():
            for _ in range(case.weight):
                counts[name]["refused" if damage.one(name, rng) else "read"] += 1
    return counts


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """300 rounds at scale 1."""
    return {"files": run(bench.room("damage"), rng, max(1, round(300 * scale)))}
