"""Constraints made to be expensive, and what each takes:

    python -m tests.constraints.hostile [--count 10000] [--first 0] [--tokenizer DIRECTORY]

Each is prepared in a process of its own. Printed are the seconds of CPU and the memory that it adds: the median, the
99th percentile and the most, with the seeds that took most; and how many are refused, by code. The exit status is 1 if
one fails in another way, or takes longer than a minute.
"""

import argparse
import collections
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dflash_jax.constraints import json_schema, regex
from dflash_jax.constraints.constraint import Constraint, prepared
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.tokenizer import vocabulary_of
from dflash_jax.vocabulary import load_tokenizer
from tests.fakes import schemas, vocabulary

MOST_SHOWN = 5
LONGEST = 60  # seconds of a constraint
FAILED = "failed"


def hostile(rng):
    """A constraint with too much of something."""
    kind, n = rng.randrange(14), rng.choice([3, 30, 300, 3000])
    text = {"type": "string"}
    if kind == 0:
        return regex(f"(a|b)*a(a|b){{{n}}}")
    if kind == 1:
        return regex("(" * min(n, 99) + "a*" + ")*" * min(n, 99))
    if kind == 2:
        return regex("|".join(f".*{rng.randrange(10**6)}.*" for _ in range(min(n, 300))))
    if kind == 3:
        return regex(f"([^a]{{0,{n}}}b){{{rng.randint(1, 50)}}}")
    if kind == 4:
        return json_schema({"enum": [f"{i}" * rng.randint(1, 9) for i in range(n)]})
    if kind == 5:
        names = [f"p{i}" for i in range(min(n, 1000))]
        return json_schema({"type": "object", "properties": dict.fromkeys(names, rng.choice([text, {}]))})
    if kind == 6:
        made = {}
        for _ in range(min(n, 200)):
            made = {rng.choice(["anyOf", "allOf"]): [made, rng.choice([text, {"type": "object"}, {}])]}
        return json_schema(made)
    if kind == 7:
        made = {"type": "integer"}
        for _ in range(min(n, 200)):
            made = {"type": "array", "items": made} if rng.random() < 0.5 else {"properties": {"a": made}}
        return json_schema(made)
    if kind == 8:
        size = min(n, 12)
        refs = [{"$ref": f"#/$defs/{i}"} for i in range(size)]
        whole = {"type": "object", "properties": {f"k{i}": ref for i, ref in enumerate(refs)}}
        return json_schema({"$ref": "#/$defs/0", "$defs": {str(i): whole for i in range(size)}})
    if kind == 9:
        return json_schema({"type": "array", "items": {"type": "string", "maxLength": n}, "maxItems": n})
    if kind == 10:
        return json_schema({"patternProperties": {f"x{i}.*y{i}": {"type": "integer"} for i in range(min(n, 60))}})
    if kind == 11:
        parts = [
            {"type": "string", "pattern": f"{rng.choice('abc')}.{{{i}}}{rng.choice('abc')}"} for i in range(min(n, 40))
        ]
        return json_schema({"allOf": parts})
    if kind == 12:
        return json_schema({"type": "number", "minimum": 10.0 ** -min(n, 300), "maximum": 10.0 ** min(n, 300)})
    return json_schema({"allOf": [schemas.schema(rng) for _ in range(3)]})


class Cost(NamedTuple):
    """Of a constraint: seconds of CPU, memory in MiB, and the code of the error, or `prepared`."""

    seconds: float
    memory: float
    result: str
    seed: int


def cost(constraint: Constraint, seed: int, known, ends) -> Cost:
    """What preparing it costs, in a copy of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LONGEST)  # which ends it
        before, begin, result = peak(), time.process_time(), "prepared"
        try:
            prepared(constraint, known, ends)
        except ConstraintError as error:
            result = error.code
        except Exception:
            traceback.print_exc()
            result = FAILED
        os.write(write, f"{time.process_time() - begin} {peak() - before} {result}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read().split()
    os.waitpid(child, 0)
    if not said or said[2] == FAILED:
        print(f"seed {seed} failed: {constraint.source[:200]}")
    return Cost(float(said[0]), float(said[1]), said[2], seed) if said else Cost(LONGEST, 0.0, FAILED, seed)


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Prepares constraints, and prints what they cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="whose vocabulary to use; by default a small one whose tokens are hard to constrain",
    )
    args = parser.parse_args()
    known, ends = vocabulary.vocabulary(), [vocabulary.END]
    if args.tokenizer is not None:
        tokenizer = load_tokenizer(args.tokenizer)
        known, ends = vocabulary_of(tokenizer, len(tokenizer)), [tokenizer.eos_token_id]
    known.prepare()
    seeds = range(args.first, args.first + args.count)
    costs = [cost(hostile(random.Random(seed)), seed, known, ends) for seed in seeds]
    done = [one for one in costs if one.result == "prepared"]
    seconds, memory = lambda one: one.seconds, lambda one: one.memory
    for name, of, chosen in (
        ("seconds of CPU", seconds, costs),
        ("seconds of CPU of those prepared", seconds, done),
        ("MiB", memory, costs),
    ):
        if not chosen:
            continue
        ordered = sorted(chosen, key=of)
        values = [of(one) for one in ordered]
        print(f"{name}: median {median(values):.3g}, 99% {values[int(0.99 * len(values))]:.3g}, most {values[-1]:.3g}")
        print("  most:", ", ".join(f"{of(one):.3g} (seed {one.seed}, {one.result})" for one in ordered[-MOST_SHOWN:]))
    print(dict(collections.Counter(one.result for one in costs).most_common()))
    return int(any(one.result == FAILED for one in costs))


if __name__ == "__main__":
    sys.exit(main())
