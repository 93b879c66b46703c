"""The attack of `python -m tests.soak`, with counts so small that it takes less than a minute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attacks", "counts"),
    [
        pytest.param(
            ["fuzz", "faults"],
            [{"lines": 20}, {"faults": 1, "kinds": {"emptied_output": 1}}],
            marks=pytest.mark.exhaustive,
        ),
        (["kills"], [{"lost or doubled": 0, "differing": 0}]),
        (["server"], [{"ended": {"in progress": 16, "answered": 16}}]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_a_little_of_every_attack(attacks, counts):
    command = [sys.executable, "-m", "tests.soak", "--scale", "0.001", "--only", *attacks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.partition(": ") for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == attacks
    for (_, _, figures), expected in zip(found, counts, strict=True):
        figures, _ = json.JSONDecoder().raw_decode(figures)
        for name, value in expected.items():
            of = figures[name]
            assert (of.items() >= value.items()) if isinstance(value, dict) else of == value
