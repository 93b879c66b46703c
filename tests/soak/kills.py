"""Jobs killed at random moments and begun again: each answer once, and the same."""

import json
import random
import time
from pathlib import Path

from tests.soak.runs import Bench, answers, expect, mixed, same, wait_for_answers


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """60 kills at scale 1: half of a single process, half of several that share a job."""
    room, left = bench.room("kills"), round(60 * scale)
    source = room / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in mixed(rng, 300)))
    bench.run(source, room / "whole.jsonl")
    whole, rounds, kills = answers(room / "whole.jsonl"), 0, 0
    while kills < left:
        output = room / f"out{rounds}.jsonl"
        kills += _one_round(bench, rng, source, output, left - kills, shared=rounds % 2 == 1)
        same(answers(output), whole)
        beside = {path.name for path in room.glob(f"{output.name}*")}
        expect(beside == {output.name, f"{output.name}.settings.json"}, f"files are left: {sorted(beside)}")
        rounds += 1
    return {"kills": kills, "jobs ended": rounds, "answers": rounds * len(whole), "lost or doubled": 0, "differing": 0}


def _one_round(bench: Bench, rng: random.Random, source: Path, output: Path, most: int, *, shared: bool) -> int:
    """Runs a job until it ends with some kills on the way; returns how many."""
    kills = 0
    for _ in range(min(most, 5)):
        share = _share(rng) if shared else None
        more = ["--processes", f"{share[0]}/{share[1]}"] if share else []
        written = output.with_name(f"{output.name}.part-{share[0]}-of-{share[1]}") if share else output
        process = bench.start(source, output, *more)
        if rng.random() < 0.75:
            wait_for_answers(process, written)
            time.sleep(rng.random())
        else:
            time.sleep(5 * rng.random())  # perhaps it has not begun
        if process.poll() is None:
            process.kill()
            kills += 1
        process.communicate()
    for i in range(2 if shared else 1):
        bench.run(source, output, *(["--processes", f"{i}/2"] if shared else []))
    return kills


def _share(rng: random.Random) -> tuple[int, int]:
    processes = rng.randint(1, 3)
    return rng.randrange(processes), processes
