"""Jobs killed at random moments and begun again: each answer once, and the same."""

import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak.runs import TOGETHER, Bench, answers, expect, mixed, same


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """60 kills at scale 1: half of a single process, half of several that share a job."""
    room, left = bench.room("kills"), max(1, round(60 * scale))
    source = room / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in mixed(rng, 300)))
    bench.run(source, room / "whole.jsonl")
    whole, rounds, kills = answers(room / "whole.jsonl"), 0, 0

    def one(number: int) -> int:
        output = room / f"out{number}.jsonl"
        own = random.Random(f"{seed} {number}")
        found = _one_round(bench, own, source, output, most, shared=number % 2 == 1)
        same(answers(output), whole)
        beside = {path.name for path in room.glob(f"{output.name}*")}
        kept = {output.name, f"{output.name}.settings.json", f"{output.name}.log"}
        expect(beside == kept, f"files are left: {sorted(beside - kept)}")
        return found

    seed = rng.random()
    with ThreadPoolExecutor(TOGETHER) as pool:
        while kills < left:
            most = min(5, -(-(left - kills) // TOGETHER))
            kills += sum(pool.map(one, range(rounds, rounds + TOGETHER)))
            rounds += TOGETHER
    return {"kills": kills, "jobs ended": rounds, "answers": rounds * len(whole), "lost or doubled": 0, "differing": 0}


def _one_round(bench: Bench, rng: random.Random, source: Path, output: Path, most: int, *, shared: bool) -> int:
    """Runs a job until it ends with some kills on the way; returns how many."""
    kills = 0
    for _ in range(most):
        share = _share(rng) if shared else None
        more = ["--processes", f"{share[0]}/{share[1]}"] if share else []
        written = output.with_name(f"{output.name}.part-{share[0]}-of-{share[1]}") if share else output
        run = bench.start(source, output, *more)
        if rng.random() < 0.75:
            run.until_it_writes(written)
            time.sleep(0.2 * rng.random())
        else:
            time.sleep(5 * rng.random())  # perhaps it has not begun
        kills += not run.ended
        run.signal(signal.SIGKILL)
        run.wait()
    for i in range(2 if shared else 1):
        bench.run(source, output, *(["--processes", f"{i}/2"] if shared else []))
    return kills


def _share(rng: random.Random) -> tuple[int, int]:
    processes = rng.randint(1, 3)
    return rng.randrange(processes), processes
