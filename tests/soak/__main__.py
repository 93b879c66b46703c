"""`python -m tests.soak`: damaged files, malformed lines, kills, faults and hostile clients, by the random numbers of a
seed.

A tenth of the full counts by default. Ends with status 1 if anything was lost, doubled, different, hung or crashed.
"""

import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tests import damage, tiny
from tests.soak import faults, fuzz, kills, server
from tests.soak.runs import Bench

ATTACKS: dict[str, Callable[[Bench, random.Random, float], dict[str, object]]] = {
    "damage": damage.attack,
    "fuzz": fuzz.attack,
    "kills": kills.attack,
    "faults": faults.attack,
    "server": server.attack,
}


@dataclass(frozen=True)
class Options:
    """Options of `python -m tests.soak`.

    Attributes:
        scale: share of the full counts: 300 rounds of damaged files, 10,000 lines, 60 kills, 150 faults, 2,000 requests
        minutes: after them, this long a load of the server
        seed: of all random numbers
        only: these attacks
    """

    scale: float = 0.1
    minutes: float = 0.0
    seed: int = 0
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="|".join(ATTACKS))] = tuple(ATTACKS)


def main() -> int:
    options = tyro.cli(Options, prog="python -m tests.soak")
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        tiny.write_target(bench.pair / "target", tiny.target_config())
        tiny.write_tokenizer(bench.pair / "target")
        tiny.write_drafter(bench.pair / "drafter", tiny.drafter_config())
        tiny.write_target(bench.plain, tiny.target_config())
        attacks = {name: ATTACKS[name] for name in options.only}
        if options.minutes:
            attacks["load"] = lambda bench, rng, scale: server.load_for(bench, rng, 60 * options.minutes)
        for name, attack in attacks.items():
            begin = time.perf_counter()
            try:
                figures = attack(bench, random.Random(f"{options.seed} {name}"), options.scale)
            except Exception:
                traceback.print_exc()
                print(f"{name}: FAILED", flush=True)
                failed = True
            else:
                print(f"{name}: {json.dumps(figures)}   {time.perf_counter() - begin:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
